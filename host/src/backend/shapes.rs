//! What operations have to know of a layer.

use crate::model::config::Pairing;

/// Rotary position embedding, resolved from the model's metadata.
#[derive(Clone, Debug)]
pub struct Rope {
    /// Rotated dimensions of each head; the rest pass through.
    pub n_rot: u32,
    /// Which dimensions form a pair.
    pub pairing: Pairing,
    /// Radians a position for each pair, `n_rot / 2` values: base, linear or YaRN scaling and `rope_freqs`
    /// divisors are all folded in here, once. In f64: rounded to f32, an angle would be off by up to 0.06 at position 10⁶.
    pub inv_freq: Vec<f64>,
    /// Multiplies cos and sin (YaRN's magnitude; 1 otherwise).
    pub magnitude: f32,
}

/// Shape of an attention operation.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Query heads.
    pub n_head: u32,
    /// Key and value heads; query head `h` reads head `h / (n_head / n_head_kv)`.
    pub n_head_kv: u32,
    /// Dimensions of a head.
    pub head_dim: u32,
    /// Multiplies the scores.
    pub scale: f32,
    /// A query at position `t` sees keys in `(t − window, t]`; `None` sees all up to `t`.
    pub window: Option<u32>,
}

/// Inputs of a gated delta net's convolution that a cache may keep. Three are enough to go on with four taps; with
/// these, a sequence can also go back a few tokens.
pub const MAX_CONV_INPUTS: u32 = 8;

/// Added to `Σ x²` before queries and keys of a gated delta net are divided by its root. Source: the models'
/// reference implementation, `l2norm(x, eps=1e-6)`.
pub const L2_NORM_EPS: f32 = 1e-6;

/// Shape of a gated delta net.
#[derive(Clone, Copy, Debug)]
pub struct DeltaNetShape {
    /// Query and key heads (`ssm.group_count`).
    pub n_head_k: u32,
    /// Value heads (`ssm.time_step_rank`); value head `h` goes with key head `h % n_head_k`.
    pub n_head_v: u32,
    /// Dimensions of a head, of keys and values alike (`ssm.state_size`).
    pub d_state: u32,
    /// Taps of the causal convolution (`ssm.conv_kernel`).
    pub d_conv: u32,
}

impl DeltaNetShape {
    /// Width of the convolved row `[Q | K | V]`.
    pub fn conv_dim(&self) -> u32 {
        (2 * self.n_head_k + self.n_head_v) * self.d_state
    }

    /// Width of the value part.
    pub fn d_inner(&self) -> u32 {
        self.n_head_v * self.d_state
    }
}

/// How a router's logits become weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterRule {
    /// Softmax over the chosen experts only (the same as softmax over all, then renormalised).
    SoftmaxChosen,
    /// Softmax over all experts, not renormalised.
    SoftmaxAll,
}

/// The gated activation of a feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatedAct {
    /// `g·σ(g)·u`.
    SwiGlu,
    /// gpt-oss: `g' = min(g, 7)`, `u' = clamp(u, ±7)`, `g'·σ(1.702·g')·(u' + 1)`.
    SwiGluOai,
}
