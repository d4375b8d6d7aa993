//! How fast the kernels are, against the memory's own speed.
//!
//! Each measurement of a weight format is over tensors that are larger than the second-level cache, and says which share of
//! the bandwidth of [`read_sweep`] it reaches: that is what decoding is bound by.

mod attention;
mod delta_net;
mod ffn;
mod grouped;
mod layers;
mod products;

use bytemuck::Pod;
use gpu_kernels::blocks::GgmlType;
use serde::Serialize;

use super::{Experts, Matrix, Matvec, Q8, Result, matvec, matvec_q8, quantize_q8, read_sweep, takes_q8};
use crate::gpu::device::Device;
use crate::gpu::memory::{Buffer, Slice};

/// One kernel at one shape.
#[derive(Clone, Debug, Serialize)]
pub struct Measurement {
    /// The kernel's operation and form.
    pub op: &'static str,
    /// The weight type.
    pub ty: &'static str,
    /// What was multiplied: rows, columns, and how.
    pub shape: String,
    /// Bytes that one launch has to move.
    pub bytes: u64,
    /// Median time of one launch.
    pub us: f64,
    /// `bytes / us`, in units of 1e9 bytes a second.
    pub gb_per_s: f64,
    /// The same as a share of the read sweep's.
    pub share: f64,
    /// Of a product of many tokens: multiplications and additions, in units of 1e12 a second.
    pub tera_ops_per_s: Option<f64>,
}

/// Experts, and experts of a token, of the routed measurements: the reference model's.
const N_EXPERT: u32 = 256;
const N_USED: u32 = 8;

/// Operands that all measurements share, and their results.
struct Bench<'d, D: Device> {
    device: &'d D,
    /// Random bytes, as weights of any type.
    weights: Buffer<D, u8>,
    x: Buffer<D, f32>,
    qs: Buffer<D, i8>,
    d: Buffer<D, f32>,
    s: Buffer<D, f32>,
    y: Buffer<D, f32>,
    repeats: usize,
    sweep_gb_per_s: f64,
    results: Vec<Measurement>,
}

/// Times every kernel, those that read weights on tensors of about `weight_bytes`, each `repeats` times.
///
/// # Errors
/// Where memory does not suffice, or the device fails.
pub fn bench<D: Device>(device: &D, weight_bytes: usize, repeats: usize) -> Result<Vec<Measurement>> {
    let mut bench = Bench::new(device, weight_bytes, repeats)?;
    bench.sweep()?;
    for &ty in GgmlType::ALL {
        bench.dense(ty, 2048)?;
    }
    // The lengths that the models have besides: attention and delta-net outputs, gpt-oss, expert down.
    for (ty, cols) in [
        (GgmlType::Q8_0, 4096),
        (GgmlType::Mxfp4, 2880),
        (GgmlType::Q8_0, 2880),
        (GgmlType::Q5K, 512),
        (GgmlType::Q8_0, 512),
    ] {
        bench.dense(ty, cols)?;
    }
    for (ty, rows, cols) in [(GgmlType::Q4K, 512, 2048), (GgmlType::Q5K, 2048, 512), (GgmlType::Q8_0, 512, 2048)] {
        bench.routed(ty, rows, cols, false)?;
        bench.routed(ty, rows, cols, true)?;
    }
    bench.quantize(2048)?;
    bench.products()?;
    bench.feed_forward()?;
    bench.layers()?;
    Ok(bench.results)
}

impl<'d, D: Device> Bench<'d, D> {
    fn new(device: &'d D, weight_bytes: usize, repeats: usize) -> Result<Self> {
        let weights = device.alloc(weight_bytes.next_multiple_of(1 << 16))?;
        fill_random(device, weights.slice())?;
        // Expert down takes a row of `x` for each route; no row is longer than 4096.
        let n = (N_USED * 4096) as usize;
        let y_len = weight_bytes / 32;
        Ok(Bench {
            device,
            weights,
            x: device.alloc_zeroed(n)?,
            qs: device.alloc_zeroed(n)?,
            d: device.alloc_zeroed(n / 16)?,
            s: device.alloc_zeroed(n / 16)?,
            y: device.alloc_zeroed(y_len.max((N_USED * 4096) as usize))?,
            repeats,
            sweep_gb_per_s: f64::NAN,
            results: Vec::new(),
        })
    }

    /// Median microseconds of `run`, which queues work, after a first run that is not counted.
    fn time(&self, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
        run()?;
        let mut times = Vec::with_capacity(self.repeats);
        for _ in 0..self.repeats.max(1) {
            let start = self.device.record()?;
            run()?;
            let end = self.device.record()?;
            self.device.wait(&end)?;
            times.push(self.device.elapsed_us(&start, &end)?);
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    fn push(&mut self, op: &'static str, ty: &'static str, shape: String, bytes: u64, us: f64) {
        let gb_per_s = bytes as f64 / us / 1e3;
        if op == "read_sweep" {
            self.sweep_gb_per_s = gb_per_s;
        }
        let share = gb_per_s / self.sweep_gb_per_s;
        self.results.push(Measurement { op, ty, shape, bytes, us, gb_per_s, share, tera_ops_per_s: None });
    }

    /// [`push`](Self::push) of a product of these sizes.
    fn push_product(
        &mut self,
        op: &'static str,
        ty: &'static str,
        shape: String,
        bytes: u64,
        us: f64,
        sizes: [u32; 3],
    ) {
        self.push(op, ty, shape, bytes, us);
        if let Some(last) = self.results.last_mut() {
            last.tera_ops_per_s = Some(2.0 * sizes.iter().map(|n| f64::from(*n)).product::<f64>() / us / 1e6);
        }
    }

    fn sweep(&mut self) -> Result<()> {
        let bytes = self.weights.len() as u64;
        let us = self.time(|| {
            // `y` has a word for every 32 bytes of weights; the sums want one for every 4096.
            read_sweep(self.device, self.weights.slice(), self.y.slice().cast()?).map(drop)
        })?;
        self.push("read_sweep", "", format!("{} MiB", bytes >> 20), bytes, us);
        Ok(())
    }

    fn q8(&self, cols: u32, rows: u32) -> Result<Q8<'_>> {
        let n = (cols * rows) as usize;
        let (qs, d, s) = (self.qs.part(..n)?, self.d.part(..n / 16)?, self.s.part(..n / 16)?);
        Ok(Q8 { qs, d, s, cols })
    }

    /// One token, one large matrix, both forms.
    fn dense(&mut self, ty: GgmlType, cols: u32) -> Result<()> {
        let row_bytes = cols as usize / ty.block_elems() * ty.block_bytes();
        // Planes start at multiples of 256 bytes.
        let rows = ((self.weights.len() - 4 * 256) / row_bytes) as u32;
        let w = Matrix::new(self.weights.slice(), ty, 1, rows, cols)?;
        let shape = format!("{rows} x {cols}");
        let op = Matvec::new(w, self.y.slice(), 1);
        let mut bytes = [0; 2];
        let us = self.time(|| {
            bytes[0] = matvec(self.device, &op, self.x.slice(), cols)?;
            Ok(())
        })?;
        let q8_us = if takes_q8(ty) {
            let q8 = self.q8(cols, 1)?;
            Some(self.time(|| {
                bytes[1] = matvec_q8(self.device, &op, q8)?;
                Ok(())
            })?)
        } else {
            None
        };
        self.push("matvec", ty.name(), shape.clone(), bytes[0], us);
        if let Some(us) = q8_us {
            self.push("matvec_q8", ty.name(), shape, bytes[1], us);
        }
        Ok(())
    }

    /// Eight of 256 experts a launch, other ones each time until all were read: launches as short as
    /// decoding has them, from memory and not from the cache. Times are of one launch in such a chain.
    fn routed(&mut self, ty: GgmlType, rows: u32, cols: u32, dependent: bool) -> Result<()> {
        let launches = N_EXPERT / N_USED;
        let row_bytes = cols as usize / ty.block_elems() * ty.block_bytes();
        let wanted = row_bytes * rows as usize * N_EXPERT as usize + 4 * 256;
        if wanted > self.weights.len() {
            return Ok(());
        }
        let w = Matrix::new(self.weights.slice(), ty, N_EXPERT, rows, cols)?;
        // Experts of a launch are far apart, as routing has them.
        let ids: Vec<u32> = (0..N_EXPERT).map(|i| i % N_USED * launches + i / N_USED).collect();
        let ids = self.device.alloc_from(&ids)?;
        let shape = format!("{N_USED} of {N_EXPERT} x {rows} x {cols}{}", if dependent { ", dependent" } else { "" });
        let q8 = self.q8(cols, N_USED)?;
        let mut bytes = 0;
        let mut chain = || -> Result<()> {
            for launch in 0..launches {
                let ids = ids.part((launch * N_USED) as usize..)?;
                let experts = Some(Experts { ids, ids_stride: N_USED, n_used: N_USED, shared_x: false });
                let op = Matvec { experts, dependent, ..Matvec::new(w, self.y.slice(), 1) };
                bytes = matvec_q8(self.device, &op, q8)?;
            }
            Ok(())
        };
        let us = self.time_graph(&mut chain)? / f64::from(launches);
        self.push("matvec_q8", ty.name(), shape, bytes, us);
        Ok(())
    }

    /// Quantising one token's activations, a hundred times in a row.
    fn quantize(&mut self, cols: u32) -> Result<()> {
        let q8 = self.q8(cols, 1)?;
        let mut bytes = 0;
        let mut chain = || -> Result<()> {
            for _ in 0..100 {
                bytes = quantize_q8(self.device, self.x.slice(), cols, q8, 1)?;
            }
            Ok(())
        };
        let us = self.time_graph(&mut chain)? / 100.0;
        self.push("quantize_q8", "F32", format!("1 x {cols}"), bytes, us);
        Ok(())
    }

    /// [`time`](Self::time) of a chain of launches, as one graph where there are graphs.
    #[expect(unsafe_code, reason = "replaying a graph")]
    fn time_graph(&self, chain: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        if !self.device.supports_graphs() {
            return self.time(chain);
        }
        // Launchers report their own errors; a capture passes on the device's.
        let mut outcome = Ok(());
        let graph = self.device.capture(&mut || {
            outcome = chain();
            Ok(())
        })?;
        outcome?;
        self.time(|| {
            // SAFETY: the chain's buffers are borrowed by it, and outlive the wait at the end of `time`.
            unsafe { self.device.replay(&graph)? };
            Ok(())
        })
    }
}

/// Random bytes everywhere: some are uploaded, and then doubled until the buffer is full.
fn fill_random<D: Device, T: Pod>(device: &D, to: Slice<'_, T>) -> Result<()> {
    let to = to.as_bytes();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let seed: Vec<u8> = std::iter::repeat_with(&mut next).flatten().take(to.len().min(1 << 20)).collect();
    device.upload_bytes(to.part(..seed.len())?, &seed)?;
    let mut filled = seed.len();
    while filled < to.len() {
        let more = filled.min(to.len() - filled);
        device.copy_bytes(to.part(..more)?, to.part(filled..filled + more)?)?;
        filled += more;
    }
    Ok(())
}
