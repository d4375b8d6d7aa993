//! [`softmax_topk`](super::softmax_topk) and [`route_groups`](super::route_groups) in one launch, for few tokens.
//!
//! One block. A warp chooses a token's experts and marks the token in a set of bits for each of them: how many bits an
//! expert has says where the next one's routes begin, and how many of them are before the token's own where its route
//! comes. Thus `order` is sorted as `route_groups` sorts it, in any order of the lanes.

use bytemuck::{Pod, Zeroable};
use cuda_std::{pdl, prelude::*};

use super::softmax_topk::{FEW, SoftmaxTopkParams, choose};
use crate::params::WARP;

/// Lanes of the block.
pub const THREADS: u32 = 1024;
const WARPS: u32 = THREADS / WARP;
/// The most tokens: an expert has a bit for each, in two words.
pub const MAX_TOKENS: u32 = 2 * WARP;
/// The most experts.
pub const MAX_EXPERTS: u32 = WARP * FEW;
/// Shared memory: two words of tokens and a begin for each expert, and two sums for each warp of experts.
pub const SHARED_BYTES: u32 = 4 * (3 * MAX_EXPERTS + 2 * FEW);

/// Scalars of [`topk_groups`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct TopkGroupsParams {
    /// What [`softmax_topk`](super::softmax_topk) takes.
    pub topk: SoftmaxTopkParams,
    /// The most routes of a tile.
    pub tile: u32,
    /// Entries of `tiles`, as [`route_groups`](super::route_groups::n_tiles) counts them.
    pub n_tiles: u32,
}

/// Sums of the lanes before, and with this lane.
///
/// # Safety
/// All of the warp is here.
#[inline(always)]
unsafe fn scan(value: u32) -> [u32; 2] {
    let (lane, mut sum) = (warp::lane_id(), value);
    let mut distance = 1;
    while distance < WARP {
        // SAFETY: the caller's promise.
        let before = unsafe { warp::shuffle_up(sum, distance) };
        sum += if lane >= distance { before } else { 0 };
        distance *= 2;
    }
    [sum - value, sum]
}

/// Fills `ids` and `weights`, `[rows, n_used]`, as `softmax_topk` does, and `order: [rows·n_used]` and `tiles: [n_tiles]`
/// as `route_groups` does.
///
/// Launch: `Launch::linear(1, THREADS)`, [`SHARED_BYTES`] of shared memory.
///
/// # Safety
/// `logits` is `[rows, n_expert]`; `bias` has `n_expert` elements or is null; the results have these extents and are apart
/// from all else, `tiles` is 16-byte aligned; `rows` ≤ [`MAX_TOKENS`], `n_expert` ≤ [`MAX_EXPERTS`], `n_used` ≤ `n_expert`
/// and a warp's lanes; none of them and `tile` is 0.
#[kernel(max_threads = 1024)]
pub unsafe fn topk_groups(
    logits: *const f32,
    bias: *const f32,
    ids: *mut u32,
    weights: *mut f32,
    order: *mut u32,
    tiles: *mut U32x4,
    p: TopkGroupsParams,
) {
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let (thread, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / WARP);
    let SoftmaxTopkParams { rows, n_expert, n_used, .. } = p.topk;
    let (low, high, begins, sums) = (
        dynamic::<u32>(0),
        dynamic::<u32>(4 * MAX_EXPERTS),
        dynamic::<u32>(4 * 2 * MAX_EXPERTS),
        dynamic::<u32>(4 * 3 * MAX_EXPERTS),
    );
    if thread < MAX_EXPERTS {
        low.set(thread, 0);
        high.set(thread, 0);
    }
    block::sync_threads(); // no expert has a token

    let mut chosen = [0; (MAX_TOKENS / WARPS) as usize];
    for i in 0..chosen.len() {
        let row = warp + i as u32 * WARPS;
        if row < rows {
            let (id, weight) = choose::<{ FEW as usize }>(logits.add(row as usize * n_expert as usize), bias, &p.topk);
            if lane < n_used {
                let to = (row * n_used + lane) as usize;
                st(ids.add(to), id);
                st(weights.add(to), weight);
                // A token chooses an expert but once: adding its bit sets it.
                (if i == 0 { low } else { high }).atomic_add(id, 1 << warp);
            }
            chosen[i] = id;
        }
    }
    block::sync_threads(); // all tokens are marked

    // Routes and tiles of the experts before: within the warp, then of the warps before.
    let n = if thread < n_expert { low.get(thread).count_ones() + high.get(thread).count_ones() } else { 0 };
    let (n_own, _) = math::div_rem(n + p.tile - 1, p.tile);
    let ([mut begin, routes], [mut tile, n_warp]) = (scan(n), scan(n_own));
    if warp < FEW && lane == WARP - 1 {
        sums.set(warp, routes);
        sums.set(FEW + warp, n_warp);
    }
    block::sync_threads(); // the warps' sums are there
    let mut all = 0;
    for i in 0..FEW {
        let (routes, n_warp) = (sums.get(i), sums.get(FEW + i));
        begin += if i < warp { routes } else { 0 };
        tile += if i < warp { n_warp } else { 0 };
        all += n_warp;
    }
    if thread < n_expert {
        begins.set(thread, begin);
        let mut i = 0;
        while i < n_own {
            let done = i * p.tile;
            let entry = U32x4 { x: thread, y: begin + done, z: (n - done).min(p.tile), w: 0 };
            st(tiles.add((tile + i) as usize), entry);
            i += 1;
        }
    }
    // The entries that are left over.
    let mut i = all + thread;
    while i < p.n_tiles {
        st(tiles.add(i as usize), U32x4 { x: n_expert - 1, y: rows * n_used, z: 0, w: 0 });
        i += THREADS;
    }
    block::sync_threads(); // every expert's begin is there

    for i in 0..chosen.len() {
        let (row, id) = (warp + i as u32 * WARPS, chosen[i]);
        if row < rows && lane < n_used {
            let before = (1 << warp) - 1;
            let rank = if i == 0 {
                (low.get(id) & before).count_ones()
            } else {
                low.get(id).count_ones() + (high.get(id) & before).count_ones()
            };
            st(order.add((begins.get(id) + rank) as usize), row * n_used + lane);
        }
    }
}
