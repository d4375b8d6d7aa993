//! Kernels against oracles, through the launchers.
//!
//! Every test runs on the emulated device, in two orders of lanes and blocks; with `ZINC_GPU=1` it runs
//! on the first CUDA device, too. An oracle is written from the operation's definition, in f64, and
//! shares no arithmetic with the kernel.

mod argmax;
mod attention;
mod attention_fresh;
mod bench;
mod elementwise;
mod embedding;
mod feed;
mod ffn;
mod formats;
mod grouped;
mod heads;
mod matmul;
mod matmul_wide;
mod matvec;
mod matvecs;
mod moe;
mod norm_matvecs;
mod quantize_q8;
mod random;
mod repack;
mod report;
mod rope;
mod route_groups;
mod sample;
mod ssm;

use std::marker::PhantomData;
use std::sync::OnceLock;

use bytemuck::Pod;
use gpu_kernels::blocks::GgmlType;
use host::cuda::CudaDevice;
use host::gpu::ops::{Matrix, repack};
use host::gpu::{Buffer, Device, Slice};

pub(crate) use random::Random;

/// Declares tests that take a device: `devices! { fn name(device) { … } }`.
macro_rules! devices {
    ($($(#[$attr:meta])* fn $name:ident($device:ident) $body:block)+) => {$(
        $(#[$attr])*
        #[test]
        fn $name() {
            fn on<D: host::gpu::Device>($device: &D) $body
            crate::kernels::on_devices!(on);
        }
    )+};
}
pub(crate) use devices;

/// Runs `check(&device)` on every device there is.
macro_rules! on_devices {
    ($check:expr) => {{
        use cuda_std::emu::Order;
        for order in [Order::Forward, Order::Shuffled(7)] {
            $check(&host::gpu::Emulated::with_order(order));
        }
        if let Some(device) = $crate::kernels::gpu() {
            $crate::kernels::report::on_gpu(|| $check(device));
        }
    }};
}
pub(crate) use on_devices;

/// The GPU, where `ZINC_GPU=1` asks for it; it must then be there.
pub(crate) fn gpu() -> Option<&'static CudaDevice> {
    static GPU: OnceLock<Option<CudaDevice>> = OnceLock::new();
    GPU.get_or_init(|| {
        if std::env::var_os("ZINC_GPU").is_none_or(|value| value != "1") {
            println!("GPU skipped: ZINC_GPU is not 1");
            return None;
        }
        let device = CudaDevice::open(&Default::default(), &Default::default());
        Some(device.expect("ZINC_GPU=1 asks for a CUDA device"))
    })
    .as_ref()
}

/// Guard bytes on each side of an output: a multiple of every alignment that launchers ask for.
const GUARD: usize = 256;
/// What guards and unwritten outputs hold: as f32 a NaN, as an index far out of range.
const POISON: u8 = 0xFF;

/// An output between guards: poisoned before the kernel, the guards checked after.
pub(crate) struct Output<D: Device, T> {
    buffer: Buffer<D, u8>,
    len: usize,
    element: PhantomData<T>,
}

impl<D: Device, T: Pod> Output<D, T> {
    /// Room for `len` elements.
    pub(crate) fn new(device: &D, len: usize) -> Self {
        let buffer = device.alloc::<u8>(len * size_of::<T>() + 2 * GUARD).expect("memory");
        device.fill_bytes(buffer.slice(), POISON).expect("fill");
        Output { buffer, len, element: PhantomData }
    }

    /// The same, holding `values` at first: a kernel works on them in place.
    pub(crate) fn holding(device: &D, values: &[T]) -> Self {
        let output = Self::new(device, values.len());
        device.upload(output.slice(), values).expect("upload");
        output
    }

    /// The output proper.
    pub(crate) fn slice(&self) -> Slice<'_, T> {
        self.buffer.part(GUARD..GUARD + self.len * size_of::<T>()).and_then(Slice::cast).expect("inside")
    }

    /// What was written, after a look at the guards.
    pub(crate) fn read(&self, device: &D) -> Vec<T> {
        let all = device.download_vec(self.buffer.slice()).expect("download");
        let (values, back) = all[GUARD..].split_at(self.len * size_of::<T>());
        assert!(all[..GUARD].iter().chain(back).all(|&byte| byte == POISON), "a guard was overwritten");
        values.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }
}

/// An input on the device.
pub(crate) fn input<D: Device, T: Pod>(device: &D, contents: &[T]) -> Buffer<D, T> {
    device.alloc_from(contents).expect("memory")
}

/// Weights on a device, repacked by the kernel under test for it.
pub(crate) struct Weights<D: Device> {
    buffer: Buffer<D, u8>,
    ty: GgmlType,
    shape: [u32; 3],
}

impl<D: Device> Weights<D> {
    /// File bytes of a tensor `[n_expert, rows, cols]`.
    pub(crate) fn new(device: &D, ty: GgmlType, shape: [u32; 3], file: &[u8]) -> Self {
        let [n_expert, rows, cols] = shape;
        let bytes = Matrix::size_bytes(ty, n_expert, rows, cols).expect("a possible shape") as usize;
        let weights = Weights { buffer: device.alloc(bytes).expect("memory"), ty, shape };
        let raw = device.alloc_from(file).expect("memory");
        repack(device, raw.slice(), weights.matrix(), 0).expect("repack");
        weights
    }

    /// The launchers' view.
    pub(crate) fn matrix(&self) -> Matrix<'_> {
        let [n_expert, rows, cols] = self.shape;
        Matrix::new(self.buffer.slice(), self.ty, n_expert, rows, cols).expect("a possible shape")
    }
}

/// Compares with an oracle: `|got − want| ≤ bound`, and says where not.
#[track_caller]
pub(crate) fn assert_close(what: &str, got: &[f32], want: &[f64], bound: impl Fn(usize) -> f64) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    report::note(what, got, want);
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let (error, bound) = ((f64::from(got) - want).abs(), bound(i));
        assert!(error <= bound, "{what}[{i}]: got {got:e}, want {want:e}, off by {error:e} > {bound:e}");
    }
}

/// Fails unless both have the same bits.
#[track_caller]
pub(crate) fn assert_same_bits<T: Pod>(what: &str, first: &[T], again: &[T]) {
    assert!(bytemuck::cast_slice::<T, u8>(first) == bytemuck::cast_slice::<T, u8>(again), "{what}: a rerun differs");
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
