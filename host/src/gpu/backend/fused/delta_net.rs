//! Gated delta net layers in few launches.

use crate::backend::Result;
use crate::gpu::backend::{Batch, Cache, GpuBackend};
use crate::gpu::device::Device;
use crate::model::layers::{self, DeltaNet, Scratch};

impl<D: Device> GpuBackend<D> {
    /// [`layers::delta_net`], fused where there are kernels for the shapes and types.
    pub(in crate::gpu::backend) fn delta_net_stages(
        &mut self,
        w: &DeltaNet<Self>,
        s: &mut Scratch<Self>,
        cache: &mut Cache<D>,
        layer: u32,
        batch: &Batch<D>,
    ) -> Result {
        layers::delta_net(self, w, s, cache, layer, batch)
    }
}
