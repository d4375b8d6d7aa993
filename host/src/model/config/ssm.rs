//! The gated delta net: what a file says about it.

use super::keys::Keys;
use super::{Arch, ConfigError, MAX_CONV, MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH};

/// The gated delta net's sizes. The keys keep the names of the state-space models that had them first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ssm {
    /// `{arch}.ssm.conv_kernel`: taps of the short convolution.
    pub d_conv: usize,
    /// `{arch}.ssm.inner_size`: width of the values, `dt_rank · d_state`.
    pub d_inner: usize,
    /// `{arch}.ssm.state_size`: head dimension of keys and values alike.
    pub d_state: usize,
    /// `{arch}.ssm.time_step_rank`: value heads. A multiple of `n_group`.
    pub dt_rank: usize,
    /// `{arch}.ssm.group_count`: key heads.
    pub n_group: usize,
}

impl Ssm {
    pub(super) fn read(keys: &Keys<'_>) -> Result<Option<Ssm>, ConfigError> {
        if keys.arch != Arch::Qwen35Moe {
            return Ok(None);
        }
        let ssm = Ssm {
            d_conv: keys.size("ssm.conv_kernel", 2..=MAX_CONV)?,
            d_inner: keys.size("ssm.inner_size", 1..=MAX_WIDTH)?,
            d_state: keys.size("ssm.state_size", 1..=MAX_HEAD_DIM)?,
            dt_rank: keys.size("ssm.time_step_rank", 1..=MAX_HEADS)?,
            n_group: keys.size("ssm.group_count", 1..=MAX_HEADS)?,
        };
        if ssm.d_inner != ssm.dt_rank * ssm.d_state {
            let problem = format!("{} is not {} heads of {}", ssm.d_inner, ssm.dt_rank, ssm.d_state);
            return Err(keys.problem("ssm.inner_size", problem));
        }
        if !ssm.dt_rank.is_multiple_of(ssm.n_group) {
            let problem = format!("{} does not divide the {} value heads", ssm.n_group, ssm.dt_rank);
            return Err(keys.problem("ssm.group_count", problem));
        }
        Ok(Some(ssm))
    }

    /// Channels of the convolution: queries, keys and values side by side.
    pub fn conv_dim(&self) -> usize {
        2 * self.n_group * self.d_state + self.d_inner
    }
}
