//! Rotary position embedding: from a model's metadata to one frequency a pair.
//!
//! Pair `i` at position `t` turns by `t·inv_freq[i]`, with `inv_freq[i] = base^(−2i / n_rot)` before scaling.
//! The position axes of images (IMRoPE sections) all hold the same position in text, so sections change
//! nothing here.
//!
//! Source: Su et al., "RoFormer", 2021; Peng et al., "YaRN", 2023.

use std::f64::consts::TAU;

use crate::backend::Rope;
use crate::model::config::{self, RopeScaling, Yarn};

/// Resolves a model's rotation. `freq_divisors` are the `n_rot / 2` values of `rope_freqs.weight`, with which
/// Llama 3.1 and later stretch their low frequencies.
pub fn resolve(config: &config::Rope, freq_divisors: Option<&[f32]>) -> Rope {
    let n_pairs = config.n_rot / 2;
    let inv_freq = |i: usize| {
        let divisor = freq_divisors.map_or(1.0, |divisors| f64::from(divisors[i]));
        let unscaled = f64::from(config.freq_base).powf(-2.0 * i as f64 / config.n_rot as f64) / divisor;
        match &config.scaling {
            RopeScaling::None => unscaled,
            RopeScaling::Linear { factor } => unscaled / f64::from(*factor),
            RopeScaling::Yarn(yarn) => {
                let kept = yarn_kept(yarn, config, i);
                unscaled * (kept + (1.0 - kept) / f64::from(yarn.factor))
            }
        }
    };
    Rope {
        n_rot: config.n_rot as u32,
        pairing: config.pairing,
        inv_freq: (0..n_pairs).map(inv_freq).collect(),
        magnitude: magnitude(&config.scaling),
    }
}

/// How far pair `i` keeps its frequency, from 1 (turns often, kept) to 0 (interpolated).
fn yarn_kept(yarn: &Yarn, config: &config::Rope, i: usize) -> f64 {
    let (low, high) = yarn_bounds(yarn, config);
    let ramp = (i as f64 - low) / (high - low).max(0.001);
    (1.0 - ramp.clamp(0.0, 1.0)) * f64::from(yarn.ext_factor)
}

/// The pairs between which the ramp falls: those that turn `beta_fast` and `beta_slow` times over the original
/// context. Rounded outwards, as the paper's code and llama.cpp do, with which the golden files were made; the
/// gpt-oss checkpoint's own configuration does not round (`truncate: false`).
fn yarn_bounds(yarn: &Yarn, config: &config::Rope) -> (f64, f64) {
    let n_rot = config.n_rot as f64;
    let pair_of = |turns: f32| {
        n_rot * (yarn.n_ctx_orig as f64 / (f64::from(turns) * TAU)).ln() / (2.0 * f64::from(config.freq_base).ln())
    };
    (pair_of(yarn.beta_fast).floor().max(0.0), pair_of(yarn.beta_slow).ceil().min(n_rot - 1.0))
}

/// YaRN sharpens attention over long contexts: `1 + 0.1·ln factor` on queries and keys alike.
fn magnitude(scaling: &RopeScaling) -> f32 {
    match scaling {
        RopeScaling::Yarn(yarn) if yarn.ext_factor != 0.0 && yarn.factor > 1.0 => {
            yarn.attn_factor * (1.0 + 0.1 * yarn.factor.ln())
        }
        RopeScaling::Yarn(yarn) => yarn.attn_factor,
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::Pairing;

    fn config(n_rot: usize, freq_base: f32, scaling: RopeScaling) -> config::Rope {
        config::Rope { n_rot, freq_base, pairing: Pairing::SplitHalf, sections: None, scaling }
    }

    fn gpt_oss() -> Yarn {
        Yarn { factor: 32.0, n_ctx_orig: 4096, ext_factor: 1.0, attn_factor: 1.0, beta_fast: 32.0, beta_slow: 1.0 }
    }

    /// B29: divisors of the file.
    #[test]
    fn rope_freqs_divide_the_frequencies() {
        // Llama 3.2 1B.
        let divisors: Vec<f32> =
            [vec![1.0; 15], vec![1.6513, 3.2923, 9.6667], vec![32.0; 14]].into_iter().flatten().collect();
        let config = config(64, 5e5, RopeScaling::None);
        let turn = |rope: &Rope| 4096.0 * rope.inv_freq[31];
        assert!((turn(&resolve(&config, Some(&divisors))) - 3.858e-4).abs() < 1e-7);
        assert!((turn(&resolve(&config, None)) - 1.234e-2).abs() < 1e-5);
    }

    /// B29: YaRN's ramp and magnitude.
    #[test]
    fn yarn_ramp_bounds_of_gpt_oss_are_rounded_outwards() {
        let config = config(64, 150000.0, RopeScaling::Yarn(gpt_oss()));
        // 8.0928 and 17.3980 before rounding.
        assert_eq!(yarn_bounds(&gpt_oss(), &config), (8.0, 18.0));
        let rope = resolve(&config, None);
        assert!((rope.magnitude - 1.34657).abs() < 1e-5);
        let plain = |i: usize| 150000f64.powf(-2.0 * i as f64 / 64.0);
        let ratio = |i: usize| rope.inv_freq[i] / plain(i);
        for (i, wanted) in [(0, 1.0), (8, 1.0), (13, 0.5 + 0.5 / 32.0), (18, 1.0 / 32.0), (31, 1.0 / 32.0)] {
            assert!((ratio(i) - wanted).abs() < 1e-6, "pair {i}: {} instead of {wanted}", ratio(i));
        }
    }

    #[test]
    fn linear_scaling_divides_positions() {
        let plain = resolve(&config(8, 10000.0, RopeScaling::None), None);
        let scaled = resolve(&config(8, 10000.0, RopeScaling::Linear { factor: 4.0 }), None);
        assert_eq!(plain.inv_freq[0], 1.0);
        for (plain, scaled) in plain.inv_freq.iter().zip(&scaled.inv_freq) {
            assert_eq!(*scaled, plain / 4.0);
        }
        assert_eq!(scaled.magnitude, 1.0);
    }
}
