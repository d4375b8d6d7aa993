//! Which models the kernels can run.

use gpu_kernels::kernels::softmax_topk::{MAX_EXPERTS, MAX_USED};

use crate::backend::{DeltaNetShape, Error, Result};
use crate::gpu::ops;
use crate::model::config::{Config, LayerKind};

/// Refuses a model that a kernel is missing for, before any of it is loaded.
///
/// # Errors
/// [`Error::Unsupported`], which names the size.
pub fn check_config(config: &Config) -> Result {
    let fail = |what: String| Err(Error::Unsupported(what));
    let has_attention = config.layers.iter().any(|kind| *kind != LayerKind::DeltaNet);
    if has_attention && !u32::try_from(config.head_dim).is_ok_and(ops::takes_head_dim) {
        return fail(format!("heads of {} dimensions: the GPU kernels take 64, 128 and 256", config.head_dim));
    }
    if !config.n_embd.is_multiple_of(4) {
        return fail(format!("{} embedding dimensions: the GPU kernels take multiples of 4", config.n_embd));
    }
    if let Some(ssm) = &config.ssm {
        let shape = DeltaNetShape {
            n_head_k: ssm.n_group as u32,
            n_head_v: ssm.dt_rank as u32,
            d_state: ssm.d_state as u32,
            d_conv: ssm.d_conv as u32,
        };
        if !ops::takes_delta_net(&shape) {
            let (d_state, d_conv) = (ssm.d_state, ssm.d_conv);
            return fail(format!(
                "a delta net with states of {d_state} and {d_conv} taps: the GPU kernels take 64 or 128, and 4"
            ));
        }
    }
    if let Some(moe) = &config.moe {
        let (n_expert, n_used) = (moe.n_expert, moe.n_expert_used);
        if n_expert > MAX_EXPERTS as usize || n_used > MAX_USED as usize {
            return fail(format!(
                "{n_used} of {n_expert} experts: the GPU kernels take up to {MAX_USED} of {MAX_EXPERTS}"
            ));
        }
    }
    Ok(())
}
