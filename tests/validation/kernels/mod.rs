//! Kernels against oracles, through the launchers.
//!
//! Every test runs on the emulated device, in two orders of lanes and blocks; with `ZINC_GPU=1` it runs
//! on the first CUDA device, too. An oracle is written from the operation's definition, in f64, and
//! shares no arithmetic with the kernel.

mod bench;
mod embedding;
mod formats;
mod matvec;
mod quantize_q8;
mod random;
mod repack;

use bytemuck::Pod;
use gpu_kernels::blocks::GgmlType;
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
            on(&host::gpu::Emulated::new());
            on(&host::gpu::Emulated::with_order(cuda_std::emu::Order::Shuffled(7)));
            crate::kernels::on_gpu!(on);
        }
    )+};
}
pub(crate) use devices;

/// Runs a function on the GPU, if one is asked for.
macro_rules! on_gpu {
    ($on:ident) => {
        if std::env::var_os("ZINC_GPU").is_some_and(|value| value == "1") {
            let device = host::cuda::CudaDevice::open(&Default::default(), &Default::default());
            $on(&device.expect("ZINC_GPU=1 asks for a CUDA device"));
        } else {
            println!("GPU skipped: ZINC_GPU is not 1");
        }
    };
}
pub(crate) use on_gpu;

/// An output with guard words around it: poisoned before the kernel, checked after.
pub(crate) struct Output<D: Device> {
    buffer: Buffer<D, u32>,
    len: usize,
}

/// A NaN that no kernel makes.
const POISON: u32 = 0x7fc0_beef;
/// Words on either side; 64 bytes keep the alignment that launchers ask for.
const GUARD: usize = 16;

impl<D: Device> Output<D> {
    /// Room for `len` values of four bytes.
    pub(crate) fn new(device: &D, len: usize) -> Self {
        let buffer = device.alloc_from(&vec![POISON; len + 2 * GUARD]).expect("memory");
        Output { buffer, len }
    }

    /// The same, holding `values` at first.
    pub(crate) fn holding<T: Pod>(device: &D, values: &[T]) -> Self {
        let output = Self::new(device, values.len());
        device.upload(output.slice(), values).expect("upload");
        output
    }

    /// The output proper.
    pub(crate) fn slice<T: Pod>(&self) -> Slice<'_, T> {
        self.buffer.part(GUARD..GUARD + self.len).and_then(Slice::cast).expect("inside")
    }

    /// What was written, after a look at the guards. A value that nobody wrote is still [`POISON`].
    pub(crate) fn read<T: Pod>(&self, device: &D) -> Vec<T> {
        let words = device.download_vec(self.buffer.slice()).expect("download");
        let (front, back) = (&words[..GUARD], &words[GUARD + self.len..]);
        assert!(front.iter().chain(back).all(|word| *word == POISON), "a guard word was overwritten");
        words[GUARD..GUARD + self.len].iter().map(|word| bytemuck::cast(*word)).collect()
    }
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
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let (error, bound) = ((f64::from(got) - want).abs(), bound(i));
        assert!(error <= bound, "{what}[{i}]: got {got:e}, want {want:e}, off by {error:e} > {bound:e}");
    }
}
