//! The router of a mixture of experts: the `k` largest logits, and their softmax.
//!
//! Chosen are the `k` largest of `logits + bias`, the lowest index first among equals; a NaN counts as −∞.
//! Weights are the softmax over the chosen (the same as over all, then renormalised), or over all.

use bytemuck::{Pod, Zeroable};
use cuda_std::{pdl, prelude::*};

use super::format::select;

/// Lanes a block; a warp takes one row.
pub const THREADS: u32 = 128;
/// Rows a block.
pub const ROWS_PER_BLOCK: u32 = THREADS / 32;
/// The most experts: a lane keeps its candidates in registers.
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
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let row = thread::index_1d() / 32;
    if row >= p.rows {
        return; // the whole warp at once
    }
    // SAFETY: `row < rows`, so the logits, ids and weights have such a row; the whole warp is here.
    unsafe {
        let logits = logits.add(row as usize * p.n_expert as usize);
        let (id, weight) = if p.n_expert <= 32 * FEW {
            choose::<{ FEW as usize }>(logits, bias, &p)
        } else {
            choose::<{ MANY as usize }>(logits, bias, &p)
        };
        let lane = warp::lane_id();
        if lane < p.n_used {
            let to = row as usize * p.n_used as usize + lane as usize;
            st(ids.add(to), id);
            st(weights.add(to), weight);
        }
    }
}

/// A lane's candidates where there are at most 256 experts, and where there are more.
pub(super) const FEW: u32 = 8;
const MANY: u32 = MAX_EXPERTS / 32;

/// A float as an integer of the same order; both zeros are one, a NaN is −∞, and none is 0.
#[inline(always)]
fn key(value: f32) -> u32 {
    let value = if value.is_nan() { f32::NEG_INFINITY } else { value + 0.0 };
    let bits = value.to_bits();
    bits ^ ((bits.cast_signed() >> 31).cast_unsigned() | 0x8000_0000)
}

/// The float of a [`key`].
#[inline(always)]
fn value(key: u32) -> f32 {
    f32::from_bits(if key >> 31 != 0 { key ^ 0x8000_0000 } else { !key })
}

/// The largest key and its index, the lowest index among equals: a tree of depth `log2 J`, not a chain.
#[inline(always)]
fn largest_of<const J: usize>(keys: &[u32; J]) -> (u32, u32) {
    let mut best: [(u32, u32); J] = core::array::from_fn(|j| (keys[j], j as u32));
    let mut n = J;
    while n > 1 {
        n /= 2;
        for i in 0..n {
            let (a, b) = (best[2 * i], best[2 * i + 1]);
            let second = b.0 > a.0;
            best[i] = (select(second, b.0, a.0), select(second, b.1, a.1));
        }
    }
    best[0]
}

/// The experts of one row: lane `n` gets the `n`-th chosen and its weight. `p.rows` is not looked at.
///
/// Candidate `j` of a lane is expert `32·j + lane`. All stay in registers; a round takes the largest by two
/// reductions of the warp, first of the values and then of the indices that have it.
///
/// # Safety
/// The whole warp is here; `logits` and `bias`, if not null, have `p.n_expert` ≤ `32·J` elements, at least one, and
/// `p.n_used` is at most that.
#[inline(always)]
pub(super) unsafe fn choose<const J: usize>(logits: *const f32, bias: *const f32, p: &SoftmaxTopkParams) -> (u32, f32) {
    let lane = warp::lane_id();
    let expert = |j: usize| 32 * j as u32 + lane;
    let keys: [u32; J] = core::array::from_fn(|j| {
        let i = expert(j).min(p.n_expert - 1) as usize;
        // SAFETY: `i` is below the number of experts.
        let logit = unsafe { ld(logits.add(i)) + if bias.is_null() { 0.0 } else { ld(bias.add(i)) } };
        if expert(j) < p.n_expert { key(logit) } else { 0 }
    });
    let mut left = keys; // 0 once it is chosen
    let mut kept = (0, 0); // lane `n` keeps the n-th chosen
    let mut largest = 0;
    let mut n = 0;
    while n < p.n_used {
        // SAFETY: the whole warp is here, and `n_used` is the same in every lane.
        unsafe {
            let (best, j) = largest_of(&left);
            let most = warp::max_u32(best);
            let id = warp::min_u32(if best == most { 32 * j + lane } else { u32::MAX });
            for (j, key) in left.iter_mut().enumerate() {
                *key = if expert(j) == id { 0 } else { *key };
            }
            largest = if n == 0 { most } else { largest };
            kept = if lane == n { (id, most) } else { kept };
        }
        n += 1;
    }
    let largest = value(largest);
    // All −∞: equal weights rather than none.
    let unit = |key: u32| if largest == f32::NEG_INFINITY { 1.0 } else { math::exp(value(key) - largest) };
    let chosen = lane < p.n_used;
    let mut sum = 0.0;
    if p.over_all != 0 {
        for (j, &key) in keys.iter().enumerate() {
            if expert(j) < p.n_expert {
                sum += unit(key);
            }
        }
    } else if chosen {
        sum = unit(kept.1);
    }
    // SAFETY: the whole warp is here.
    let sum = unsafe { warp::sum(sum) };
    // A lane beyond the chosen has no key to weigh.
    (kept.0, if chosen { unit(kept.1) / sum } else { 0.0 })
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
