//! Operations on single rows and elements.

use crate::backend::GatedAct;

/// `1 / (1 + e^−x)`.
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `x·σ(x)`.
pub(super) fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// Largest magnitude that gpt-oss lets into its activation. Source: gpt-oss `swiglu_limit`.
const OAI_LIMIT: f32 = 7.0;
/// Steepness of gpt-oss's sigmoid. Source: gpt-oss reference implementation.
const OAI_ALPHA: f32 = 1.702;

/// See [`GatedAct`].
pub(super) fn gated(act: GatedAct, gate: f32, up: f32) -> f32 {
    match act {
        GatedAct::SwiGlu => silu(gate) * up,
        GatedAct::SwiGluOai => {
            let gate = gate.min(OAI_LIMIT);
            gate * sigmoid(OAI_ALPHA * gate) * (up.clamp(-OAI_LIMIT, OAI_LIMIT) + 1.0)
        }
    }
}

/// `1 / sqrt(mean(x²) + eps)`.
pub(super) fn inv_rms(x: &[f32], eps: f32) -> f32 {
    let sum: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    (1.0 / (sum / x.len() as f64 + f64::from(eps)).sqrt()) as f32
}
