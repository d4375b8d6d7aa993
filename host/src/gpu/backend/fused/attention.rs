//! Attention layers in few launches.
#![expect(unsafe_code, reason = "launchers whose indices were checked when the batch was made")]

use crate::backend::{AttentionShape, PAGE_TOKENS, Result};
use crate::gpu::backend::{Batch, Cache, GpuBackend, Tensor, op_error, rope_params};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;
use crate::gpu::ops::{self, AttentionOut, Heads, Matvec, Partials, Queries};
use crate::model::layers::{self, Attention, Scratch};

impl<D: Device> GpuBackend<D> {
    /// [`layers::attention`] in four launches: norm and products; bias, norm and rotation of heads, the cache's writes and
    /// splits; their merge, gate and quantisation; product. Where sequences have several rows, what comes before the splits
    /// is a launch of its own; where they have many, tiles instead of splits.
    pub(in crate::gpu::backend) fn attention_stages(
        &mut self,
        w: &Attention<Self>,
        s: &mut Scratch<Self>,
        cache: &mut Cache<D>,
        layer: u32,
        batch: &Batch<D>,
    ) -> Result {
        if !self.options.fuse {
            return layers::attention(self, w, s, cache, layer, batch);
        }
        let n = batch.shape.rows;
        let q = if w.gated { &mut s.qg } else { &mut s.q };
        let projections = [(q, &w.q), (&mut s.k, &w.k), (&mut s.v, &w.v)];
        self.norm_products(projections, &mut s.norm, &s.x, &w.norm, w.eps, batch)?;
        let turns = self.rope_turns(&w.rope)?;
        let at = batch.placement(cache.n_pages)?;
        let q_out = s.q.rows_mut(n)?;
        let heads = Heads {
            q: if w.gated { s.qg.rows(n)? } else { q_out },
            gated: w.gated,
            k: s.k.rows(n)?,
            v: s.v.rows(n)?,
            biases: [&w.q_bias, &w.k_bias, &w.v_bias].map(|bias| bias.as_ref().map(|bias| bias.data.slice())),
            norms: [&w.q_norm, &w.k_norm].map(|norm| norm.as_ref().map(|norm| norm.data.slice())),
            eps: w.eps,
            rope: rope_params(&w.rope, w.shape.n_head, w.shape.head_dim),
            turns: turns.slice(),
            n_head_kv: w.shape.n_head_kv,
            at,
            dependent: self.dependent(),
        };
        let kv = cache.kv(layer)?;
        let alone = batch.shape.span_rows == 1 && batch.shape.spans == n;
        let q = if alone && ops::takes_fresh(kv, &at) {
            Queries::Fresh(&heads)
        } else {
            // SAFETY: the batch's positions are within its page lists, and `placement` checked its pages.
            let launched = unsafe { ops::attention_heads(&*self.device, &heads, q_out, kv) };
            self.done(launched)?;
            Queries::Ready(q_out)
        };
        let (pairs, sinks) = (w.gated.then_some(&s.qg), w.sinks.as_ref().map(|sinks| sinks.data.slice()));
        self.attend(&mut s.attn, q, pairs, cache, layer, &w.shape, sinks, batch)?;
        let y_stride = s.x.cols();
        let bias = w.output_bias.as_ref().map(|bias| bias.data.slice());
        let op = Matvec { y_stride, bias, accumulate: true, ..Matvec::new(w.output.view()?, s.x.rows_mut(n)?, n) };
        self.product(op, &s.attn, n, None)
    }

    /// Attention of `q`; with `pairs` of queries and gates, times `σ(gate)`.
    #[expect(clippy::too_many_arguments, reason = "the operation has that many operands")]
    pub(in crate::gpu::backend) fn attend(
        &mut self,
        out: &mut Tensor<D>,
        q: Queries<'_>,
        pairs: Option<&Tensor<D>>,
        cache: &Cache<D>,
        layer: u32,
        shape: &AttentionShape,
        sinks: Option<Slice<'_, f32>>,
        batch: &Batch<D>,
    ) -> Result {
        let n = batch.shape.rows;
        let (kv, at) = (cache.kv(layer)?, batch.placement(cache.n_pages)?);
        let split_rows = ops::split_rows(&at, kv, shape);
        let max_keys = batch.shape.max_pages.saturating_mul(PAGE_TOKENS);
        let split = ops::split(self.device.properties(), split_rows, shape, kv, max_keys);
        let heads = split_rows as usize * shape.n_head as usize * split.n as usize;
        let partials = self.partials(heads, shape.head_dim)?;
        let both = if split_rows == n { self.fused(out, n)? } else { None };
        let (out, q8) = match both {
            Some((out, q8)) => (out, Some(q8)),
            None => (out.rows_mut(n)?, None),
        };
        let to = AttentionOut { out, pairs: pairs.map(|pairs| pairs.rows(n)).transpose()?, q8 };
        let op = ops::Attention {
            q,
            kv,
            at,
            partials: Partials { out: partials.out.slice(), max_sum: partials.max_sum.slice(), split },
            sinks,
            shape: *shape,
            dependent: self.dependent(),
        };
        // SAFETY: the batch's positions are within its page lists, and `placement` checked its pages. That every position
        // was written is the session's business, and kernels read memory of the cache in any case. Fresh queries are of
        // spans of one row.
        unsafe { ops::attention(&*self.device, &op, to) }.map_err(op_error)
    }
}
