//! Dense feed-forward layers in few launches.

use crate::backend::Result;
use crate::gpu::backend::{Batch, GpuBackend};
use crate::gpu::device::Device;
use crate::model::layers::{self, DenseFfn, Scratch};

impl<D: Device> GpuBackend<D> {
    /// [`layers::dense_ffn`], fused where there are kernels for the shapes and types.
    pub(in crate::gpu::backend) fn dense_ffn_stages(
        &mut self,
        w: &DenseFfn<Self>,
        s: &mut Scratch<Self>,
        batch: &Batch<D>,
    ) -> Result {
        layers::dense_ffn(self, w, s, batch)
    }
}
