//! The operations a model is made of.
//!
//! [`Backend`] is the seam between what a network computes (`model`) and how a machine does it (`cpu`,
//! `gpu`). Every operation works on a *batch*: `M` rows, one a token, that belong to `N` sequences;
//! decoding one sequence and prefilling one prompt are special cases. Rows of one sequence are
//! consecutive and in order.
//!
//! Layers are written once, in `model::layers`, as calls of the small operations. The provided methods at
//! the end are whole sub-layers: they call those functions, and a backend overrides one where it can fuse.
//!
//! Shapes are `[rows, cols]`, the last dimension contiguous. Activations are f32.

mod measure;
mod shapes;
mod step;

pub use self::measure::{Launched, Measured, Section};
pub use self::shapes::{AttentionShape, DeltaNetShape, GatedAct, L2_NORM_EPS, MAX_CONV_INPUTS, Rope, RouterRule};
pub use self::step::{Batch, CacheShape, Choose, Draw, LayerCache, Span};
use crate::gguf;
pub use crate::model::config::Pairing;
use crate::model::layers::{self, Attention, DeltaNet, DenseFfn, Moe, Scratch};

/// Tokens in a page of the KV cache.
pub const PAGE_TOKENS: u32 = 64;

/// Why a backend could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device has too little memory left.
    #[error("out of memory: {what} needs {needed} bytes, {free} are free")]
    OutOfMemory {
        /// What was being allocated.
        what: String,
        /// Bytes asked for.
        needed: u64,
        /// Bytes the device had free.
        free: u64,
    },
    /// The backend has no form of an operation for these types or shapes.
    #[error("{0}")]
    Unsupported(String),
    /// A batch asks for something that the session does not have.
    #[error("batch: {0}")]
    Batch(String),
    /// The device or its driver failed.
    #[error("{0}")]
    Device(String),
}

/// Result of a backend operation.
pub type Result<T = (), E = Error> = std::result::Result<T, E>;

/// A machine that can run the model.
pub trait Backend: Sized + Send {
    /// A weight matrix `[rows, cols]`, or a stack of `n_expert` of them.
    type Matrix: Send;
    /// f32 parameters: norm weights, biases, sinks, convolution taps.
    type Vector: Send;
    /// f32 activations `[rows, cols]`; allocated once for the largest batch, its live rows follow the batch.
    type Tensor: Send;
    /// The experts chosen for every row, and their weights.
    type Routes: Send;
    /// KV pages and recurrent state of all layers.
    type Cache: Send;
    /// A batch's metadata where the operations read it.
    type Batch: Send + Sync;

    // --- storage -----------------------------------------------------------------------------------

    /// Takes a weight matrix (2-D) or stack of expert matrices (3-D) from a file.
    fn matrix(&mut self, tensor: &gguf::Tensor<'_>) -> Result<Self::Matrix>;
    /// Takes parameters of any float type from a file, as f32.
    fn vector(&mut self, tensor: &gguf::Tensor<'_>) -> Result<Self::Vector>;
    /// Allocates activations for up to `rows` rows; `cols` is 0 if the model never uses them.
    fn tensor(&mut self, rows: u32, cols: u32) -> Result<Self::Tensor>;
    /// Allocates routes for up to `rows` rows.
    fn routes(&mut self, rows: u32, n_expert_used: u32) -> Result<Self::Routes>;
    /// Allocates the cache.
    fn cache(&mut self, shape: &CacheShape) -> Result<Self::Cache>;
    /// Makes a batch's metadata visible to the operations.
    fn batch(&mut self, batch: &Batch) -> Result<Self::Batch>;
    /// Waits for all work and copies the first `rows` rows of `x` to `out`, `[rows, cols]`.
    fn read(&mut self, x: &Self::Tensor, rows: u32, out: &mut Vec<f32>) -> Result;
    /// Copies the recurrent state of all layers from one slot to another (checkpoint and rollback).
    fn copy_state(&mut self, cache: &mut Self::Cache, from: u32, to: u32) -> Result;

    /// Runs the operations of one step, which `step` calls. A backend may bring its threads together around it.
    fn run<R: Send>(&mut self, step: impl FnOnce(&mut Self) -> R + Send) -> R {
        step(self)
    }

    /// As [`Backend::run`], for a step that is the same operations on the same tensors for every batch of one
    /// shape and the same `kind`: a backend may record it and play the record back from then on.
    fn run_recorded(
        &mut self,
        batch: &Self::Batch,
        kind: u32,
        step: impl FnOnce(&mut Self) -> Result + Send,
    ) -> Result {
        let _ = (batch, kind);
        self.run(step)
    }

    /// What follows is for this part of the model. It computes nothing; measurements tell parts apart by it.
    fn section(&mut self, section: Section) {
        let _ = section;
    }
    /// Times every kernel from now on, or no more.
    fn set_profiling(&mut self, on: bool) {
        let _ = on;
    }
    /// What was measured since; `None` where there are no kernels to measure.
    fn take_profile(&mut self) -> Result<Option<Measured>> {
        Ok(None)
    }
    /// By how much the logit of an expert that was chosen was above that of one that was not, at least, in all routers'
    /// rows since the last call; `None` where there was none, or the backend does not say.
    fn take_narrowest_choice(&mut self) -> Option<f32> {
        None
    }

    // --- the next token, where a backend chooses it ------------------------------------------------

    /// Whether there are the operations of this section.
    const CHOOSES: bool = false;
    /// As [`Backend::batch`], for a step that chooses.
    fn choosing_batch(&mut self, batch: &Batch, choose: &Choose) -> Result<Self::Batch> {
        let _ = (batch, choose);
        Err(Error::Unsupported("choosing a token".to_owned()))
    }
    /// Before everything else of a step: gives the rows that are fed their tokens.
    fn feed(&mut self, batch: &Self::Batch) -> Result {
        let _ = batch;
        Ok(())
    }
    /// After everything else: notes a token below `n_tokens` for each output of the batch, or `u32::MAX` where a logit
    /// is NaN or +∞, or nothing can be drawn.
    fn choose(&mut self, logits: &Self::Tensor, n_tokens: u32, batch: &Self::Batch) -> Result {
        let _ = (logits, n_tokens, batch);
        Err(Error::Unsupported("choosing a token".to_owned()))
    }
    /// Queues handing out what the last step noted, of its first `n` outputs.
    fn queue_chosen(&mut self, n: u32) -> Result {
        let _ = n;
        Err(Error::Unsupported("choosing a token".to_owned()))
    }
    /// Waits for the oldest step that was queued to be handed out, and no later one, and hands it out.
    fn read_chosen(&mut self, ids: &mut Vec<u32>) -> Result {
        let _ = ids;
        Err(Error::Unsupported("choosing a token".to_owned()))
    }

    // --- dense operations --------------------------------------------------------------------------

    /// `out[m] = table[token[m]]`.
    fn embed(&mut self, out: &mut Self::Tensor, table: &Self::Matrix, batch: &Self::Batch) -> Result;
    /// `out[m, i] = w[i]·x[m, i]·rsqrt(mean_i(x[m, i]²) + eps)`.
    fn rms_norm(
        &mut self,
        out: &mut Self::Tensor,
        x: &Self::Tensor,
        w: &Self::Vector,
        eps: f32,
        batch: &Self::Batch,
    ) -> Result;
    /// [`Backend::rms_norm`] in place over every head of `w.len()` dimensions.
    fn rms_norm_heads(&mut self, x: &mut Self::Tensor, w: &Self::Vector, eps: f32, batch: &Self::Batch) -> Result;
    /// `out[m, r] = Σ_k w[r, k]·x[m, k]`.
    fn matmul(&mut self, out: &mut Self::Tensor, w: &Self::Matrix, x: &Self::Tensor, batch: &Self::Batch) -> Result;
    /// `out[m, r] += Σ_k w[r, k]·x[m, k]`.
    fn matmul_add(&mut self, out: &mut Self::Tensor, w: &Self::Matrix, x: &Self::Tensor, batch: &Self::Batch)
    -> Result;
    /// `x[m] += bias`.
    fn add_bias(&mut self, x: &mut Self::Tensor, bias: &Self::Vector, batch: &Self::Batch) -> Result;
    /// `out = act(gate, up)`, over the rows of the batch or, after `expert_matmul`, of its routes.
    fn gated_act(
        &mut self,
        out: &mut Self::Tensor,
        gate: &Self::Tensor,
        up: &Self::Tensor,
        act: GatedAct,
        batch: &Self::Batch,
    ) -> Result;
    /// `out[i] = x[batch.outputs[i]]`.
    fn gather_outputs(&mut self, out: &mut Self::Tensor, x: &Self::Tensor, batch: &Self::Batch) -> Result;
    /// `out[m] = [a[m] | b[m]]`.
    fn join_rows(&mut self, out: &mut Self::Tensor, a: &Self::Tensor, b: &Self::Tensor, batch: &Self::Batch) -> Result;
    /// `logits[i, r] = Σ_k w[r, k]·x[i, k]` over the output rows of the batch.
    fn head(&mut self, logits: &mut Self::Tensor, w: &Self::Matrix, x: &Self::Tensor, batch: &Self::Batch) -> Result;

    // --- attention ---------------------------------------------------------------------------------

    /// Splits rows of per-head `[q | gate]` pairs, `[n_head, 2, head_dim]`, into `q` and `gate`.
    fn split_gate(
        &mut self,
        q: &mut Self::Tensor,
        gate: &mut Self::Tensor,
        qg: &Self::Tensor,
        head_dim: u32,
        batch: &Self::Batch,
    ) -> Result;
    /// Rotates every head of `head_dim` dimensions by its row's position.
    fn rope(&mut self, x: &mut Self::Tensor, head_dim: u32, rope: &Rope, batch: &Self::Batch) -> Result;
    /// Writes keys and values of the batch into layer `layer`'s pages.
    fn kv_write(
        &mut self,
        cache: &mut Self::Cache,
        layer: u32,
        k: &Self::Tensor,
        v: &Self::Tensor,
        batch: &Self::Batch,
    ) -> Result;
    /// Causal grouped-query attention over the cached pages. `sinks[h]` joins the softmax of head `h` as a
    /// score without a value.
    #[expect(clippy::too_many_arguments, reason = "the operation has that many operands")]
    fn attention(
        &mut self,
        out: &mut Self::Tensor,
        q: &Self::Tensor,
        cache: &Self::Cache,
        layer: u32,
        shape: &AttentionShape,
        sinks: Option<&Self::Vector>,
        batch: &Self::Batch,
    ) -> Result;
    /// `x = x·σ(gate)`.
    fn sigmoid_mul(&mut self, x: &mut Self::Tensor, gate: &Self::Tensor, batch: &Self::Batch) -> Result;

    // --- gated delta net ---------------------------------------------------------------------------

    /// Depthwise causal convolution and SiLU: `out[t, c] = SiLU(Σ_j w[c, j]·x[t − d_conv + 1 + j, c])`; inputs
    /// before the batch come from the cache, which is brought up to date.
    #[expect(clippy::too_many_arguments, reason = "the operation has that many operands")]
    fn ssm_conv1d(
        &mut self,
        out: &mut Self::Tensor,
        x: &Self::Tensor,
        w: &Self::Vector,
        cache: &mut Self::Cache,
        layer: u32,
        shape: &DeltaNetShape,
        batch: &Self::Batch,
    ) -> Result;
    /// The gated delta rule over `qkv = [Q | K | V]` rows, for each value head with state `S` (`[v, k]`):
    /// `S ← e^g·S; S ← S + σ(beta)·(v − S·k)·kᵀ; out = S·q`, with `q`, `k` normalised to `x/√(Σx² + `[`L2_NORM_EPS`]`)`,
    /// `q` scaled by `1/√d_state` and `g = softplus(alpha + dt_bias)·a`. The cached state is brought up to date.
    #[expect(clippy::too_many_arguments, reason = "the operation has that many operands")]
    fn ssm_delta_net(
        &mut self,
        out: &mut Self::Tensor,
        qkv: &Self::Tensor,
        alpha: &Self::Tensor,
        beta: &Self::Tensor,
        dt_bias: Option<&Self::Vector>,
        a: Option<&Self::Vector>,
        cache: &mut Self::Cache,
        layer: u32,
        shape: &DeltaNetShape,
        batch: &Self::Batch,
    ) -> Result;
    /// `x = rms_norm(x, w)·SiLU(z)` for every head of `w.len()` dimensions.
    fn ssm_gated_norm(
        &mut self,
        x: &mut Self::Tensor,
        z: &Self::Tensor,
        w: &Self::Vector,
        eps: f32,
        batch: &Self::Batch,
    ) -> Result;

    // --- mixture of experts ------------------------------------------------------------------------

    /// Chooses the `n_expert_used` largest of `logits + bias` (lowest index on a tie) and weighs them.
    fn route(
        &mut self,
        routes: &mut Self::Routes,
        logits: &Self::Tensor,
        bias: Option<&Self::Vector>,
        rule: RouterRule,
        batch: &Self::Batch,
    ) -> Result;
    /// `out[m·k + j, r] = Σ_i w[expert(m, j)][r, i]·x[m or m·k + j, i] + bias[expert(m, j)][r]`: `x` has a row a
    /// token, or with `x_routed` a row a route.
    #[expect(clippy::too_many_arguments, reason = "the operation has that many operands")]
    fn expert_matmul(
        &mut self,
        out: &mut Self::Tensor,
        w: &Self::Matrix,
        bias: Option<&Self::Vector>,
        x: &Self::Tensor,
        x_routed: bool,
        routes: &Self::Routes,
        batch: &Self::Batch,
    ) -> Result;
    /// [`Backend::gated_act`] over the rows of the routes.
    fn expert_act(
        &mut self,
        out: &mut Self::Tensor,
        gate: &Self::Tensor,
        up: &Self::Tensor,
        act: GatedAct,
        routes: &Self::Routes,
        batch: &Self::Batch,
    ) -> Result;
    /// `x[m] += Σ_j weight(m, j)·y[m·k + j]`.
    fn moe_weighted_acc(
        &mut self,
        x: &mut Self::Tensor,
        y: &Self::Tensor,
        routes: &Self::Routes,
        batch: &Self::Batch,
    ) -> Result;
    /// `x[m] += σ(gate[m])·y[m]`, `gate` of one column; without a gate `x += y`.
    fn sigmoid_scale_acc(
        &mut self,
        x: &mut Self::Tensor,
        y: &Self::Tensor,
        gate: Option<&Self::Tensor>,
        batch: &Self::Batch,
    ) -> Result;

    // --- whole sub-layers, for a backend to fuse -----------------------------------------------------

    /// `s.x += attention(norm(s.x))`.
    fn attention_layer(
        &mut self,
        w: &Attention<Self>,
        s: &mut Scratch<Self>,
        cache: &mut Self::Cache,
        layer: u32,
        batch: &Self::Batch,
    ) -> Result {
        layers::attention(self, w, s, cache, layer, batch)
    }
    /// `s.x += delta_net(norm(s.x))`.
    fn delta_net_layer(
        &mut self,
        w: &DeltaNet<Self>,
        s: &mut Scratch<Self>,
        cache: &mut Self::Cache,
        layer: u32,
        batch: &Self::Batch,
    ) -> Result {
        layers::delta_net(self, w, s, cache, layer, batch)
    }
    /// `s.x += ffn(norm(s.x))`.
    fn dense_ffn_layer(&mut self, w: &DenseFfn<Self>, s: &mut Scratch<Self>, batch: &Self::Batch) -> Result {
        layers::dense_ffn(self, w, s, batch)
    }
    /// `s.x += moe(norm(s.x))`.
    fn moe_layer(&mut self, w: &Moe<Self>, s: &mut Scratch<Self>, batch: &Self::Batch) -> Result {
        layers::moe(self, w, s, batch)
    }
}
