//! Whole sub-layers in few launches, for steps of few rows, where a launch costs as much as its work.
//!
//! Each falls back to the plain operations in [`layers`](crate::model::layers) for shapes and types without a
//! fused kernel, and with [`BackendOptions::fuse`](super::BackendOptions::fuse) off; those are its reference.

mod attention;
mod delta_net;
mod dense_ffn;
mod moe;

use super::{GpuBackend, Matrix, Result, Tensor};
use crate::gpu::device::Device;

impl<D: Device> GpuBackend<D> {
    /// `out = w·x` for each pair of `out` and `w`, over the first `n` rows of the same activations `x`.
    pub(super) fn products<const N: usize>(
        &mut self,
        jobs: [(&mut Tensor<D>, &Matrix<D>); N],
        x: &Tensor<D>,
        n: u32,
    ) -> Result {
        for (out, w) in jobs {
            self.dense(out, w, x, n, false)?;
        }
        Ok(())
    }
}
