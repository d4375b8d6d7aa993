//! Gated delta net layers in few launches.

use crate::backend::Result;
use crate::gpu::backend::{Batch, Cache, GpuBackend};
use crate::gpu::device::Device;
use crate::gpu::ops::{self, Decay, DeltaStep, MAX_STEP_ROWS};
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
        if !self.options.fuse {
            return layers::delta_net(self, w, s, cache, layer, batch);
        }
        let n = batch.shape.rows;
        let projections = [(&mut s.qkv, &w.qkv), (&mut s.z, &w.z), (&mut s.alpha, &w.alpha), (&mut s.beta, &w.beta)];
        self.norm_products(projections, &mut s.norm, &s.x, &w.norm, w.eps, batch)?;
        if batch.shape.span_rows <= MAX_STEP_ROWS {
            self.delta_net_step(w, s, cache, layer, batch)?;
        } else {
            layers::delta_net_mix(self, w, s, cache, layer, batch)?;
        }
        self.dense(&mut s.x, &w.output, &s.delta, n, true)
    }

    /// Convolution, delta rule and gated norm in one launch: `s.delta` from the projections.
    #[expect(unsafe_code, reason = "a launcher whose indices were checked when the batch was made")]
    fn delta_net_step(
        &mut self,
        w: &DeltaNet<Self>,
        s: &mut Scratch<Self>,
        cache: &mut Cache<D>,
        layer: u32,
        batch: &Batch<D>,
    ) -> Result {
        let n = batch.shape.rows;
        let (ring, state) = cache.recurrent(layer)?;
        let (out, q8) = match self.fused(&mut s.delta, n)? {
            Some((out, q8)) => (out, Some(q8)),
            None => (s.delta.rows_mut(n)?, None),
        };
        let op = DeltaStep {
            qkv: s.qkv.rows(n)?,
            z: s.z.rows(n)?,
            alpha: s.alpha.rows(n)?,
            beta: s.beta.rows(n)?,
            conv1d: w.conv1d.data.slice(),
            decay: Decay {
                dt_bias: w.dt_bias.as_ref().map(|v| v.data.slice()),
                a: w.a.as_ref().map(|v| v.data.slice()),
            },
            norm: w.out_norm.data.slice(),
            eps: w.eps,
            ring,
            state,
            spans: batch.spans(cache.n_slots)?,
            out,
            q8,
            dependent: self.dependent(),
        };
        // SAFETY: the spans' rows are those of the batch, one after the other, `span_rows` at most; their slots were
        // checked to differ, and by `spans` against the cache. The grid ahead is a product's; ring and state are
        // written once a step, by this kernel or those that stand for it, spans by a copy.
        let launched = unsafe { ops::ssm_delta_step(&*self.device, &op, &w.shape) };
        self.done(launched)
    }
}
