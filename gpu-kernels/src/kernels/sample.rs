//! Drawing the next token: temperature, top-k, top-p, min-p, with a given uniform number.
//!
//! With `w[i] = e^((l[i] − max l)/T)`, a token is kept if
//! - fewer than `top_k` tokens have a larger logit;
//! - the kept tokens with a larger logit weigh less than `top_p` of all that top-k keeps;
//! - `w[i] ≥ min_p`.
//!
//! Equal logits are kept or dropped together, so the result does not depend on any order. Of the kept
//! tokens, taken by rising index, the one is drawn at which the running sum of weights passes `u` of their
//! total. A NaN counts as −∞, and −∞ is never drawn.
//!
//! Both cuts are the same search: the largest threshold with `Σ_{key ≥ threshold} weight ≥ target`, where
//! keys are the logits as integers in the same order and the weight is 1 (top-k) or `w` (top-p). Three bits
//! of the threshold are found in a pass over the row, which stays in L2. Sums are taken in a fixed order:
//! a rerun gives the same token.

use bytemuck::{Pod, Zeroable};
use cuda_std::prelude::*;

/// Lanes a block; a block takes one row.
pub const THREADS: u32 = 512;
const WARPS: u32 = THREADS / 32;
/// Bits of the threshold found in one pass, and the sums that takes.
const BITS: u32 = 3;
const SUMS: usize = (1 << BITS) - 1;
/// Bytes of shared memory: a word for each warp.
pub const SHARED_BYTES: u32 = WARPS * 4;

/// One row's parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct SampleParams {
    /// 1/T, positive.
    pub inv_temperature: f32,
    /// Tokens that may be kept; 0: all.
    pub top_k: u32,
    /// Share of the weight that is kept; 1 or more: all.
    pub top_p: f32,
    /// Smallest weight relative to the largest; 0: all.
    pub min_p: f32,
    /// Uniform in [0, 1).
    pub uniform: f32,
}

/// A row of logits and how its tokens weigh.
#[derive(Clone, Copy)]
struct Row {
    logits: *const f32,
    n: u32,
    max: f32,
    inv_temperature: f32,
    min_p: f32,
}

impl Row {
    /// Logit `i`; a NaN is −∞.
    ///
    /// # Safety
    /// `i < n`.
    #[inline(always)]
    unsafe fn logit(&self, i: u32) -> f32 {
        // SAFETY: the caller's promise.
        let logit = unsafe { ld(self.logits.add(i as usize)) };
        if logit.is_nan() { f32::NEG_INFINITY } else { logit }
    }

    /// `e^((logit − max)/T)`; 0 for −∞.
    #[inline(always)]
    fn weight(&self, logit: f32) -> f32 {
        if logit == f32::NEG_INFINITY { 0.0 } else { math::exp((logit - self.max) * self.inv_temperature) }
    }

    /// The weight of token `i` if it is kept, else 0.
    ///
    /// # Safety
    /// `i < n`.
    #[inline(always)]
    unsafe fn kept(&self, i: u32, threshold: u32) -> f32 {
        // SAFETY: the caller's promise.
        let logit = unsafe { self.logit(i) };
        let weight = self.weight(logit);
        if key(logit) >= threshold && weight >= self.min_p { weight } else { 0.0 }
    }

    /// The largest threshold, at least `floor`, with `Σ_{key ≥ threshold} weight ≥ target`, in every lane.
    ///
    /// # Safety
    /// Every lane of the block comes here; [`SHARED_BYTES`] of shared memory.
    #[inline(always)]
    unsafe fn search(&self, floor: u32, target: f32, weight: impl Fn(&Self, f32) -> f32) -> u32 {
        let mut threshold = 0u32;
        let mut left = 32;
        while left > 0 {
            let bits = if left < BITS { left } else { BITS };
            left -= bits;
            let mut sums = [0.0f32; SUMS];
            let mut i = thread::thread_idx_x();
            while i < self.n {
                // SAFETY: `i < n`.
                let logit = unsafe { self.logit(i) };
                let (key, weight) = (key(logit), weight(self, logit));
                let mut j = 0;
                while j < SUMS {
                    let step = (j as u32 + 1) << left;
                    // With fewer bits left the larger steps would leave 32 bits or the digit: no key reaches them.
                    let reached = j as u32 + 1 < 1 << bits && key >= threshold + step && key >= floor;
                    sums[j] += if reached { weight } else { 0.0 };
                    j += 1;
                }
                i += THREADS;
            }
            let mut digit = 0;
            let mut j = 0;
            while j < SUMS {
                // SAFETY: the whole block is here; a word for each warp.
                let sum = unsafe { block::reduce_sum(dynamic(0), sums[j]) };
                if (j as u32 + 1) < 1 << bits && sum >= target {
                    digit = j as u32 + 1;
                }
                j += 1;
            }
            threshold += digit << left;
        }
        if threshold < floor { floor } else { threshold }
    }
}

/// The logit as an integer in the same order.
#[inline(always)]
fn key(logit: f32) -> u32 {
    // −0 and 0 are equal logits.
    let bits = (logit + 0.0).to_bits();
    if bits >> 31 != 0 { !bits } else { bits | 1 << 31 }
}

/// Draws a token for every row of `logits`, `[rows, n]`.
///
/// Launch: grid `[rows, 1, 1]`, block [`THREADS`], shared memory [`SHARED_BYTES`].
///
/// # Safety
/// `logits` is `[rows, n]`, `n > 0` and at most 2²⁴ (counts are sums of f32 ones); `params` and `token` have
/// `rows` elements.
#[kernel(max_threads = 512)]
pub unsafe fn sample(logits: *const f32, params: *const SampleParams, token: *mut u32, n: u32) {
    let at = thread::block_idx_x() as usize;
    let thread = thread::thread_idx_x();
    // SAFETY: row and tokens are below their counts; the whole block comes to every reduction.
    unsafe {
        let p = ld(params.add(at));
        let mut row = Row {
            logits: logits.add(at * n as usize),
            n,
            max: f32::NEG_INFINITY,
            inv_temperature: p.inv_temperature,
            min_p: p.min_p,
        };
        let mut max = f32::NEG_INFINITY;
        let mut i = thread;
        while i < n {
            max = math::max(max, row.logit(i));
            i += THREADS;
        }
        row.max = block::reduce_max(dynamic(0), max);

        let mut threshold = 0;
        if p.top_k > 0 && p.top_k < n {
            threshold = row.search(0, p.top_k as f32, |_, _| 1.0);
        }
        if p.top_p < 1.0 {
            let mut sum = 0.0;
            let mut i = thread;
            while i < n {
                let logit = row.logit(i);
                sum += if key(logit) >= threshold { row.weight(logit) } else { 0.0 };
                i += THREADS;
            }
            let total = block::reduce_sum(dynamic(0), sum);
            threshold = row.search(threshold, p.top_p * total, |row, logit| row.weight(logit));
        }

        // Each warp sums a segment; the one that holds the drawn token then walks through its own.
        let segment = n / WARPS + 1;
        let (warp, lane) = (thread / 32, warp::lane_id());
        let begin = warp * segment;
        let end = if begin + segment < n { begin + segment } else { n };
        let mut sum = 0.0;
        let mut i = begin + lane;
        while i < end {
            sum += row.kept(i, threshold);
            i += 32;
        }
        let sum = warp::sum(sum);
        let sums = dynamic::<f32>(0);
        if lane == 0 {
            sums.set(warp, sum);
        }
        thread::sync_threads(); // every segment's sum is written before it is read
        let mut total = 0.0;
        let mut w = 0;
        while w < WARPS {
            total += sums.get(w);
            w += 1;
        }
        let mut left = p.uniform * total;
        let mut chosen = 0; // without anything to draw, as with NaN alone: segment 0
        let mut w = 0;
        let mut found = false;
        while w < WARPS {
            let here = sums.get(w);
            if !found && here > 0.0 {
                chosen = w; // so that rounding ends at the last segment that has a candidate
                if left < here {
                    found = true;
                } else {
                    left -= here;
                }
            }
            w += 1;
        }
        if warp == chosen {
            let drawn = walk(&row, threshold, begin, end, if found { left } else { f32::INFINITY });
            if lane == 0 {
                st(token.add(at), drawn);
            }
        }
    }
}

/// The token of `begin .. end` at which the running sum passes `left`, or the last one with a weight.
///
/// # Safety
/// Every lane of the warp comes here; `end ≤ n`.
#[inline(always)]
unsafe fn walk(row: &Row, threshold: u32, begin: u32, end: u32, left: f32) -> u32 {
    let lane = warp::lane_id();
    let mut last = begin;
    let mut before = 0.0;
    let mut base = begin;
    while base < end {
        let i = base + lane;
        // SAFETY: `i < end ≤ n`; the whole warp is here for the shuffles and votes.
        unsafe {
            let weight = if i < end { row.kept(i, threshold) } else { 0.0 };
            // Inclusive running sum over the warp.
            let mut sum = weight;
            let mut distance = 1;
            while distance < 32 {
                let lower = warp::shuffle_up(sum, distance);
                if lane >= distance {
                    sum += lower;
                }
                distance *= 2;
            }
            let passed = warp::ballot(weight > 0.0 && before + sum > left);
            if passed != 0 {
                return base + passed.trailing_zeros();
            }
            let any = warp::ballot(weight > 0.0);
            if any != 0 {
                last = base + 31 - any.leading_zeros();
            }
            before += warp::shuffle_idx(sum, 31);
        }
        base += 32;
    }
    last
}
