//! Mixtures of experts: what a file says about them.

use super::keys::Keys;
use super::{Arch, ConfigError, MAX_EXPERTS, MAX_WIDTH};

/// A mixture-of-experts FFN.
#[derive(Clone, Debug, PartialEq)]
pub struct Moe {
    /// `{arch}.expert_count`.
    pub n_expert: usize,
    /// `{arch}.expert_used_count`: experts that each token goes to.
    pub n_expert_used: usize,
    /// `{arch}.expert_feed_forward_length`: hidden width of one expert.
    pub n_ff_exp: usize,
    /// `{arch}.expert_shared_feed_forward_length`: hidden width of the shared expert; 0 if there is
    /// none.
    pub n_ff_shexp: usize,
    /// `{arch}.expert_weights_norm`: whether the chosen experts' softmax weights are divided by their
    /// sum, which equals a softmax over the chosen logits alone. True for all published models of
    /// the supported architectures, and where the key is missing.
    pub norm_weights: bool,
    /// `{arch}.expert_weights_scale`: factor on the weights; 1 where the key is missing or 0.
    pub weights_scale: f32,
}

impl Moe {
    pub(super) fn read(keys: &Keys<'_>, n_block: usize, n_ff: usize) -> Result<Option<Moe>, ConfigError> {
        if !keys.arch.is_moe() {
            return match keys.size_or("expert_count", 0..=MAX_EXPERTS, 0)? {
                0 => Ok(None),
                n => Err(keys.problem("expert_count", format!("{n} experts, but none are supported"))),
            };
        }
        let n_expert = keys.size("expert_count", 1..=MAX_EXPERTS)?;
        let n_expert_used = keys.required_uniform("expert_used_count", n_block, 1..=n_expert as u32)?;
        let n_ff_exp = keys.required_uniform("expert_feed_forward_length", n_block, 1..=MAX_WIDTH)?;
        let n_ff_shexp = match keys.arch {
            Arch::Qwen35Moe => {
                let key = "expert_shared_feed_forward_length";
                match keys.size_or(key, 0..=MAX_WIDTH, n_ff)? {
                    0 => return Err(keys.problem(key, "the shared expert has no width".to_owned())),
                    n => n,
                }
            }
            _ => 0,
        };
        // 1: softmax over all experts; 3: softmax over the chosen ones. After norm_weights both agree.
        let gating = keys.size_or("expert_gating_func", 0..=u32::MAX, 1)?;
        if !matches!(gating, 0 | 1 | 3) {
            return Err(keys.problem("expert_gating_func", format!("{gating} is not softmax")));
        }
        let norm_weights = gating == 3 || keys.bool_or("expert_weights_norm", true)?;
        let weights_scale = match keys.opt_float_in("expert_weights_scale", 0.0..=1e6)? {
            None | Some(0.0) => 1.0,
            Some(scale) => scale,
        };
        Ok(Some(Moe { n_expert, n_expert_used, n_ff_exp, n_ff_shexp, norm_weights, weights_scale }))
    }
}
