//! Dense feed-forward layers in few launches.

use crate::backend::{Backend, Result};
use crate::gpu::backend::{Batch, GpuBackend};
use crate::gpu::device::Device;
use crate::gpu::ops::{self, GateUp};
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
        self.rms_norm(&mut s.norm, &s.x, &w.norm, w.eps, batch)?;
        let (gate, up) = (w.gate.view()?, w.up.view()?);
        // Several rows share the weights in `products`, which is worth more than a launch. Of the activations only
        // the int8 form is there afterwards.
        if n == 1 && ops::takes_gate_up(&gate, &up) && ops::takes_q8(w.down.view()?.ty()) {
            let (x, h) = (self.quantised(&s.norm, n)?, self.quantised_mut(&mut s.act, n)?);
            let op = GateUp {
                gate,
                up,
                gate_bias: None,
                up_bias: None,
                act: w.act,
                routing: None,
                dependent: self.dependent(),
                tokens: n,
            };
            let launched = ops::gate_up(&*self.device, &op, x, h);
            self.done(launched)?;
        } else {
            self.products([(&mut s.gate, &w.gate), (&mut s.up, &w.up)], &s.norm, n)?;
            self.gated_act(&mut s.act, &s.gate, &s.up, w.act, batch)?;
        }
        self.matmul_add(&mut s.x, &w.down, &s.act, batch)
    }
}
