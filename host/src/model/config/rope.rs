//! Rotary position embedding: what a file says about it.

use super::keys::Keys;
use super::{Arch, ConfigError, MAX_HEAD_DIM, MAX_N_CTX};

/// Which lanes of a head turn together. With `n_rot` rotated lanes, pair `p` is:
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pairing {
    /// Lanes `2p` and `2p + 1`: Llama in GGUF files, whose converter permutes the heads.
    Adjacent,
    /// Lanes `p` and `p + n_rot/2`: all others.
    SplitHalf,
}

/// YaRN's parameters. Source: Peng et al., "YaRN: Efficient Context Window Extension of Large Language
/// Models", 2023, section 3; names are llama.cpp's.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    /// `{arch}.rope.scaling.factor`: how much longer the context becomes.
    pub factor: f32,
    /// `{arch}.rope.scaling.original_context_length`, in tokens; `n_ctx_train` where it is missing.
    pub n_ctx_orig: usize,
    /// `{arch}.rope.scaling.yarn_ext_factor`: 1 blends by the ramp; 0 only interpolates.
    pub ext_factor: f32,
    /// `{arch}.rope.scaling.attn_factor`, times `{arch}.rope.scaling.yarn_attn_factor`: a factor on
    /// cosine and sine beside YaRN's own `1 + 0.1·ln factor`.
    pub attn_factor: f32,
    /// `{arch}.rope.scaling.yarn_beta_fast`: turns over the original context above which a pair keeps
    /// its frequency.
    pub beta_fast: f32,
    /// `{arch}.rope.scaling.yarn_beta_slow`: turns below which a pair is interpolated.
    pub beta_slow: f32,
}

/// How positions or frequencies are stretched.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Positions are divided by a factor.
    Linear {
        /// `{arch}.rope.scaling.factor`.
        factor: f32,
    },
    /// Each pair's frequency is kept, divided, or something between.
    Yarn(Yarn),
}

/// Rotary position embedding: pair `p` at position `t` turns by `t · freq_base^(−2p / n_rot)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// `{arch}.rope.dimension_count`: rotated lanes at the start of each head, even, at most
    /// `head_dim`, which is the default. The other lanes stay as they are.
    pub n_rot: usize,
    /// `{arch}.rope.freq_base`.
    pub freq_base: f32,
    /// Which lanes turn together.
    pub pairing: Pairing,
    /// `{arch}.rope.dimension_sections`: pairs that follow each of four position axes, for images. In
    /// text all axes hold the same position, so the sections make no difference.
    pub sections: Option<[u32; 4]>,
    /// `{arch}.rope.scaling.type`.
    pub scaling: RopeScaling,
}

impl Rope {
    pub(super) fn read(keys: &Keys<'_>, head_dim: usize, n_ctx_train: usize) -> Result<Rope, ConfigError> {
        const N_ROT: &str = "rope.dimension_count";
        let n_rot = keys.size_or(N_ROT, 1..=MAX_HEAD_DIM, head_dim)?;
        if n_rot > head_dim || !n_rot.is_multiple_of(2) {
            let problem = format!("{n_rot} is not an even part of the head size {head_dim}");
            return Err(keys.problem(N_ROT, problem));
        }
        let pairing = match keys.arch {
            Arch::Llama => Pairing::Adjacent,
            _ => Pairing::SplitHalf,
        };
        Ok(Rope {
            n_rot,
            freq_base: keys.float_or("rope.freq_base", 1.0..=1e12, 10000.0)?,
            pairing,
            sections: read_sections(keys, n_rot)?,
            scaling: read_scaling(keys, n_ctx_train)?,
        })
    }
}

fn read_sections(keys: &Keys<'_>, n_rot: usize) -> Result<Option<[u32; 4]>, ConfigError> {
    const KEY: &str = "rope.dimension_sections";
    let full = keys.full(KEY);
    if keys.gguf.get(&full).is_none() {
        return Ok(None);
    }
    let given = keys.gguf.u32s(&full)?;
    // Three axes or four; their pairs together are at most the rotated ones.
    let sum: u64 = given.iter().copied().map(u64::from).sum();
    if !(3..=4).contains(&given.len()) || sum > n_rot as u64 / 2 {
        let problem = format!("{} sections with {sum} pairs of {n_rot} lanes", given.len());
        return Err(keys.problem(KEY, problem));
    }
    let mut sections = [0; 4];
    sections[..given.len()].copy_from_slice(&given);
    Ok(Some(sections))
}

fn read_scaling(keys: &Keys<'_>, n_ctx_train: usize) -> Result<RopeScaling, ConfigError> {
    // `scale_linear` is the key's old name. A factor of 0 stands for none, as of 1.
    let factor = match keys.opt_float_in("rope.scaling.factor", 0.0..=1e6)? {
        Some(factor) => factor,
        None => keys.float_or("rope.scale_linear", 0.0..=1e6, 0.0)?,
    };
    let factor = if factor == 0.0 { 1.0 } else { factor };
    match keys.opt_str("rope.scaling.type")?.unwrap_or("linear") {
        "none" => Ok(RopeScaling::None),
        "linear" if factor == 1.0 => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor }),
        "yarn" => read_yarn(keys, factor, n_ctx_train).map(RopeScaling::Yarn),
        other => Err(keys.problem("rope.scaling.type", format!("{other:?} is not supported"))),
    }
}

fn read_yarn(keys: &Keys<'_>, factor: f32, n_ctx_train: usize) -> Result<Yarn, ConfigError> {
    let n_ctx_orig = keys.size_or("rope.scaling.original_context_length", 1..=MAX_N_CTX as u32, n_ctx_train)?;
    let attn = keys.float_or("rope.scaling.attn_factor", 0.0..=1e3, 1.0)?;
    let yarn_attn = keys.float_or("rope.scaling.yarn_attn_factor", 0.0..=1e3, 1.0)?;
    let yarn = Yarn {
        factor,
        n_ctx_orig,
        ext_factor: keys.float_or("rope.scaling.yarn_ext_factor", 0.0..=1.0, 1.0)?,
        attn_factor: attn * yarn_attn,
        beta_fast: keys.float_or("rope.scaling.yarn_beta_fast", 0.0..=1e6, 32.0)?,
        beta_slow: keys.float_or("rope.scaling.yarn_beta_slow", 0.0..=1e6, 1.0)?,
    };
    // The ramp's bounds are logarithms of the betas and must not cross.
    if !(yarn.beta_slow > 0.0 && yarn.beta_fast > yarn.beta_slow) {
        let problem = format!("{} is not above 0 and below beta_fast", yarn.beta_slow);
        return Err(keys.problem("rope.scaling.yarn_beta_slow", problem));
    }
    Ok(yarn)
}
