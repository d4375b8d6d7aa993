//! Dense feed-forward layers in few launches.

use crate::backend::{Backend, Result};
use crate::gpu::backend::{Batch, GpuBackend};
use crate::gpu::device::Device;
use crate::gpu::ops::{self, NormGateUp};
use crate::model::layers::{self, DenseFfn, Scratch};

impl<D: Device> GpuBackend<D> {
    /// [`layers::dense_ffn`], fused where there are kernels for the shapes and types.
    pub(in crate::gpu::backend) fn dense_ffn_stages(
        &mut self,
        w: &DenseFfn<Self>,
        s: &mut Scratch<Self>,
        batch: &Batch<D>,
    ) -> Result {
        let n = batch.shape.rows;
        if !self.fuses(n) {
            return layers::dense_ffn(self, w, s, batch);
        }
        let (gate, up) = (w.gate.view()?, w.up.view()?);
        // Several rows share the weights in `products`, which is worth more than a launch. Of the activations only
        // the int8 form is there afterwards.
        if n == 1 && ops::takes_norm_gate_up(&gate, &up) && ops::takes_q8(w.down.view()?.ty()) {
            let h = self.quantised_mut(&mut s.act, n)?;
            let (x, norm) = (s.x.rows(n)?, w.norm.data.slice());
            let op = NormGateUp { x, norm, eps: w.eps, gate, up, act: w.act, dependent: self.dependent() };
            let launched = ops::norm_gate_up(&*self.device, &op, h);
            self.done(launched)?;
        } else {
            let products = [(&mut s.gate, &w.gate), (&mut s.up, &w.up)];
            self.norm_products(products, &mut s.norm, &s.x, &w.norm, w.eps, batch)?;
            self.gated_act(&mut s.act, &s.gate, &s.up, w.act, batch)?;
        }
        self.matmul_add(&mut s.x, &w.down, &s.act, batch)
    }
}
