//! The index of the largest logit; the lowest index on a tie, at any size.
//!
//! A row with a NaN or +∞ anywhere gives [`NO_INDEX`]: what made it is broken, and so is every other value of it.
//! A row of −∞ alone gives index 0.

use crate::kernels::softmax_topk::warp_best;
use cuda_std::{pdl, prelude::*};

/// Lanes a block, in both phases.
pub const THREADS: u32 = 256;
/// Bytes of shared memory: a value and an index for each warp.
pub const SHARED_BYTES: u32 = THREADS / 32 * 8;

/// The index of a row that has none.
pub const NO_INDEX: u32 = u32::MAX;

/// First phase: the best of each block's share of a row.
///
/// Launch: grid `[n_part, rows, 1]`, block [`THREADS`], shared memory [`SHARED_BYTES`].
///
/// # Safety
/// `logits` has `rows` rows of at least `n` elements, `stride` apart; `part_value` and `part_index` are
/// `[rows, n_part]`.
#[kernel(max_threads = 256)]
pub unsafe fn argmax_partial(logits: *const f32, part_value: *mut f32, part_index: *mut u32, n: u32, stride: u32) {
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let row = thread::block_idx_y() as usize;
    // SAFETY: indices are below `n`; the whole block comes to `block_best`.
    unsafe {
        let logits = logits.add(row * stride as usize);
        let mut best = (f32::NEG_INFINITY, 0);
        let mut i = thread::index_1d();
        while i < n {
            let value = ld(logits.add(i as usize));
            if value.is_nan() || value == f32::INFINITY {
                best = (f32::INFINITY, NO_INDEX);
            } else if value > best.0 {
                best = (value, i);
            }
            i += THREADS * thread::grid_dim_x();
        }
        let best = block_best(best);
        if thread::thread_idx_x() == 0 {
            let to = row * thread::grid_dim_x() as usize + thread::block_idx_x() as usize;
            st(part_value.add(to), best.0);
            st(part_index.add(to), best.1);
        }
    }
}

/// Second phase: the best of the parts.
///
/// Launch: grid `[rows, 1, 1]`, block [`THREADS`], shared memory [`SHARED_BYTES`].
///
/// # Safety
/// `part_value` and `part_index` are `[rows, n_part]`, `index` has `rows` elements.
#[kernel(max_threads = 256)]
pub unsafe fn argmax(part_value: *const f32, part_index: *const u32, index: *mut u32, n_part: u32) {
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let row = thread::block_idx_x() as usize;
    // SAFETY: parts are below `n_part`; the whole block comes to `block_best`.
    unsafe {
        let mut best = (f32::NEG_INFINITY, u32::MAX);
        let mut i = thread::thread_idx_x();
        while i < n_part {
            let at = row * n_part as usize + i as usize;
            let part = (ld(part_value.add(at)), ld(part_index.add(at)));
            if part.0 > best.0 || (part.0 == best.0 && part.1 < best.1) {
                best = part;
            }
            i += THREADS;
        }
        let best = block_best(best);
        if thread::thread_idx_x() == 0 {
            st(index.add(row), best.1);
        }
    }
}

/// The best of the block's lanes, in lane 0's warp.
///
/// # Safety
/// Every lane of a block of [`THREADS`] lanes comes here; [`SHARED_BYTES`] of shared memory.
#[inline(always)]
unsafe fn block_best(best: (f32, u32)) -> (f32, u32) {
    const WARPS: u32 = THREADS / 32;
    let (values, indices) = (dynamic::<f32>(0), dynamic::<u32>(WARPS * 4));
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    // SAFETY: a word for each warp in both arrays; whole warps are here.
    unsafe {
        let best = warp_best(best);
        if lane == 0 {
            values.set(warp, best.0);
            indices.set(warp, best.1);
        }
        thread::sync_threads(); // every warp's best is written before it is read
        warp_best(if lane < WARPS { (values.get(lane), indices.get(lane)) } else { (f32::NEG_INFINITY, u32::MAX) })
    }
}
