//! [`Backend`] for the CPU.

use rayon::prelude::*;

use super::attention::{self, Kv};
use super::delta_net::{Inputs, Recurrent};
use super::dequant::dequantize_row;
use super::elementwise::{gated, inv_rms, sigmoid, silu};
use super::matmul::{Matrix, Product};
use super::{Batch, Cache, CpuBackend, LayerState, Routes, Tensor, zeros};
use crate::backend::{self as api, AttentionShape, Backend, CacheShape, DeltaNetShape, GatedAct, LayerCache};
use crate::backend::{Result, Rope, RouterRule};
use crate::gguf;

type Vector = Vec<f32>;

impl CpuBackend {
    /// `out[i, r] = Σ_k w[r, k]·x[i, k]` for `n` rows, or `+=` with `add`.
    fn product(&mut self, out: &mut Tensor, w: &Matrix, x: &Tensor, n: usize, add: bool) {
        // [r, i], as the tasks write whole rows of it.
        self.scratch.resize(w.rows * n, 0.0);
        Product { w: w.expert(0), xs: (0..n).map(|i| x.row(i)).collect(), y: &mut self.scratch }.compute();
        let y = &self.scratch;
        out.par_rows_mut(n).enumerate().for_each(|(i, out)| {
            for (out, y) in out.iter_mut().zip(y.iter().skip(i).step_by(n)) {
                *out = if add { *out + y } else { *y };
            }
        });
    }
}

impl Backend for CpuBackend {
    type Matrix = Matrix;
    type Vector = Vector;
    type Tensor = Tensor;
    type Routes = Routes;
    type Cache = Cache;
    type Batch = Batch;

    fn matrix(&mut self, tensor: &gguf::Tensor<'_>) -> Result<Matrix> {
        Matrix::new(&self.file, tensor)
    }

    fn vector(&mut self, tensor: &gguf::Tensor<'_>) -> Result<Vector> {
        let mut values = zeros(&tensor.info.name, tensor.rows(), tensor.cols())?;
        dequantize_row(tensor.info.ty, tensor.data(), &mut values);
        Ok(values)
    }

    fn tensor(&mut self, rows: u32, cols: u32) -> Result<Tensor> {
        let (rows, cols) = (rows as usize, cols as usize);
        Ok(Tensor { data: zeros("activations", rows, cols)?, cols })
    }

    fn routes(&mut self, rows: u32, n_expert_used: u32) -> Result<Routes> {
        Ok(Routes::new(rows as usize, n_expert_used as usize))
    }

    fn cache(&mut self, shape: &CacheShape) -> Result<Cache> {
        let layer = |layer: &LayerCache| match *layer {
            LayerCache::Kv { kv_dim } => Kv::new(shape.n_pages as usize, kv_dim as usize).map(LayerState::Kv),
            LayerCache::Recurrent { conv_dim, d_conv, state } => {
                let conv = d_conv.saturating_sub(1) as usize * conv_dim as usize;
                Recurrent::new(shape.n_slots as usize, conv, state as usize).map(LayerState::Recurrent)
            }
        };
        Ok(Cache { layers: shape.layers.iter().map(layer).collect::<Result<_>>()? })
    }

    fn batch(&mut self, batch: &api::Batch) -> Result<Batch> {
        Ok(Batch::new(batch))
    }

    fn read(&mut self, x: &Tensor, rows: u32, out: &mut Vec<f32>) -> Result {
        out.clear();
        out.extend_from_slice(x.rows(rows as usize));
        Ok(())
    }

    fn copy_state(&mut self, cache: &mut Cache, from: u32, to: u32) -> Result {
        for layer in &mut cache.layers {
            if let LayerState::Recurrent(state) = layer {
                state.copy(from as usize, to as usize);
            }
        }
        Ok(())
    }

    fn take_narrowest_choice(&mut self) -> Option<f32> {
        self.narrowest_choice.take()
    }

    fn run<R: Send>(&mut self, step: impl FnOnce(&mut Self) -> R + Send) -> R {
        // From a thread of the pool, work is shared without waking and waiting for it at every operation.
        rayon::scope(move |_| step(self))
    }

    fn embed(&mut self, out: &mut Tensor, table: &Matrix, batch: &Batch) -> Result {
        let table = table.expert(0);
        for (m, token) in batch.tokens.iter().enumerate() {
            let (ty, bytes) = table.row(*token as usize);
            dequantize_row(ty, bytes, out.row_mut(m));
        }
        Ok(())
    }

    fn rms_norm(&mut self, out: &mut Tensor, x: &Tensor, w: &Vector, eps: f32, batch: &Batch) -> Result {
        out.par_rows_mut(batch.rows.len()).enumerate().for_each(|(m, out)| {
            let scale = inv_rms(x.row(m), eps);
            for ((out, x), w) in out.iter_mut().zip(x.row(m)).zip(w) {
                *out = w * x * scale;
            }
        });
        Ok(())
    }

    fn rms_norm_heads(&mut self, x: &mut Tensor, w: &Vector, eps: f32, batch: &Batch) -> Result {
        x.rows_mut(batch.rows.len()).par_chunks_exact_mut(w.len()).for_each(|x| {
            let scale = inv_rms(x, eps);
            for (x, w) in x.iter_mut().zip(w) {
                *x *= w * scale;
            }
        });
        Ok(())
    }

    fn matmul(&mut self, out: &mut Tensor, w: &Matrix, x: &Tensor, batch: &Batch) -> Result {
        self.product(out, w, x, batch.rows.len(), false);
        Ok(())
    }

    fn matmul_add(&mut self, out: &mut Tensor, w: &Matrix, x: &Tensor, batch: &Batch) -> Result {
        self.product(out, w, x, batch.rows.len(), true);
        Ok(())
    }

    fn add_bias(&mut self, x: &mut Tensor, bias: &Vector, batch: &Batch) -> Result {
        for x in x.rows_mut(batch.rows.len()).chunks_exact_mut(bias.len()) {
            for (x, bias) in x.iter_mut().zip(bias) {
                *x += bias;
            }
        }
        Ok(())
    }

    fn gated_act(&mut self, out: &mut Tensor, gate: &Tensor, up: &Tensor, act: GatedAct, batch: &Batch) -> Result {
        gated_rows(out, gate, up, act, batch.rows.len());
        Ok(())
    }

    fn gather_outputs(&mut self, out: &mut Tensor, x: &Tensor, batch: &Batch) -> Result {
        for (i, m) in batch.outputs.iter().enumerate() {
            out.row_mut(i).copy_from_slice(x.row(*m as usize));
        }
        Ok(())
    }

    fn head(&mut self, logits: &mut Tensor, w: &Matrix, x: &Tensor, batch: &Batch) -> Result {
        self.product(logits, w, x, batch.outputs.len(), false);
        Ok(())
    }

    fn join_rows(&mut self, out: &mut Tensor, a: &Tensor, b: &Tensor, batch: &Batch) -> Result {
        for m in 0..batch.rows.len() {
            let (left, right) = out.row_mut(m).split_at_mut(a.cols);
            left.copy_from_slice(a.row(m));
            right.copy_from_slice(b.row(m));
        }
        Ok(())
    }

    fn split_gate(&mut self, q: &mut Tensor, gate: &mut Tensor, qg: &Tensor, head_dim: u32, batch: &Batch) -> Result {
        attention::split_gate(q, gate, qg, head_dim as usize, batch.rows.len());
        Ok(())
    }

    fn rope(&mut self, x: &mut Tensor, head_dim: u32, rope: &Rope, batch: &Batch) -> Result {
        attention::rope(x, head_dim as usize, rope, batch);
        Ok(())
    }

    fn kv_write(&mut self, cache: &mut Cache, layer: u32, k: &Tensor, v: &Tensor, batch: &Batch) -> Result {
        cache.kv_mut(layer).write(k, v, batch);
        Ok(())
    }

    fn attention(
        &mut self,
        out: &mut Tensor,
        q: &Tensor,
        cache: &Cache,
        layer: u32,
        shape: &AttentionShape,
        sinks: Option<&Vector>,
        batch: &Batch,
    ) -> Result {
        cache.kv(layer).attend(out.rows_mut(batch.rows.len()), q, shape, sinks, batch);
        Ok(())
    }

    fn sigmoid_mul(&mut self, x: &mut Tensor, gate: &Tensor, batch: &Batch) -> Result {
        let n = batch.rows.len();
        for (x, gate) in x.rows_mut(n).iter_mut().zip(gate.rows(n)) {
            *x *= sigmoid(*gate);
        }
        Ok(())
    }

    fn ssm_conv1d(
        &mut self,
        out: &mut Tensor,
        x: &Tensor,
        w: &Vector,
        cache: &mut Cache,
        layer: u32,
        shape: &DeltaNetShape,
        batch: &Batch,
    ) -> Result {
        cache.recurrent_mut(layer).conv1d(out, x, w, shape, batch);
        Ok(())
    }

    fn ssm_delta_net(
        &mut self,
        out: &mut Tensor,
        qkv: &Tensor,
        alpha: &Tensor,
        beta: &Tensor,
        dt_bias: Option<&Vector>,
        a: Option<&Vector>,
        cache: &mut Cache,
        layer: u32,
        shape: &DeltaNetShape,
        batch: &Batch,
    ) -> Result {
        let inputs = Inputs { qkv, alpha, beta, dt_bias, a };
        cache.recurrent_mut(layer).delta_net(out, &inputs, shape, batch, &mut self.scratch);
        Ok(())
    }

    fn ssm_gated_norm(&mut self, x: &mut Tensor, z: &Tensor, w: &Vector, eps: f32, batch: &Batch) -> Result {
        let n = batch.rows.len();
        for (x, z) in x.rows_mut(n).chunks_exact_mut(w.len()).zip(z.rows(n).chunks_exact(w.len())) {
            let scale = inv_rms(x, eps);
            for ((x, z), w) in x.iter_mut().zip(z).zip(w) {
                *x = w * *x * scale * silu(*z);
            }
        }
        Ok(())
    }

    fn route(
        &mut self,
        routes: &mut Routes,
        logits: &Tensor,
        bias: Option<&Vector>,
        rule: RouterRule,
        batch: &Batch,
    ) -> Result {
        for m in 0..batch.rows.len() {
            let mut logits = logits.row(m).to_vec();
            for (logit, bias) in logits.iter_mut().zip(bias.into_iter().flatten()) {
                *logit += bias;
            }
            routes.choose(m, &logits, rule);
            if let Some(lead) = routes.lead(m, &logits) {
                self.narrowest_choice = Some(self.narrowest_choice.map_or(lead, |narrowest| narrowest.min(lead)));
            }
        }
        Ok(())
    }

    fn expert_matmul(
        &mut self,
        out: &mut Tensor,
        w: &Matrix,
        bias: Option<&Vector>,
        x: &Tensor,
        x_routed: bool,
        routes: &Routes,
        batch: &Batch,
    ) -> Result {
        let (order, groups) = routes.by_expert(batch.rows.len() * routes.n_used);
        let x_row = |route: &usize| x.row(if x_routed { *route } else { route / routes.n_used });
        // One product an expert, [r, route] each, one after the other in `scratch`.
        self.scratch.resize(w.rows * order.len(), 0.0);
        let mut rest = &mut *self.scratch;
        let mut products = Vec::with_capacity(groups.len());
        for (expert, range) in &groups {
            let (y, after) = rest.split_at_mut(w.rows * range.len());
            rest = after;
            products.push(Product { w: w.expert(*expert), xs: order[range.clone()].iter().map(x_row).collect(), y });
        }
        products.into_par_iter().for_each(Product::compute);
        for (expert, range) in &groups {
            let y = &self.scratch[w.rows * range.start..w.rows * range.end];
            let bias = bias.map(|bias| &bias[expert * w.rows..][..w.rows]);
            for (i, route) in order[range.clone()].iter().enumerate() {
                let out = out.row_mut(*route);
                for (out, y) in out.iter_mut().zip(y.iter().skip(i).step_by(range.len())) {
                    *out = *y;
                }
                for (out, bias) in out.iter_mut().zip(bias.into_iter().flatten()) {
                    *out += bias;
                }
            }
        }
        Ok(())
    }

    fn expert_act(
        &mut self,
        out: &mut Tensor,
        gate: &Tensor,
        up: &Tensor,
        act: GatedAct,
        routes: &Routes,
        batch: &Batch,
    ) -> Result {
        gated_rows(out, gate, up, act, batch.rows.len() * routes.n_used);
        Ok(())
    }

    fn moe_weighted_acc(&mut self, x: &mut Tensor, y: &Tensor, routes: &Routes, batch: &Batch) -> Result {
        for m in 0..batch.rows.len() {
            for route in m * routes.n_used..(m + 1) * routes.n_used {
                for (x, y) in x.row_mut(m).iter_mut().zip(y.row(route)) {
                    *x += routes.weights[route] * y;
                }
            }
        }
        Ok(())
    }

    fn sigmoid_scale_acc(&mut self, x: &mut Tensor, y: &Tensor, gate: Option<&Tensor>, batch: &Batch) -> Result {
        for m in 0..batch.rows.len() {
            let scale = gate.map_or(1.0, |gate| sigmoid(gate.row(m)[0]));
            for (x, y) in x.row_mut(m).iter_mut().zip(y.row(m)) {
                *x += scale * y;
            }
        }
        Ok(())
    }
}

/// `out = act(gate, up)` for `n` rows.
fn gated_rows(out: &mut Tensor, gate: &Tensor, up: &Tensor, act: GatedAct, n: usize) {
    out.par_rows_mut(n).enumerate().for_each(|(i, out)| {
        for ((out, gate), up) in out.iter_mut().zip(gate.row(i)).zip(up.row(i)) {
            *out = gated(act, *gate, *up);
        }
    });
}
