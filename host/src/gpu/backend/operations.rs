//! [`Backend`], one operation after the other.
#![expect(unsafe_code, reason = "launchers whose indices were checked when the batch was made")]

use super::batch::Batch;
use super::cache::Cache;
use super::tensor::{Routes, Tensor};
use super::weights::{Matrix, Vector};
use super::{GpuBackend, rope_params};
use crate::backend::{
    self as api, AttentionShape, Backend, CacheShape, Choose, DeltaNetShape, GatedAct, Measured, Result, Rope,
    RouterRule, Section,
};
use crate::gguf;
use crate::gpu::device::Device;
use crate::gpu::ops::{self, Decay, Experts, Matvec, Queries};
use crate::model::layers::{Attention, DeltaNet, DenseFfn, Moe, Scratch};

impl<D: Device> Backend for GpuBackend<D> {
    type Matrix = Matrix<D>;
    type Vector = Vector<D>;
    type Tensor = Tensor<D>;
    type Routes = Routes<D>;
    type Cache = Cache<D>;
    type Batch = Batch<D>;

    fn matrix(&mut self, tensor: &gguf::Tensor<'_>) -> Result<Matrix<D>> {
        self.load_matrix(tensor)
    }

    fn vector(&mut self, tensor: &gguf::Tensor<'_>) -> Result<Vector<D>> {
        self.load_vector(tensor)
    }

    fn tensor(&mut self, rows: u32, cols: u32) -> Result<Tensor<D>> {
        Tensor::new(self, rows, cols)
    }

    fn routes(&mut self, rows: u32, n_expert_used: u32) -> Result<Routes<D>> {
        Routes::new(self, rows, n_expert_used)
    }

    fn cache(&mut self, shape: &CacheShape) -> Result<Cache<D>> {
        // The session asks for it when all weights are there.
        self.end_loading()?;
        Cache::new(self, shape)
    }

    fn batch(&mut self, batch: &api::Batch) -> Result<Batch<D>> {
        self.upload_batch(batch, &Choose::default())
    }

    fn read(&mut self, x: &Tensor<D>, rows: u32, out: &mut Vec<f32>) -> Result {
        self.land(x.rows(rows)?, out)
    }

    fn copy_state(&mut self, cache: &mut Cache<D>, from: u32, to: u32) -> Result {
        cache.copy_state(&self.device, from, to)
    }

    fn run_recorded(&mut self, batch: &Batch<D>, kind: u32, step: impl FnOnce(&mut Self) -> Result + Send) -> Result {
        let done = self.run_or_replay(batch, kind, step);
        if done.is_err() {
            self.forget_batch();
        }
        done
    }

    fn section(&mut self, section: Section) {
        self.mark_section(section);
    }

    fn set_profiling(&mut self, on: bool) {
        self.measure(on);
    }

    fn take_profile(&mut self) -> Result<Option<Measured>> {
        self.measured().map(Some)
    }

    const CHOOSES: bool = true;

    fn choosing_batch(&mut self, batch: &api::Batch, choose: &Choose) -> Result<Batch<D>> {
        self.upload_batch(batch, choose)
    }

    fn feed(&mut self, batch: &Batch<D>) -> Result {
        self.feed_chosen(batch)
    }

    fn choose(&mut self, logits: &Tensor<D>, n_tokens: u32, batch: &Batch<D>) -> Result {
        self.choose_tokens(logits, n_tokens, batch)
    }

    fn queue_chosen(&mut self, n: u32) -> Result {
        self.push_chosen(n)
    }

    fn read_chosen(&mut self, ids: &mut Vec<u32>) -> Result {
        self.pop_chosen(ids)
    }

    fn embed(&mut self, out: &mut Tensor<D>, table: &Matrix<D>, batch: &Batch<D>) -> Result {
        let cols = out.cols();
        let y = out.rows_mut(batch.shape.rows)?;
        let launched = ops::embedding(&*self.device, table.view()?, batch.tokens()?, y, cols);
        self.done(launched)
    }

    fn rms_norm(&mut self, out: &mut Tensor<D>, x: &Tensor<D>, w: &Vector<D>, eps: f32, batch: &Batch<D>) -> Result {
        let n = batch.shape.rows;
        let (x, w) = (x.rows(n)?, w.data.slice());
        let launched = match self.fused(out, n)? {
            Some((y, q8)) => ops::rms_norm_q8(&*self.device, x, w, y, q8, eps),
            None => ops::rms_norm(&*self.device, x, w, out.rows_mut(n)?, eps),
        };
        self.done(launched)
    }

    fn rms_norm_heads(&mut self, x: &mut Tensor<D>, w: &Vector<D>, eps: f32, batch: &Batch<D>) -> Result {
        let x = x.rows_mut(batch.shape.rows)?;
        let launched = ops::rms_norm(&*self.device, x, w.data.slice(), x, eps);
        self.done(launched)
    }

    fn matmul(&mut self, out: &mut Tensor<D>, w: &Matrix<D>, x: &Tensor<D>, batch: &Batch<D>) -> Result {
        self.dense(out, w, x, batch.shape.rows, false)
    }

    fn matmul_add(&mut self, out: &mut Tensor<D>, w: &Matrix<D>, x: &Tensor<D>, batch: &Batch<D>) -> Result {
        self.dense(out, w, x, batch.shape.rows, true)
    }

    fn add_bias(&mut self, x: &mut Tensor<D>, bias: &Vector<D>, batch: &Batch<D>) -> Result {
        let launched = ops::add_bias(&*self.device, x.rows_mut(batch.shape.rows)?, bias.data.slice());
        self.done(launched)
    }

    fn gated_act(
        &mut self,
        out: &mut Tensor<D>,
        gate: &Tensor<D>,
        up: &Tensor<D>,
        act: GatedAct,
        batch: &Batch<D>,
    ) -> Result {
        self.gated(out, gate, up, act, batch.shape.rows)
    }

    fn gather_outputs(&mut self, out: &mut Tensor<D>, x: &Tensor<D>, batch: &Batch<D>) -> Result {
        let (rows, cols) = (batch.outputs()?, x.cols());
        let out = out.rows_mut(batch.shape.outputs)?;
        // SAFETY: the batch's outputs were checked to be below its rows, and `x` has these rows.
        let launched = unsafe { ops::gather_rows(&*self.device, x.rows(batch.shape.rows)?, rows, out, cols) };
        self.done(launched)
    }

    fn head(&mut self, logits: &mut Tensor<D>, w: &Matrix<D>, x: &Tensor<D>, batch: &Batch<D>) -> Result {
        self.dense(logits, w, x, batch.shape.outputs, false)
    }

    fn join_rows(&mut self, out: &mut Tensor<D>, a: &Tensor<D>, b: &Tensor<D>, batch: &Batch<D>) -> Result {
        let n = batch.shape.rows;
        let (a_rows, b_rows) = (a.rows(n)?, b.rows(n)?);
        let launched = ops::join_rows(&*self.device, a_rows, b_rows, out.rows_mut(n)?, a.cols());
        self.done(launched)
    }

    fn split_gate(
        &mut self,
        q: &mut Tensor<D>,
        gate: &mut Tensor<D>,
        qg: &Tensor<D>,
        head_dim: u32,
        batch: &Batch<D>,
    ) -> Result {
        let n = batch.shape.rows;
        let launched = ops::split_gate(&*self.device, qg.rows(n)?, q.rows_mut(n)?, gate.rows_mut(n)?, head_dim);
        self.done(launched)
    }

    fn rope(&mut self, x: &mut Tensor<D>, head_dim: u32, rope: &Rope, batch: &Batch<D>) -> Result {
        let turns = self.rope_turns(rope)?;
        let p = rope_params(rope, x.cols().checked_div(head_dim).unwrap_or(0), head_dim);
        let launched = ops::rope(&*self.device, x.rows_mut(batch.shape.rows)?, batch.pos()?, turns.slice(), p);
        self.done(launched)
    }

    fn kv_write(&mut self, cache: &mut Cache<D>, layer: u32, k: &Tensor<D>, v: &Tensor<D>, batch: &Batch<D>) -> Result {
        let n = batch.shape.rows;
        let at = batch.placement(cache.n_pages)?;
        // SAFETY: the batch has a row of the page table for each span, with a page for each position, and
        // `placement` has checked the pages against the cache.
        let launched =
            unsafe { ops::kv_cache_write(&*self.device, k.rows(n)?, v.rows(n)?, at, cache.kv(layer)?, k.cols()) };
        self.done(launched)
    }

    fn attention(
        &mut self,
        out: &mut Tensor<D>,
        q: &Tensor<D>,
        cache: &Cache<D>,
        layer: u32,
        shape: &AttentionShape,
        sinks: Option<&Vector<D>>,
        batch: &Batch<D>,
    ) -> Result {
        let sinks = sinks.map(|sinks| sinks.data.slice());
        let q = Queries::Ready(q.rows(batch.shape.rows)?);
        self.attend(out, q, None, cache, layer, shape, sinks, batch)
    }

    fn sigmoid_mul(&mut self, x: &mut Tensor<D>, gate: &Tensor<D>, batch: &Batch<D>) -> Result {
        let n = batch.shape.rows;
        let gate = gate.rows(n)?;
        let launched = match self.fused(x, n)? {
            Some((x, q8)) => ops::gated_act_q8(&*self.device, None, x, gate, x, q8),
            None => ops::sigmoid_mul(&*self.device, x.rows_mut(n)?, gate),
        };
        self.done(launched)
    }

    fn ssm_conv1d(
        &mut self,
        out: &mut Tensor<D>,
        x: &Tensor<D>,
        w: &Vector<D>,
        cache: &mut Cache<D>,
        layer: u32,
        shape: &DeltaNetShape,
        batch: &Batch<D>,
    ) -> Result {
        let n = batch.shape.rows;
        let spans = batch.spans(cache.n_slots)?;
        let ((state, _), w, out) = (cache.recurrent(layer)?, w.data.slice(), out.rows_mut(n)?);
        // SAFETY: the spans' rows are those of the batch, one after the other; their slots were checked to
        // differ, and by `spans` against the cache.
        let launched = unsafe { ops::ssm_conv1d(&*self.device, x.rows(n)?, w, state, spans, out, shape) };
        self.done(launched)
    }

    fn ssm_delta_net(
        &mut self,
        out: &mut Tensor<D>,
        qkv: &Tensor<D>,
        alpha: &Tensor<D>,
        beta: &Tensor<D>,
        dt_bias: Option<&Vector<D>>,
        a: Option<&Vector<D>>,
        cache: &mut Cache<D>,
        layer: u32,
        shape: &DeltaNetShape,
        batch: &Batch<D>,
    ) -> Result {
        let n = batch.shape.rows;
        let chunks = self.chunks(ops::chunk_elems(shape, out.capacity(), cache.n_slots))?;
        let spans = batch.spans(cache.n_slots)?;
        let decay = Decay { dt_bias: dt_bias.map(|v| v.data.slice()), a: a.map(|v| v.data.slice()) };
        let ((_, state), out) = (cache.recurrent(layer)?, out.rows_mut(n)?);
        let (qkv, gates) = (qkv.rows(n)?, (alpha.rows(n)?, beta.rows(n)?));
        // SAFETY: as in `ssm_conv1d`.
        let launched =
            unsafe { ops::ssm_delta_net(&*self.device, qkv, gates, decay, state, chunks.slice(), spans, out, shape) };
        self.done(launched)
    }

    fn ssm_gated_norm(
        &mut self,
        x: &mut Tensor<D>,
        z: &Tensor<D>,
        w: &Vector<D>,
        eps: f32,
        batch: &Batch<D>,
    ) -> Result {
        let n = batch.shape.rows;
        let (z, w) = (z.rows(n)?, w.data.slice());
        let launched = match self.fused(x, n)? {
            Some((x, q8)) => ops::ssm_gated_norm_q8(&*self.device, x, z, w, q8, eps),
            None => ops::ssm_gated_norm(&*self.device, x.rows_mut(n)?, z, w, eps),
        };
        self.done(launched)
    }

    fn route(
        &mut self,
        routes: &mut Routes<D>,
        logits: &Tensor<D>,
        bias: Option<&Vector<D>>,
        rule: RouterRule,
        batch: &Batch<D>,
    ) -> Result {
        let n_routes = routes.n_routes(batch.shape.rows)?;
        let (logits, n_expert) = (logits.rows(batch.shape.rows)?, logits.cols());
        routes.set_tile(self.route_tile(batch.shape.rows, n_routes, n_expert));
        let (ids, weights) = (routes.ids(n_routes)?, routes.weights(n_routes)?);
        let bias = bias.map(|bias| bias.data.slice());
        let launched = ops::softmax_topk(&*self.device, logits, bias, ids, weights, n_expert, routes.n_used, rule);
        self.done(launched)?;
        match routes.groups(n_routes, n_expert)? {
            Some(groups) => {
                let experts = Experts { ids, ids_stride: routes.n_used, n_used: routes.n_used, shared_x: true };
                let launched = ops::route_groups(&*self.device, &experts, batch.shape.rows, n_expert, groups);
                self.done(launched)
            }
            None => Ok(()),
        }
    }

    fn expert_matmul(
        &mut self,
        out: &mut Tensor<D>,
        w: &Matrix<D>,
        bias: Option<&Vector<D>>,
        x: &Tensor<D>,
        x_routed: bool,
        routes: &Routes<D>,
        batch: &Batch<D>,
    ) -> Result {
        let n = batch.shape.rows;
        let n_routes = routes.n_routes(n)?;
        let (ids, n_used) = (routes.ids(n_routes)?, routes.n_used);
        let experts = Experts { ids, ids_stride: n_used, n_used, shared_x: !x_routed };
        let y_stride = out.cols();
        let op = Matvec {
            y_stride,
            bias: bias.map(|bias| bias.data.slice()),
            experts: Some(experts),
            ..Matvec::new(w.view()?, out.rows_mut(n_routes)?, n)
        };
        let groups = routes.groups(n_routes, op.w.n_expert())?;
        self.product(op, x, if x_routed { n_routes } else { n }, groups)
    }

    fn expert_act(
        &mut self,
        out: &mut Tensor<D>,
        gate: &Tensor<D>,
        up: &Tensor<D>,
        act: GatedAct,
        routes: &Routes<D>,
        batch: &Batch<D>,
    ) -> Result {
        self.gated(out, gate, up, act, routes.n_routes(batch.shape.rows)?)
    }

    fn moe_weighted_acc(&mut self, x: &mut Tensor<D>, y: &Tensor<D>, routes: &Routes<D>, batch: &Batch<D>) -> Result {
        let n_routes = routes.n_routes(batch.shape.rows)?;
        let (cols, weights) = (x.cols(), routes.weights(n_routes)?);
        let (x, y) = (x.rows_mut(batch.shape.rows)?, y.rows(n_routes)?);
        let launched = ops::moe_weighted_acc(&*self.device, x, y, weights, None, routes.n_used, cols);
        self.done(launched)
    }

    fn sigmoid_scale_acc(
        &mut self,
        x: &mut Tensor<D>,
        y: &Tensor<D>,
        gate: Option<&Tensor<D>>,
        batch: &Batch<D>,
    ) -> Result {
        let n = batch.shape.rows;
        let (x, y) = (x.rows_mut(n)?, y.rows(n)?);
        let launched = match gate {
            Some(gate) => ops::sigmoid_scale_acc(&*self.device, x, y, gate.rows(n)?),
            None => ops::add(&*self.device, x, y),
        };
        self.done(launched)
    }

    fn attention_layer(
        &mut self,
        w: &Attention<Self>,
        s: &mut Scratch<Self>,
        cache: &mut Cache<D>,
        layer: u32,
        batch: &Batch<D>,
    ) -> Result {
        self.attention_stages(w, s, cache, layer, batch)
    }

    fn delta_net_layer(
        &mut self,
        w: &DeltaNet<Self>,
        s: &mut Scratch<Self>,
        cache: &mut Cache<D>,
        layer: u32,
        batch: &Batch<D>,
    ) -> Result {
        self.delta_net_stages(w, s, cache, layer, batch)
    }

    fn dense_ffn_layer(&mut self, w: &DenseFfn<Self>, s: &mut Scratch<Self>, batch: &Batch<D>) -> Result {
        self.dense_ffn_stages(w, s, batch)
    }

    fn moe_layer(&mut self, w: &Moe<Self>, s: &mut Scratch<Self>, batch: &Batch<D>) -> Result {
        self.moe_stages(w, s, batch)
    }
}
