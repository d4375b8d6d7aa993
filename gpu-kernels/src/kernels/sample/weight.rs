//! Logits as ordered integers, and their weights as integers whose sums are exact.

use super::SampleParams;
use cuda_std::prelude::*;

/// Bits of a half of a weight: a weight of 1 is 2⁴⁰.
const HALF_BITS: u32 = 20;
const HALF: f32 = (1 << HALF_BITS) as f32;

/// From this key on a logit is +∞ or NaN.
pub(super) const BROKEN: u32 = 0xff80_0000;
/// The key of −∞.
pub(super) const LEAST: u32 = 0x007f_ffff;

/// The logit as an integer in the same order, the largest one for a NaN; 0 and −0 are equal.
#[inline(always)]
pub(super) fn key(logit: f32) -> u32 {
    let bits = (logit + 0.0).to_bits();
    let key = if bits >> 31 != 0 { !bits } else { bits | 1 << 31 };
    if logit.is_nan() { u32::MAX } else { key }
}

/// The logit that has a key.
#[inline(always)]
pub(super) fn logit_of(key: u32) -> f32 {
    f32::from_bits(if key >> 31 != 0 { key & 0x7fff_ffff } else { !key })
}

/// The weight of two halves, or the sum of weights of two sums of halves.
#[inline(always)]
pub(super) fn join(high: u32, low: u32) -> u64 {
    (u64::from(high) << HALF_BITS) + u64::from(low)
}

/// How the tokens of a row weigh.
pub(super) struct Weights {
    max: f32,
    inv_temperature: f32,
    min_p: f32,
    /// Whether all weigh 1.
    ones: bool,
}

impl Weights {
    /// `e^((logit − max)/T)`, in units of 2⁻⁴⁰.
    #[inline(always)]
    pub(super) fn new(p: &SampleParams, max_key: u32) -> Self {
        Weights { max: logit_of(max_key), inv_temperature: p.inv_temperature, min_p: p.min_p, ones: false }
    }

    /// 1 for all.
    #[inline(always)]
    pub(super) fn ones() -> Self {
        Weights { max: 0.0, inv_temperature: 1.0, min_p: 0.0, ones: true }
    }

    #[inline(always)]
    fn relative(&self, key: u32) -> f32 {
        math::exp((logit_of(key) - self.max) * self.inv_temperature)
    }

    /// The weight of a key, in two halves: a block's sum of each fits 32 bits.
    #[inline(always)]
    pub(super) fn of(&self, key: u32) -> (u32, u32) {
        if self.ones { (0, 1) } else { halves(self.relative(key)) }
    }

    /// The weight of a key.
    #[inline(always)]
    pub(super) fn sum_of(&self, key: u32) -> u64 {
        let (high, low) = self.of(key);
        join(high, low)
    }

    /// The weight of a key, 0 where min-p drops it.
    #[inline(always)]
    pub(super) fn kept(&self, key: u32) -> u64 {
        let weight = self.relative(key);
        let (high, low) = halves(weight);
        if weight >= self.min_p { join(high, low) } else { 0 }
    }
}

/// A number in [0, 1] in units of 2⁻⁴⁰, exact but for what lies below them.
#[inline(always)]
fn halves(weight: f32) -> (u32, u32) {
    let scaled = weight * HALF;
    let high = scaled as u32;
    (high, ((scaled - high as f32) * HALF) as u32)
}
