//! Mixtures of experts in few launches.

use crate::backend::Result;
use crate::gpu::backend::{Batch, GpuBackend};
use crate::gpu::device::Device;
use crate::model::layers::{self, Moe, Scratch};

impl<D: Device> GpuBackend<D> {
    /// [`layers::moe`], fused where there are kernels for the shapes and types.
    pub(in crate::gpu::backend) fn moe_stages(
        &mut self,
        w: &Moe<Self>,
        s: &mut Scratch<Self>,
        batch: &Batch<D>,
    ) -> Result {
        layers::moe(self, w, s, batch)
    }
}
