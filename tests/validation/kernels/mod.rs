//! Each kernel against an oracle in f64 that is written from the definition and shares no arithmetic with it.
//!
//! A check is a function over a [`Device`]. [`on_devices`] runs it on the emulated device, with its lanes in
//! order, backwards and shuffled, and with `ZINC_GPU=1` on the GPU. Outputs are poisoned and lie between guard
//! words ([`Output`]); a check that computes twice demands equal bits.

mod argmax;
mod attention;
mod elementwise;
mod moe;
mod rope;
mod ssm;

use std::sync::OnceLock;

use bytemuck::Pod;
use host::cuda::{CudaDevice, KernelSource, Selector};
use host::gpu::{Buffer, Device, Slice};

/// Runs `check(&device)` on every device there is.
macro_rules! on_devices {
    ($check:expr) => {{
        use cuda_std::emu::Order;
        for order in [Order::Forward, Order::Backward, Order::Shuffled(1)] {
            $check(&host::gpu::Emulated::with_order(order));
        }
        if let Some(device) = $crate::kernels::gpu() {
            $check(device);
        }
    }};
}
pub(crate) use on_devices;

/// The GPU, where `ZINC_GPU=1` asks for it; it must then be there.
pub(crate) fn gpu() -> Option<&'static CudaDevice> {
    static GPU: OnceLock<Option<CudaDevice>> = OnceLock::new();
    GPU.get_or_init(|| {
        if std::env::var_os("ZINC_GPU").is_none_or(|value| value != "1") {
            println!("skipped: the GPU (ZINC_GPU=1 asks for it)");
            return None;
        }
        Some(CudaDevice::open(&Selector::MostFree, &KernelSource::Embedded).expect("ZINC_GPU=1 wants a GPU"))
    })
    .as_ref()
}

/// Guard bytes on each side of an output: a multiple of every alignment that kernels ask for.
const GUARD: usize = 256;
/// What guards and unwritten outputs hold: as f32 a NaN, as an index far out of range.
const POISON: u8 = 0xFF;

/// An output between guard words, poisoned until a kernel writes it.
pub(crate) struct Output<D: Device, T> {
    buffer: Buffer<D, u8>,
    len: usize,
    element: std::marker::PhantomData<T>,
}

impl<D: Device, T: Pod> Output<D, T> {
    /// `len` elements of poison.
    pub(crate) fn new(device: &D, len: usize) -> Self {
        let buffer = device.alloc::<u8>(len * size_of::<T>() + 2 * GUARD).expect("a small allocation");
        device.fill_bytes(buffer.slice(), POISON).expect("a fill");
        Output { buffer, len, element: std::marker::PhantomData }
    }

    /// An output with these contents: a kernel works on it in place.
    pub(crate) fn from(device: &D, contents: &[T]) -> Self {
        let output = Output::new(device, contents.len());
        device.upload(output.slice(), contents).expect("an upload");
        output
    }

    /// The elements.
    pub(crate) fn slice(&self) -> Slice<'_, T> {
        let bytes = self.buffer.part(GUARD..GUARD + self.len * size_of::<T>()).expect("within the buffer");
        bytes.cast().expect("the guard keeps the alignment")
    }

    /// What the kernel left; fails where a guard word changed.
    pub(crate) fn read(&self, device: &D) -> Vec<T> {
        let all = device.download_vec(self.buffer.slice()).expect("a download");
        let (before, rest) = all.split_at(GUARD);
        let (contents, after) = rest.split_at(self.len * size_of::<T>());
        assert!(before.iter().all(|&b| b == POISON), "written before the output");
        assert!(after.iter().all(|&b| b == POISON), "written past the output");
        contents.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }
}

/// An input on the device.
pub(crate) fn input<D: Device, T: Pod>(device: &D, contents: &[T]) -> Buffer<D, T> {
    device.alloc_from(contents).expect("a small upload")
}

/// Fails at the first element that is farther from `expected` than `bound(i)`; a NaN always is.
#[track_caller]
pub(crate) fn assert_close(what: &str, actual: &[f32], expected: &[f64], bound: impl Fn(usize) -> f64) {
    assert_eq!(actual.len(), expected.len(), "{what}: length");
    for (i, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        let (error, bound) = ((f64::from(a) - e).abs(), bound(i));
        assert!(error <= bound, "{what}[{i}]: {a} for {e}, error {error:e} over {bound:e}");
    }
}

/// Fails unless both have the same bits.
#[track_caller]
pub(crate) fn assert_same_bits<T: Pod>(what: &str, first: &[T], again: &[T]) {
    assert!(bytemuck::cast_slice::<T, u8>(first) == bytemuck::cast_slice::<T, u8>(again), "{what}: a rerun differs");
}

/// Reproducible random numbers: a 64-bit linear congruential generator, its upper half.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }
    pub(crate) fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }
    /// Uniform in (−1, 1).
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() as f32 / 2_147_483_648.0) - 1.0
    }
    pub(crate) fn units(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }
    /// Uniform below `n`.
    pub(crate) fn below(&mut self, n: u32) -> u32 {
        (u64::from(self.bits()) * u64::from(n) >> 32) as u32
    }
    /// `0 .. n` in some order.
    pub(crate) fn permutation(&mut self, n: u32) -> Vec<u32> {
        let mut order: Vec<u32> = (0..n).collect();
        for i in (1..n).rev() {
            order.swap(i as usize, self.below(i + 1) as usize);
        }
        order
    }
}

/// The logistic function.
pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// f32 values as f64.
pub(crate) fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// Half a unit in the last place of f32, relative.
pub(crate) const EPS: f64 = 6e-8;
