//! Attention layers in few launches.

use crate::backend::Result;
use crate::gpu::backend::{Batch, Cache, GpuBackend};
use crate::gpu::device::Device;
use crate::model::layers::{self, Attention, Scratch};

impl<D: Device> GpuBackend<D> {
    /// [`layers::attention`], fused where there are kernels for the shapes and types.
    pub(in crate::gpu::backend) fn attention_stages(
        &mut self,
        w: &Attention<Self>,
        s: &mut Scratch<Self>,
        cache: &mut Cache<D>,
        layer: u32,
        batch: &Batch<D>,
    ) -> Result {
        layers::attention(self, w, s, cache, layer, batch)
    }
}
