//! Drawing the next token: temperature, top-k, top-p, min-p, with a given random number.
//!
//! Tokens are ranked by their logit, the lower index first on a tie. With `w[i] = e^((l[i] − max l)/T)`, kept are
//! - of all tokens the first `top_k`;
//! - of those the shortest run from the first on that weighs at least `top_p` of their sum;
//! - of those the ones with `w[i] ≥ min_p`.
//!
//! Of the kept tokens, by rising index, the one is drawn at which the running sum of weights passes the share
//! `uniform` of their total. A row with a NaN or +∞, or without anything to draw, gives [`NO_INDEX`]; −∞ is never
//! drawn.
//!
//! Logits become integer *keys* of the same order. Both cuts are the same search, [`sample_search`]: the largest
//! threshold with `Σ_{key ≥ threshold} weight ≥ target`, where the weight is 1 or `w`. A pass over the row finds 11
//! bits of it by a histogram of the keys that agree with the bits found so far. Equal keys share a bin to the end,
//! so how many of them are kept is a division.
//!
//! Blocks share a row. Weights are integers, multiples of 2⁻⁴⁰, and so their sums are the same in every order: a
//! rerun draws the same token. The last block of a pass to finish reads the sums.

mod draw;
mod weight;

use bytemuck::{Pod, Zeroable};
use cuda_std::{atomic, pdl, prelude::*};

pub use super::argmax::NO_INDEX;
pub use draw::sample_draw;
use weight::{Weights, key};

/// Lanes a block.
pub const THREADS: u32 = 256;
/// Logits that one block takes.
pub const SHARE: u32 = 2048;
const PER_LANE: u32 = SHARE / THREADS;
/// Bins of a pass.
pub const BINS: u32 = 2048;
const BINS_PER_LANE: u32 = BINS / THREADS;
/// Passes of one search, by the bits of the key below each: 11, 11 and 10 bits.
const SHIFTS: [u32; 3] = [21, 10, 0];
/// Passes of both searches: of top-k, then of top-p.
pub const PASSES: u32 = 2 * SHIFTS.len() as u32;
/// Bytes of shared memory of both kernels: two words a bin, sums of the warps, and a word for the block.
pub const SHARED_BYTES: u32 = 2 * 4 * BINS + SCAN_BYTES + 16;
const SCAN_BYTES: u32 = THREADS / 32 * 8;
/// The longest row: the sum of its weights fits 64 bits.
pub const MAX_LOGITS: u32 = 1 << 23;

/// One row's parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct SampleParams {
    /// A number in [0, 1), as a multiple of 2⁻⁶⁴.
    pub uniform: u64,
    /// Share of the weight that is kept, as a multiple of 2⁻⁶⁴; [`u64::MAX`]: all.
    pub top_p: u64,
    /// 1/T, positive and finite.
    pub inv_temperature: f32,
    /// Smallest weight relative to the largest; 0: all.
    pub min_p: f32,
    /// Tokens that may be kept; 0: all.
    pub top_k: u32,
    /// Zero.
    pub reserved: u32,
}

/// Where a row's search stands: written by the last block of a pass, for the next pass.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct SampleState {
    /// Weight still to be found among the keys that begin with `prefix`.
    left: u64,
    /// The threshold's bits so far.
    prefix: u32,
    /// What is kept: keys above the threshold, and of those equal to it the first `n_equal`.
    threshold: u32,
    n_equal: u32,
    reserved: u32,
}

/// Words of `marks` for each row: the largest key, and the blocks that are done with a pass.
pub const MARKS: usize = 2;

/// One pass of a search: `pass` below 3 for top-k, then for top-p.
///
/// Launch: grid `[ceil(n / SHARE), rows, 1]`, block [`THREADS`], shared memory [`SHARED_BYTES`]; dependent launch
/// allowed. All [`PASSES`] run in order, then [`sample_draw`].
///
/// # Safety
/// `logits` has `rows` rows of at least `n` elements, `stride` apart, `0 < n ≤` [`MAX_LOGITS`]; `params` and `state`
/// have `rows` elements; `bins` is `[rows, BINS]` and `marks` `[rows, MARKS]`, both zero before the first pass ever;
/// no two overlap.
#[kernel(max_threads = 256)]
pub unsafe fn sample_search(
    logits: *const f32,
    params: *const SampleParams,
    state: *mut SampleState,
    bins: *mut u64,
    marks: *mut u32,
    n: u32,
    stride: u32,
    pass: u32,
) {
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let row = thread::block_idx_y() as usize;
    // SAFETY: rows and logits are below their counts, bins below theirs; every lane of the block takes the same
    // branches around barriers, for they depend on the row and on what one lane told all.
    unsafe {
        let (state, bins, marks) = (state.add(row), bins.add(row * BINS as usize), marks.add(row * MARKS));
        let p = ld(params.add(row));
        let by_weight = pass >= PASSES / 2;
        let level = if by_weight { pass - PASSES / 2 } else { pass };
        let searches = if by_weight { p.top_p != u64::MAX } else { p.top_k > 0 && p.top_k < n };
        // The first pass runs for every row: it finds the largest key.
        if !searches && pass > 0 {
            return;
        }
        let shift = if level == 0 {
            SHIFTS[0]
        } else if level == 1 {
            SHIFTS[1]
        } else {
            SHIFTS[2]
        };
        let above = if level == 0 {
            32
        } else if level == 1 {
            SHIFTS[0]
        } else {
            SHIFTS[1]
        };
        let mut s = if pass == 0 { SampleState::zeroed() } else { ld(state) };
        if level == 0 {
            s.prefix = 0;
        }
        let weights = if by_weight { Weights::new(&p, ld(marks)) } else { Weights::ones() };

        let (lane, first) = (thread::thread_idx_x(), thread::block_idx_x() * SHARE);
        let (high, low) = (dynamic::<u32>(0), dynamic::<u32>(4 * BINS));
        let mut i = lane;
        while i < 2 * BINS / 4 {
            dynamic::<U32x4>(0).set(i, U32x4 { x: 0, y: 0, z: 0, w: 0 });
            i += THREADS;
        }
        thread::sync_threads(); // the bins are zero before anybody adds
        let mut max = 0;
        let mut j = 0;
        while j < PER_LANE {
            let i = first + j * THREADS + lane;
            if i < n {
                let key = key(ld(logits.add(row * stride as usize + i as usize)));
                max = if key > max { key } else { max };
                // `above` may be all bits of the key.
                let agrees = u64::from(key ^ s.prefix) >> above == 0;
                if searches && agrees && (!by_weight || key > s.threshold) {
                    let bin = key >> shift & (BINS - 1);
                    let weight = weights.of(key);
                    if weight.0 > 0 {
                        high.atomic_add(bin, weight.0);
                    }
                    if weight.1 > 0 {
                        low.atomic_add(bin, weight.1);
                    }
                }
            }
            j += 1;
        }
        if pass == 0 {
            max = warp::reduce(max, |a, b| if a > b { a } else { b });
            if warp::lane_id() == 0 {
                atomic::atomic_max_u32(marks, max);
            }
        }
        thread::sync_threads(); // every weight is in its bin
        let mut i = lane;
        while i < BINS {
            let sum = weight::join(high.get(i), low.get(i));
            if sum > 0 {
                atomic::red_add_u64(bins.add(i as usize), sum);
            }
            i += THREADS;
        }
        if is_last_block(marks) {
            settle(state, bins, s, &p, &weights, Pass { by_weight, level, shift, above, searches });
        }
    }
}

/// What a pass does.
struct Pass {
    by_weight: bool,
    level: u32,
    /// Bits of the key below this pass's digit, and below the digits before.
    shift: u32,
    above: u32,
    searches: bool,
}

/// Finds the threshold's next digit in the bins and empties them.
///
/// # Safety
/// Every lane of the row's last block comes here; `bins` has the sums of all blocks.
#[inline(always)]
unsafe fn settle(
    state: *mut SampleState,
    bins: *mut u64,
    mut s: SampleState,
    p: &SampleParams,
    weights: &Weights,
    pass: Pass,
) {
    let lane = thread::thread_idx_x();
    // SAFETY: bins are below their count; the whole block is here.
    unsafe {
        if !pass.searches {
            if lane == 0 {
                st(state, s);
            }
            return;
        }
        // Those equal to top-k's threshold are in no bin yet: which of them are kept is a matter of their number.
        let equal_agree = u64::from(s.threshold ^ s.prefix) >> pass.above == 0;
        let adds_equal = pass.by_weight && s.n_equal > 0 && equal_agree;
        let (equal_bin, each) = (s.threshold >> pass.shift & (BINS - 1), weights.sum_of(s.threshold));
        // Lane 0 has the largest keys.
        let first = BINS - BINS_PER_LANE * (lane + 1);
        let mut sums = [0u64; BINS_PER_LANE as usize];
        let mut own = 0;
        let mut j = 0;
        while j < BINS_PER_LANE {
            let at = bins.add((first + j) as usize);
            let equal = if adds_equal && equal_bin == first + j { u64::from(s.n_equal) * each } else { 0 };
            sums[j as usize] = ld(at) + equal;
            own += sums[j as usize];
            st(at, 0);
            j += 1;
        }
        let (mut before, total) = scan(own);
        if pass.level == 0 {
            s.left = if pass.by_weight { share_up(total, p.top_p) } else { u64::from(p.top_k) };
        }
        if !(before < s.left && s.left <= before + own) {
            return;
        }
        let mut digit = 0;
        let mut found = false;
        let mut j = BINS_PER_LANE;
        while j > 0 {
            j -= 1;
            if !found {
                if s.left <= before + sums[j as usize] {
                    (digit, found) = (first + j, true);
                } else {
                    before += sums[j as usize];
                }
            }
        }
        s.left -= before;
        s.prefix |= digit << pass.shift;
        if pass.shift == 0 {
            s.threshold = s.prefix;
            // So many of the equal ones reach the target; their bin does, so their weight is not 0.
            let each = weights.sum_of(s.threshold);
            s.n_equal = if each > 0 { s.left.div_ceil(each) as u32 } else { 0 };
        }
        st(state, s);
    }
}

/// Whether this block is the row's last to come here; then it sees what the others wrote before.
///
/// # Safety
/// Every lane of the block comes here; `marks` is the row's.
#[inline(always)]
unsafe fn is_last_block(marks: *mut u32) -> bool {
    let told = dynamic::<u32>(2 * 4 * BINS + SCAN_BYTES);
    // SAFETY: a word for the block, written by one lane before the barrier and read after it.
    unsafe {
        thread::sync_threads(); // what this block's lanes wrote comes before its mark
        if thread::thread_idx_x() == 0 {
            let last = atomic::atomic_add_acq_rel(marks.add(1), 1) == thread::grid_dim_x() - 1;
            if last {
                atomic::st_relaxed(marks.add(1), 0);
            }
            told.set(0, u32::from(last));
        }
        thread::sync_threads(); // lane 0 has told
        told.get(0) != 0
    }
}

/// The sum of the values of the lanes before this one, and of all.
///
/// # Safety
/// Every lane of the block comes here.
#[inline(always)]
unsafe fn scan(value: u64) -> (u64, u64) {
    let warps = dynamic::<u64>(2 * 4 * BINS);
    let (lane, this) = (warp::lane_id(), thread::thread_idx_x() / 32);
    // SAFETY: a word for each warp; whole warps come to the shuffles.
    unsafe {
        let mut sum = value;
        let mut distance = 1;
        while distance < 32 {
            let high = warp::shuffle_up((sum >> 32) as u32, distance);
            let low = warp::shuffle_up(sum as u32, distance);
            if lane >= distance {
                sum += u64::from(high) << 32 | u64::from(low);
            }
            distance *= 2;
        }
        if lane == 31 {
            warps.set(this, sum);
        }
        thread::sync_threads(); // every warp's sum is written before it is read
        let (mut before, mut total) = (sum - value, 0);
        let mut w = 0;
        while w < THREADS / 32 {
            let warp = warps.get(w);
            before += if w < this { warp } else { 0 };
            total += warp;
            w += 1;
        }
        thread::sync_threads(); // and read before the next use writes
        (before, total)
    }
}

/// `⌊total·share⌋`, the share a multiple of 2⁻⁶⁴.
#[inline(always)]
fn share_of(total: u64, share: u64) -> u64 {
    ((u128::from(total) * u128::from(share)) >> 64) as u64
}

/// The same rounded up, and at least 1.
#[inline(always)]
fn share_up(total: u64, share: u64) -> u64 {
    let exact = total.wrapping_mul(share) == 0;
    let share = share_of(total, share) + if exact { 0 } else { 1 };
    if share == 0 { 1 } else { share }
}
