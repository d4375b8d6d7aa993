//! The layers, as calls of the backend's operations.
//!
//! `M` rows are one token each. Every layer reads the residual stream `x`, `[M, n_embd]`, and adds to it:
//! `x += mixer(norm(x))`, then `x += ffn(norm(x))`.

use std::sync::Arc;

use crate::backend::{AttentionShape, Backend, DeltaNetShape, GatedAct, Result, Rope, RouterRule};

/// A decoder layer.
pub struct Layer<B: Backend> {
    /// Mixes tokens.
    pub mixer: Mixer<B>,
    /// Works on each token alone.
    pub ffn: Ffn<B>,
}

/// The part of a layer that mixes tokens.
pub enum Mixer<B: Backend> {
    /// Softmax attention.
    Attention(Attention<B>),
    /// Gated delta net.
    DeltaNet(DeltaNet<B>),
}

/// The feed-forward part of a layer.
pub enum Ffn<B: Backend> {
    /// One network for all tokens.
    Dense(DenseFfn<B>),
    /// Each token goes to a few of many networks.
    Moe(Moe<B>),
}

/// Grouped-query attention. With `q_dim = n_head·head_dim` and `kv_dim = n_head_kv·head_dim`:
pub struct Attention<B: Backend> {
    /// `attn_norm`, `[n_embd]`.
    pub norm: B::Vector,
    /// `attn_q`, `[q_dim, n_embd]`, or with `gated` `[2·q_dim, n_embd]`: each head's query, then its gate.
    pub q: B::Matrix,
    /// `attn_k`, `[kv_dim, n_embd]`.
    pub k: B::Matrix,
    /// `attn_v`, `[kv_dim, n_embd]`.
    pub v: B::Matrix,
    /// `attn_output`, `[n_embd, q_dim]`.
    pub output: B::Matrix,
    /// `attn_q.bias`, `[q_dim]`.
    pub q_bias: Option<B::Vector>,
    /// `attn_k.bias`, `[kv_dim]`.
    pub k_bias: Option<B::Vector>,
    /// `attn_v.bias`, `[kv_dim]`.
    pub v_bias: Option<B::Vector>,
    /// `attn_output.bias`, `[n_embd]`.
    pub output_bias: Option<B::Vector>,
    /// `attn_q_norm`, `[head_dim]`.
    pub q_norm: Option<B::Vector>,
    /// `attn_k_norm`, `[head_dim]`.
    pub k_norm: Option<B::Vector>,
    /// `attn_sinks`, `[n_head]`.
    pub sinks: Option<B::Vector>,
    /// Whether the output of each head is gated.
    pub gated: bool,
    /// Heads, scale and window.
    pub shape: AttentionShape,
    /// Position embedding.
    pub rope: Arc<Rope>,
    /// Of the norms.
    pub eps: f32,
}

/// Gated delta net. With `conv_dim = (2·n_head_k + n_head_v)·d_state` and `d_inner = n_head_v·d_state`:
pub struct DeltaNet<B: Backend> {
    /// `attn_norm`, `[n_embd]`.
    pub norm: B::Vector,
    /// `attn_qkv`, `[conv_dim, n_embd]`: all queries, all keys, all values.
    pub qkv: B::Matrix,
    /// `attn_gate`, `[d_inner, n_embd]`.
    pub z: B::Matrix,
    /// `ssm_alpha`, `[n_head_v, n_embd]`.
    pub alpha: B::Matrix,
    /// `ssm_beta`, `[n_head_v, n_embd]`.
    pub beta: B::Matrix,
    /// `ssm_conv1d`, `[conv_dim, d_conv]`.
    pub conv1d: B::Vector,
    /// `ssm_dt.bias`, `[n_head_v]`.
    pub dt_bias: Option<B::Vector>,
    /// `ssm_a`, `[n_head_v]`: `−exp(A_log)`.
    pub a: Option<B::Vector>,
    /// `ssm_norm`, `[d_state]`.
    pub out_norm: B::Vector,
    /// `ssm_out`, `[n_embd, d_inner]`.
    pub output: B::Matrix,
    /// Heads and taps.
    pub shape: DeltaNetShape,
    /// Of the norms.
    pub eps: f32,
}

/// Gated feed-forward network.
pub struct DenseFfn<B: Backend> {
    /// `ffn_norm`, `[n_embd]`.
    pub norm: B::Vector,
    /// `ffn_gate`, `[n_ff, n_embd]`.
    pub gate: B::Matrix,
    /// `ffn_up`, `[n_ff, n_embd]`.
    pub up: B::Matrix,
    /// `ffn_down`, `[n_embd, n_ff]`.
    pub down: B::Matrix,
    /// Between them.
    pub act: GatedAct,
    /// Of the norm.
    pub eps: f32,
}

/// Mixture of experts.
pub struct Moe<B: Backend> {
    /// `ffn_norm` or `post_attention_norm`, `[n_embd]`.
    pub norm: B::Vector,
    /// `ffn_gate_inp`, `[n_expert, n_embd]`.
    pub router: B::Matrix,
    /// `ffn_gate_inp.bias`, `[n_expert]`.
    pub router_bias: Option<B::Vector>,
    /// From logits to weights.
    pub rule: RouterRule,
    /// `ffn_gate_exps`, `n_expert × [n_ff_exp, n_embd]`.
    pub gate: B::Matrix,
    /// `ffn_up_exps`, `n_expert × [n_ff_exp, n_embd]`.
    pub up: B::Matrix,
    /// `ffn_down_exps`, `n_expert × [n_embd, n_ff_exp]`.
    pub down: B::Matrix,
    /// `ffn_gate_exps.bias`, `[n_expert, n_ff_exp]`.
    pub gate_bias: Option<B::Vector>,
    /// `ffn_up_exps.bias`, `[n_expert, n_ff_exp]`.
    pub up_bias: Option<B::Vector>,
    /// `ffn_down_exps.bias`, `[n_expert, n_embd]`.
    pub down_bias: Option<B::Vector>,
    /// Between them.
    pub act: GatedAct,
    /// An expert that every token goes to.
    pub shared: Option<SharedExpert<B>>,
    /// Of the norm.
    pub eps: f32,
}

/// The expert that every token goes to.
pub struct SharedExpert<B: Backend> {
    /// `ffn_gate_inp_shexp`, `[1, n_embd]`: the logit of its weight, which is 1 without it.
    pub router: Option<B::Matrix>,
    /// `ffn_gate_shexp`, `[n_ff_shexp, n_embd]`.
    pub gate: B::Matrix,
    /// `ffn_up_shexp`, `[n_ff_shexp, n_embd]`.
    pub up: B::Matrix,
    /// `ffn_down_shexp`, `[n_embd, n_ff_shexp]`.
    pub down: B::Matrix,
}

/// The activations of a step, shared by all layers. `M` is the largest batch, `k = n_expert_used`.
pub struct Scratch<B: Backend> {
    /// The residual stream, `[M, n_embd]`.
    pub x: B::Tensor,
    /// A layer's normed input, `[M, n_embd]`.
    pub norm: B::Tensor,
    /// Queries and gates as projected, `[M, 2·q_dim]`.
    pub qg: B::Tensor,
    /// Queries, `[M, q_dim]`.
    pub q: B::Tensor,
    /// Output gates, `[M, q_dim]`.
    pub q_gate: B::Tensor,
    /// Keys, `[M, kv_dim]`.
    pub k: B::Tensor,
    /// Values, `[M, kv_dim]`.
    pub v: B::Tensor,
    /// Output of all heads, `[M, q_dim]`.
    pub attn: B::Tensor,
    /// Delta net: `[Q | K | V]` as projected, `[M, conv_dim]`.
    pub qkv: B::Tensor,
    /// Delta net: `qkv` after the convolution, `[M, conv_dim]`.
    pub conv: B::Tensor,
    /// Delta net: output gates, `[M, d_inner]`.
    pub z: B::Tensor,
    /// Delta net: decay logits, `[M, n_head_v]`.
    pub alpha: B::Tensor,
    /// Delta net: step-size logits, `[M, n_head_v]`.
    pub beta: B::Tensor,
    /// Delta net: output of all heads, `[M, d_inner]`.
    pub delta: B::Tensor,
    /// Dense FFN or shared expert: gate, `[M, n_ff]`.
    pub gate: B::Tensor,
    /// Dense FFN or shared expert: up, `[M, n_ff]`.
    pub up: B::Tensor,
    /// Dense FFN or shared expert: activated, `[M, n_ff]`.
    pub act: B::Tensor,
    /// Router logits, `[M, n_expert]`.
    pub router: B::Tensor,
    /// The chosen experts.
    pub routes: B::Routes,
    /// Experts' gate, `[M·k, n_ff_exp]`.
    pub expert_gate: B::Tensor,
    /// Experts' up, `[M·k, n_ff_exp]`.
    pub expert_up: B::Tensor,
    /// Experts' activated, `[M·k, n_ff_exp]`.
    pub expert_act: B::Tensor,
    /// Experts' output, `[M·k, n_embd]`.
    pub expert_out: B::Tensor,
    /// Logit of the shared expert's weight, `[M, 1]`.
    pub shared_gate: B::Tensor,
    /// Shared expert's output, `[M, n_embd]`.
    pub shared_out: B::Tensor,
    /// Normed rows whose logits are wanted, `[n_outputs, n_embd]`.
    pub output: B::Tensor,
    /// `[n_outputs, n_vocab]`.
    pub logits: B::Tensor,
}

/// `s.x += Attention(norm(s.x))`.
///
/// # Errors
/// The backend's. So for all layers.
pub fn attention<B: Backend>(
    b: &mut B,
    w: &Attention<B>,
    s: &mut Scratch<B>,
    cache: &mut B::Cache,
    layer: u32,
    batch: &B::Batch,
) -> Result {
    let head_dim = w.shape.head_dim;
    b.rms_norm(&mut s.norm, &s.x, &w.norm, w.eps, batch)?;
    if w.gated {
        b.matmul(&mut s.qg, &w.q, &s.norm, batch)?;
        b.split_gate(&mut s.q, &mut s.q_gate, &s.qg, head_dim, batch)?;
    } else {
        b.matmul(&mut s.q, &w.q, &s.norm, batch)?;
    }
    b.matmul(&mut s.k, &w.k, &s.norm, batch)?;
    b.matmul(&mut s.v, &w.v, &s.norm, batch)?;
    for (x, bias) in [(&mut s.q, &w.q_bias), (&mut s.k, &w.k_bias), (&mut s.v, &w.v_bias)] {
        if let Some(bias) = bias {
            b.add_bias(x, bias, batch)?;
        }
    }
    for (x, norm) in [(&mut s.q, &w.q_norm), (&mut s.k, &w.k_norm)] {
        if let Some(norm) = norm {
            b.rms_norm_heads(x, norm, w.eps, batch)?;
        }
        b.rope(x, head_dim, &w.rope, batch)?;
    }
    b.kv_write(cache, layer, &s.k, &s.v, batch)?;
    b.attention(&mut s.attn, &s.q, cache, layer, &w.shape, w.sinks.as_ref(), batch)?;
    if w.gated {
        b.sigmoid_mul(&mut s.attn, &s.q_gate, batch)?;
    }
    b.matmul_add(&mut s.x, &w.output, &s.attn, batch)?;
    if let Some(bias) = &w.output_bias {
        b.add_bias(&mut s.x, bias, batch)?;
    }
    Ok(())
}

/// `s.x += DeltaNet(norm(s.x))`.
pub fn delta_net<B: Backend>(
    b: &mut B,
    w: &DeltaNet<B>,
    s: &mut Scratch<B>,
    cache: &mut B::Cache,
    layer: u32,
    batch: &B::Batch,
) -> Result {
    b.rms_norm(&mut s.norm, &s.x, &w.norm, w.eps, batch)?;
    b.matmul(&mut s.qkv, &w.qkv, &s.norm, batch)?;
    b.matmul(&mut s.z, &w.z, &s.norm, batch)?;
    b.matmul(&mut s.alpha, &w.alpha, &s.norm, batch)?;
    b.matmul(&mut s.beta, &w.beta, &s.norm, batch)?;
    delta_net_mix(b, w, s, cache, layer, batch)?;
    b.matmul_add(&mut s.x, &w.output, &s.delta, batch)
}

/// What a gated delta net does between its projections: `s.delta` from `s.qkv`, `s.z`, `s.alpha` and `s.beta`.
pub fn delta_net_mix<B: Backend>(
    b: &mut B,
    w: &DeltaNet<B>,
    s: &mut Scratch<B>,
    cache: &mut B::Cache,
    layer: u32,
    batch: &B::Batch,
) -> Result {
    b.ssm_conv1d(&mut s.conv, &s.qkv, &w.conv1d, cache, layer, &w.shape, batch)?;
    let (dt_bias, a) = (w.dt_bias.as_ref(), w.a.as_ref());
    b.ssm_delta_net(&mut s.delta, &s.conv, &s.alpha, &s.beta, dt_bias, a, cache, layer, &w.shape, batch)?;
    b.ssm_gated_norm(&mut s.delta, &s.z, &w.out_norm, w.eps, batch)
}

/// `s.x += down(act(gate(norm(s.x)), up(norm(s.x))))`.
pub fn dense_ffn<B: Backend>(b: &mut B, w: &DenseFfn<B>, s: &mut Scratch<B>, batch: &B::Batch) -> Result {
    b.rms_norm(&mut s.norm, &s.x, &w.norm, w.eps, batch)?;
    b.matmul(&mut s.gate, &w.gate, &s.norm, batch)?;
    b.matmul(&mut s.up, &w.up, &s.norm, batch)?;
    b.gated_act(&mut s.act, &s.gate, &s.up, w.act, batch)?;
    b.matmul_add(&mut s.x, &w.down, &s.act, batch)
}

/// `s.x += Σ_chosen weight·expert(norm(s.x)) + σ(gate)·shared(norm(s.x))`.
pub fn moe<B: Backend>(b: &mut B, w: &Moe<B>, s: &mut Scratch<B>, batch: &B::Batch) -> Result {
    b.rms_norm(&mut s.norm, &s.x, &w.norm, w.eps, batch)?;
    b.matmul(&mut s.router, &w.router, &s.norm, batch)?;
    b.route(&mut s.routes, &s.router, w.router_bias.as_ref(), w.rule, batch)?;
    b.expert_matmul(&mut s.expert_gate, &w.gate, w.gate_bias.as_ref(), &s.norm, false, &s.routes, batch)?;
    b.expert_matmul(&mut s.expert_up, &w.up, w.up_bias.as_ref(), &s.norm, false, &s.routes, batch)?;
    b.expert_act(&mut s.expert_act, &s.expert_gate, &s.expert_up, w.act, &s.routes, batch)?;
    b.expert_matmul(&mut s.expert_out, &w.down, w.down_bias.as_ref(), &s.expert_act, true, &s.routes, batch)?;
    b.moe_weighted_acc(&mut s.x, &s.expert_out, &s.routes, batch)?;

    let Some(shared) = &w.shared else { return Ok(()) };
    b.matmul(&mut s.gate, &shared.gate, &s.norm, batch)?;
    b.matmul(&mut s.up, &shared.up, &s.norm, batch)?;
    b.gated_act(&mut s.act, &s.gate, &s.up, w.act, batch)?;
    b.matmul(&mut s.shared_out, &shared.down, &s.act, batch)?;
    if let Some(router) = &shared.router {
        b.matmul(&mut s.shared_gate, router, &s.norm, batch)?;
    }
    b.sigmoid_scale_acc(&mut s.x, &s.shared_out, shared.router.as_ref().map(|_| &s.shared_gate), batch)
}
