//! Does a device do what [`Device`] promises? Each step moves data through one part of it and compares
//! with what the host computes. It needs no model, and takes a second on a GPU.

use std::time::Instant;

use cuda_std::U32x4;
use cuda_std::launch::Launch;
use gpu_kernels::kernels::read_sweep::read_sweep;
use gpu_kernels::params::{READ_SWEEP_BLOCK, READ_SWEEP_LOADS};

use super::command::Ring;
use super::device::{Device, DeviceError, Result};
use super::memory::{Buffer, Slice};
use super::staging::{Readback, Staging};

/// How much data the steps move.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Bytes swept by the bandwidth steps.
    pub bytes: usize,
    /// Repetitions of what is timed.
    pub repeats: u32,
}

impl Scale {
    /// For a GPU: past its caches, and a second in all.
    pub const GPU: Scale = Scale { bytes: 512 << 20, repeats: 20 };
    /// For the emulator.
    pub const EMULATED: Scale = Scale { bytes: 96 << 10, repeats: 2 };
}

/// One step of the test.
type Step<D> = fn(&D, Scale) -> Finding;

/// What a step has to tell.
type Finding = std::result::Result<String, Failure>;

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {source}")]
pub struct SelfTestError {
    /// The step's name.
    pub step: &'static str,
    /// What failed.
    pub source: Failure,
}

/// How a step can fail.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The device refused something that it should do.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// An operation of a model could not be run.
    #[error(transparent)]
    Backend(#[from] crate::backend::Error),
    /// It did something else than asked.
    #[error("wrong result: {0}")]
    Wrong(String),
}

/// Runs the steps in order, and tells `report` of each one its name and finding.
///
/// # Errors
/// The first step that fails.
pub fn run<D: Device>(
    device: &D,
    scale: Scale,
    report: &mut dyn FnMut(&str, &str),
) -> std::result::Result<(), SelfTestError> {
    let steps: [(&'static str, Step<D>); 8] = [
        ("memory", memory),
        ("copies", copies),
        ("launch", launch),
        ("events", events),
        ("graph", graph),
        ("staging", staging),
        ("readback", readback),
        ("profile", profile),
    ];
    for (step, run) in steps {
        let finding = run(device, scale).map_err(|source| SelfTestError { step, source })?;
        report(step, &finding);
    }
    Ok(())
}

fn expect(what: &str, holds: bool) -> std::result::Result<(), Failure> {
    if holds { Ok(()) } else { Err(Failure::Wrong(what.to_owned())) }
}

/// Words that differ from their neighbours in every byte.
fn pattern(n: usize, seed: u32) -> Vec<u32> {
    (0..n as u32).map(|i| (i ^ seed).wrapping_mul(0x9e37_79b9).rotate_left(i % 31)).collect()
}

/// Allocates, fills, and reads the ends back.
fn memory<D: Device>(device: &D, scale: Scale) -> Finding {
    let before = device.memory()?;
    for bytes in [0, 1, 4097, scale.bytes] {
        let buffer: Buffer<D, u8> = device.alloc(bytes)?;
        buffer.slice().check_aligned(256)?;
        device.fill_bytes(buffer.slice(), 0xa5)?;
        let ends = [
            device.download_vec(buffer.part(..bytes.min(3))?)?,
            device.download_vec(buffer.part(bytes.saturating_sub(3)..)?)?,
        ];
        expect("a filled buffer", ends.concat().iter().all(|&byte| byte == 0xa5))?;
    }
    // More than there is: some systems back device memory with the host's.
    let wanted = usize::try_from(before.total_bytes.saturating_mul(2)).unwrap_or(usize::MAX);
    let refused = matches!(device.alloc_bytes(wanted), Err(DeviceError::OutOfMemory { .. }));
    expect("an allocation beyond all memory is refused as such", refused)?;
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    Ok(format!("{:.2} of {:.2} GiB free", gib(before.free_bytes), gib(before.total_bytes)))
}

/// Moves odd lengths at odd places: up, across, and down.
fn copies<D: Device>(device: &D, _: Scale) -> Finding {
    let words = pattern(1000, 1);
    let (from, to) = (device.alloc_from(&words)?, device.alloc_zeroed::<u32>(1000)?);
    device.copy(from.part(7..600)?, to.part(301..894)?)?;
    let copied = device.download_vec(to.slice())?;
    expect("the copied words", copied[301..894] == words[7..600])?;
    expect("the words around them", copied[..301].iter().chain(&copied[894..]).all(|&word| word == 0))?;
    expect("a copy onto itself is refused", device.copy(from.part(..10)?, from.part(9..19)?).is_err())?;
    Ok("up, across and down".to_owned())
}

/// A sweep over `x`: XORs of 32 lanes' words each.
fn sweep<D: Device>(device: &D, x: Slice<'_, u32>, sums: Slice<'_, u32>, pdl: bool) -> Result<()> {
    let x = x.cast::<U32x4>()?;
    x.check_aligned(16)?;
    let blocks = x.len().div_ceil((READ_SWEEP_BLOCK * READ_SWEEP_LOADS) as usize);
    sums.check_len("the sums", blocks * (READ_SWEEP_BLOCK / 32) as usize)?;
    let too_long = |_| DeviceError::Range(format!("{} words in one sweep", x.len()));
    let (blocks, n) = (u32::try_from(blocks).map_err(too_long)?, u32::try_from(x.len()).map_err(too_long)?);
    let launch = Launch { pdl, ..Launch::linear(blocks, READ_SWEEP_BLOCK) };
    // SAFETY: one block for READ_SWEEP_BLOCK·READ_SWEEP_LOADS words; `x` has `n` ≥ 1 (an empty grid is
    // refused) words, aligned to 16 bytes, and `sums` one for each warp: all checked above. A dependent
    // launch is safe too: nothing ahead of it in the stream writes `x` without ending first.
    #[expect(unsafe_code, reason = "a launch")]
    unsafe {
        device.launch(read_sweep, launch, (x.ptr(), sums.ptr_mut(), n))
    }
}

/// Buffers for sweeps of `n` words: input, and room for the sums.
fn sweep_buffers<D: Device>(device: &D, words: &[u32]) -> Result<(Buffer<D, u32>, Buffer<D, u32>)> {
    let n_blocks = (words.len() / 4).div_ceil((READ_SWEEP_BLOCK * READ_SWEEP_LOADS) as usize);
    Ok((device.alloc_from(words)?, device.alloc_zeroed(n_blocks * (READ_SWEEP_BLOCK / 32) as usize)?))
}

/// The XOR of everything that a sweep of whole blocks reads. (Lanes past an end read the last word again.)
fn xor(words: &[u32]) -> u32 {
    words.iter().fold(0, |sum, word| sum ^ word)
}

/// Words for a whole number of blocks.
fn whole_blocks(n_blocks: usize) -> usize {
    n_blocks * (READ_SWEEP_BLOCK * READ_SWEEP_LOADS * 4) as usize
}

/// Runs a kernel, plainly and as a dependent launch; and one that must be refused.
fn launch<D: Device>(device: &D, _: Scale) -> Finding {
    let words = pattern(whole_blocks(3), 2);
    let (x, sums) = sweep_buffers(device, &words)?;
    for pdl in [false, true] {
        device.fill_bytes(sums.slice().as_bytes(), 0)?;
        sweep(device, x.slice(), sums.slice(), pdl)?;
        expect("the kernel's sums", xor(&device.download_vec(sums.slice())?) == xor(&words))?;
    }
    let oversized = Launch::linear(1, device.properties().max_threads_per_block + 1);
    let args = (x.slice().cast::<U32x4>()?.ptr(), sums.slice().ptr_mut(), 1);
    // SAFETY: it is refused before it starts.
    #[expect(unsafe_code, reason = "a launch")]
    let refused = unsafe { device.launch(read_sweep, oversized, args) };
    expect("a block of too many threads is refused", refused.is_err())?;
    Ok("plain and dependent".to_owned())
}

/// Times sweeps of device memory.
fn events<D: Device>(device: &D, scale: Scale) -> Finding {
    let n = (scale.bytes / 4).next_multiple_of(whole_blocks(1));
    let x: Buffer<D, u32> = device.alloc_zeroed(n)?;
    let sums: Buffer<D, u32> = device.alloc_zeroed(n.div_ceil(whole_blocks(1)) * (READ_SWEEP_BLOCK / 32) as usize)?;
    let mut best_us = f64::INFINITY;
    for _ in 0..scale.repeats {
        let start = device.record()?;
        sweep(device, x.slice(), sums.slice(), false)?;
        let end = device.record()?;
        device.wait(&end)?;
        expect("the event is done after waiting", device.is_done(&end)?)?;
        best_us = best_us.min(device.elapsed_us(&start, &end)?);
    }
    Ok(format!("a sweep of device memory reads {:.0} GB/s", (n * 4) as f64 / best_us / 1e3))
}

/// Captures a fill and two launches, changes the input, and replays: the replay sees the change.
fn graph<D: Device>(device: &D, scale: Scale) -> Finding {
    if !device.supports_graphs() {
        return Ok("not supported by this device".to_owned());
    }
    let (x, sums) = sweep_buffers(device, &pattern(whole_blocks(2), 3))?;
    let graph = device.capture(&mut || {
        device.fill_bytes(sums.slice().as_bytes(), 0xff)?;
        sweep(device, x.slice(), sums.slice(), false)?;
        sweep(device, x.slice(), sums.slice(), true)
    })?;
    expect("capturing ran nothing", xor(&device.download_vec(sums.slice())?) == 0)?;
    let words = pattern(whole_blocks(2), 4);
    device.upload(x.slice(), &words)?;
    let start = device.record()?;
    for _ in 0..scale.repeats {
        // SAFETY: `x` and `sums` live until the end of this function, which waits for the replay.
        #[expect(unsafe_code, reason = "a replay")]
        unsafe {
            device.replay(&graph)?;
        }
    }
    let end = device.record()?;
    expect("the replay's sums", xor(&device.download_vec(sums.slice())?) == xor(&words))?;
    let us = device.elapsed_us(&start, &end)? / f64::from(scale.repeats);
    let broken = device.capture(&mut || device.synchronize());
    expect("waiting inside a capture is refused", broken.is_err())?;
    device.synchronize()?;
    Ok(format!("a fill and two launches replay in {us:.1} us"))
}

/// Streams through pinned memory, and compares.
fn staging<D: Device>(device: &D, scale: Scale) -> Finding {
    let words = pattern((scale.bytes / 4).max(5), 5);
    let from = bytemuck::cast_slice::<u32, u8>(&words);
    let to: Buffer<D, u8> = device.alloc(from.len())?;
    // An odd chunk, so that the last one is a part.
    let mut staging = Staging::new(device, (from.len() / 9).max(1) + 1, 3)?;
    let mut best_s = f64::INFINITY;
    for _ in 0..3 {
        let start = Instant::now();
        staging.upload(device, to.slice(), from)?;
        staging.finish(device)?;
        best_s = best_s.min(start.elapsed().as_secs_f64());
    }
    expect("the staged bytes", device.download_vec(to.slice())? == from)?;
    Ok(format!("pinned upload {:.1} GB/s", from.len() as f64 / best_s / 1e9))
}

/// Runs steps ahead of the host and reads their results in order.
fn readback<D: Device>(device: &D, _: Scale) -> Finding {
    let value: Buffer<D, u32> = device.alloc_zeroed(3)?;
    let mut slots: Readback<D, u32> = Readback::new(device, 3, 2)?;
    let mut ring = Ring::new(2);
    let (mut result, mut received) = (Vec::new(), Vec::new());
    for step in 0..5u8 {
        device.fill_bytes(value.slice().as_bytes(), step)?;
        slots.push(device, value.part(usize::from(step % 2)..)?)?;
        ring.commit_async(device)?;
        if slots.n_in_flight() == 2 {
            slots.pop(device, &mut result)?;
            received.push(result.clone());
        }
    }
    while slots.pop(device, &mut result)? {
        received.push(result.clone());
    }
    ring.commit_and_wait(device)?;
    expect("no step is in flight at the end", ring.release_completed(device)? == 0)?;
    let expected = (0..5u32).map(|step| vec![step * 0x0101_0101; 3 - (step as usize % 2)]);
    expect("the steps' results in order", received.iter().cloned().eq(expected))?;
    Ok(format!("{} steps, two in flight", received.len()))
}

/// Times launches by kernel.
fn profile<D: Device>(device: &D, scale: Scale) -> Finding {
    let (x, sums) = sweep_buffers(device, &pattern(whole_blocks(1), 6))?;
    device.set_profiling(true);
    let launched = (0..scale.repeats).try_for_each(|_| sweep(device, x.slice(), sums.slice(), false));
    let profile = device.take_profile();
    device.set_profiling(false);
    launched?;
    let by_time = profile?.by_time();
    let [(kernel, time)] = by_time[..] else {
        return Err(Failure::Wrong(format!("a profile of {} kernels", by_time.len())));
    };
    expect("the profiled launches", time.n_launches == u64::from(scale.repeats))?;
    Ok(format!("a small {kernel} takes {:.1} us", time.total_us / time.n_launches as f64))
}
