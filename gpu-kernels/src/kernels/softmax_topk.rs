//! The router of a mixture of experts: the `k` largest logits, and their softmax.
//!
//! Chosen are the `k` largest of `logits + bias`, the lowest index first among equals; a NaN counts as −∞.
//! Weights are the softmax over the chosen (the same as over all, then renormalised), or over all.

use bytemuck::{Pod, Zeroable};
use cuda_std::prelude::*;

/// Lanes a block; a warp takes one row.
pub const THREADS: u32 = 128;
/// Rows a block.
pub const ROWS_PER_BLOCK: u32 = THREADS / 32;
/// The most experts: one bit of a lane's mask for each of its candidates.
pub const MAX_EXPERTS: u32 = 1024;
/// The most experts chosen: a lane keeps one of them.
pub const MAX_USED: u32 = 32;

/// Scalars of [`softmax_topk`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct SoftmaxTopkParams {
    /// Rows.
    pub rows: u32,
    /// Experts, at most [`MAX_EXPERTS`].
    pub n_expert: u32,
    /// Experts chosen, at most [`MAX_USED`] and `n_expert`.
    pub n_used: u32,
    /// 1: softmax over all experts, not renormalised; 0: over the chosen.
    pub over_all: u32,
}

/// Chooses and weighs the experts of every row.
///
/// Launch: `Launch::linear(ceil(rows / ROWS_PER_BLOCK), THREADS)`.
///
/// # Safety
/// `logits` is `[rows, n_expert]`; `bias` has `n_expert` elements or is null; `ids` and `weights` are
/// `[rows, n_used]`.
#[kernel(max_threads = 128)]
pub unsafe fn softmax_topk(
    logits: *const f32,
    bias: *const f32,
    ids: *mut u32,
    weights: *mut f32,
    p: SoftmaxTopkParams,
) {
    let row = thread::index_1d() / 32;
    if row >= p.rows {
        return; // the whole warp at once
    }
    let lane = warp::lane_id();
    // SAFETY: `row < rows`, candidates are below `n_expert`; the whole warp is here for the shuffles.
    unsafe {
        let logits = logits.add(row as usize * p.n_expert as usize);
        let logit = |i: u32| {
            let value = ld(logits.add(i as usize)) + if bias.is_null() { 0.0 } else { ld(bias.add(i as usize)) };
            if value.is_nan() { f32::NEG_INFINITY } else { value }
        };
        // Candidate `j` of a lane is expert `32·j + lane`; `taken` has bit `j` once it is chosen.
        let mut taken = 0u32;
        let mut kept = (f32::NEG_INFINITY, 0u32); // lane `n` keeps the n-th chosen
        let mut largest = f32::NEG_INFINITY;
        let mut n = 0;
        while n < p.n_used {
            let mut best = (f32::NEG_INFINITY, u32::MAX);
            let mut i = lane;
            while i < p.n_expert {
                // Ascending `i`: a later equal does not displace; `u32::MAX` yields to any candidate.
                if taken >> (i / 32) & 1 == 0 && (best.1 == u32::MAX || logit(i) > best.0) {
                    best = (logit(i), i);
                }
                i += 32;
            }
            best = warp_best(best);
            if best.1 % 32 == lane {
                taken |= 1 << (best.1 / 32);
            }
            if n == 0 {
                largest = best.0;
            }
            if lane == n {
                kept = best;
            }
            n += 1;
        }
        let chosen = lane < p.n_used;
        // All −∞: equal weights rather than none.
        let unit = |value: f32| if largest == f32::NEG_INFINITY { 1.0 } else { math::exp(value - largest) };
        let mut sum = 0.0;
        if p.over_all != 0 {
            let mut i = lane;
            while i < p.n_expert {
                sum += unit(logit(i));
                i += 32;
            }
        } else if chosen {
            sum = unit(kept.0);
        }
        let sum = warp::sum(sum);
        if chosen {
            let to = row as usize * p.n_used as usize + lane as usize;
            st(ids.add(to), kept.1);
            st(weights.add(to), unit(kept.0) / sum);
        }
    }
}

/// The larger value, on a tie the lower index, over the warp and in every lane of it.
///
/// # Safety
/// Every lane of the warp comes here.
#[inline(always)]
pub(crate) unsafe fn warp_best(best: (f32, u32)) -> (f32, u32) {
    let mut best = best;
    let mut distance = 16;
    while distance > 0 {
        // SAFETY: the caller's promise.
        let other = unsafe { (warp::shuffle_xor(best.0, distance), warp::shuffle_xor(best.1, distance)) };
        if other.0 > best.0 || (other.0 == best.0 && other.1 < best.1) {
            best = other;
        }
        distance /= 2;
    }
    best
}
