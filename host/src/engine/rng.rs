//! Random numbers addressed by a counter.
//!
//! Draw `n` of seed `s` is a function of `(s, n)` and nothing else, so a sequence's draws depend neither on its
//! neighbours in the batch nor on how its steps were scheduled.
//!
//! Source: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), whose
//! state after `n` steps is `s + n·γ` and so can be entered anywhere.

use std::hash::{BuildHasher, RandomState};

/// γ, the golden ratio in 64-bit fixed point.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finaliser of SplitMix64 (Stafford's variant 13 of MurmurHash3's).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Draw `n` of `seed`, uniform in `[0, 1)` with 53 bits, as a multiple of 2⁻⁶⁴: every unit has it exactly.
pub(super) fn uniform(seed: u64, n: u64) -> u64 {
    // The seed is mixed first so that seeds γ apart do not give the same draws one step apart.
    let bits = mix(mix(seed).wrapping_add(GAMMA.wrapping_mul(n.wrapping_add(1))));
    bits >> 11 << 11
}

/// A multiple of 2⁻⁶⁴ as a number.
pub(super) fn unit(uniform: u64) -> f64 {
    uniform as f64 * 2f64.powi(-64)
}

/// A seed that differs from call to call and process to process.
pub(super) fn fresh_seed() -> u64 {
    RandomState::new().hash_one(std::time::Instant::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_uniform_and_addressable() {
        let n = 20_000;
        let mean = (0..n).map(|i| unit(uniform(7, i))).sum::<f64>() / n as f64;
        // Standard deviation of the mean is 1/√(12·n) = 0.002; five of them.
        assert!((mean - 0.5).abs() < 0.0102, "mean {mean}");
        assert_eq!(uniform(7, 12), uniform(7, 12));
        assert_ne!(uniform(7, 12), uniform(8, 12));
        assert!((0..n).all(|i| (0.0..1.0).contains(&unit(uniform(i, 0)))));
        assert!(unit(u64::MAX >> 11 << 11) < 1.0, "the largest is below 1");
    }

    #[test]
    fn first_outputs_match_the_published_generator() {
        // SplitMix64 from state 1234567: outputs 1 and 2 of the reference C code by S. Vigna.
        let at = |n: u64| mix(1_234_567u64.wrapping_add(GAMMA.wrapping_mul(n)));
        assert_eq!(at(1), 6_457_827_717_110_365_317);
        assert_eq!(at(2), 3_203_168_211_198_807_973);
    }
}
