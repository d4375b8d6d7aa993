//! Routes grouped by expert, so that a product reads an expert's weights once for all of its tokens.
//!
//! `order` is the routes sorted by expert, those of one expert in their own order. Each expert's part of it is cut
//! into tiles of at most `tile` routes; `tiles` lists them as `(expert, first of order, how many, 0)`, without gaps,
//! and then entries without routes.
//!
//! A block finds the routes of one expert. It counts those of all experts, in integers, so that it knows where its
//! own begin without waiting for other blocks, and the result is the same in any order of the lanes.

use bytemuck::{Pod, Zeroable};
use cuda_std::{pdl, prelude::*};

use super::softmax_topk::MAX_EXPERTS;

/// Lanes a block.
pub const THREADS: u32 = 512;
const WARPS: u32 = THREADS / 32;
/// Bytes of shared memory: three counts for each warp, and one for each expert.
pub const SHARED_BYTES: u32 = 4 * (3 * WARPS + MAX_EXPERTS);

/// Scalars of [`route_groups`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct RouteGroupsParams {
    /// Routes.
    pub routes: u32,
    /// The most routes of a tile.
    pub tile: u32,
}

/// Entries of `tiles`: an expert has at most one tile that is not full, and no tile is empty.
pub const fn n_tiles(routes: u32, n_expert: u32, tile: u32) -> u32 {
    let most = routes / tile + n_expert;
    if routes < most { routes } else { most }
}

/// Fills `order: [routes]` and `tiles: [n_tiles]` from `ids: [routes]`.
///
/// Launch: `Launch::linear(n_expert, THREADS)`, [`SHARED_BYTES`] of shared memory.
///
/// # Safety
/// The arrays have these extents and are apart, `tiles` is 16-byte aligned; `tile` ≥ 1; `n_expert` ≤
/// [`MAX_EXPERTS`]. Ids past the last expert count as the last.
#[kernel(max_threads = 512)]
pub unsafe fn route_groups(ids: *const u32, order: *mut u32, tiles: *mut U32x4, p: RouteGroupsParams) {
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let (expert, n_expert) = (thread::block_idx_x(), thread::grid_dim_x());
    let (thread, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / 32);
    let (own, parts, counts) = (dynamic::<u32>(0), dynamic::<u32>(4 * WARPS), dynamic::<u32>(4 * 3 * WARPS));
    let mut i = thread;
    while i < n_expert {
        counts.set(i, 0);
        i += THREADS;
    }
    block::sync_threads(); // the counts are 0

    // A warp takes consecutive routes, a multiple of 32 of them.
    let each = p.routes.div_ceil(THREADS) * 32;
    let (from, to) = ((warp * each).min(p.routes), ((warp + 1) * each).min(p.routes));
    let id = |route: u32| if route < to { ld(ids.add(route as usize)).min(n_expert - 1) } else { u32::MAX };
    let (mut n_own, mut first) = (0, from);
    while first < to {
        let id = id(first + lane);
        if id < n_expert {
            counts.atomic_add(id, 1);
        }
        n_own += warp::ballot(id == expert).count_ones();
        first += 32;
    }
    if lane == 0 {
        own.set(warp, n_own);
    }
    block::sync_threads(); // all is counted

    // Routes and tiles of the experts before.
    let n_tiles_of = |n: u32| math::div_rem(n + p.tile - 1, p.tile).0;
    let (mut routes, mut n_before) = (0, 0);
    let mut i = thread;
    while i < expert {
        let n = counts.get(i);
        routes += n;
        n_before += n_tiles_of(n);
        i += THREADS;
    }
    let (routes, n_before) = (warp::sum(routes), warp::sum(n_before));
    if lane == 0 {
        parts.set(warp, routes);
        parts.set(WARPS + warp, n_before);
    }
    block::sync_threads(); // the warps' parts of them are there
    let (mut begin, mut tile, mut at) = (0, 0, 0);
    let mut i = 0;
    while i < WARPS {
        begin += parts.get(i);
        tile += parts.get(WARPS + i);
        at += if i < warp { own.get(i) } else { 0 };
        i += 1;
    }
    at += begin;

    let mut first = from;
    while first < to {
        let mine = id(first + lane) == expert;
        let all = warp::ballot(mine);
        if mine {
            st(order.add((at + (all & ((1 << lane) - 1)).count_ones()) as usize), first + lane);
        }
        at += all.count_ones();
        first += 32;
    }

    let n = counts.get(expert);
    let n_own = n_tiles_of(n);
    // The last expert's block also writes the entries that are left over.
    let end = if expert + 1 == n_expert { n_tiles(p.routes, n_expert, p.tile) - tile } else { n_own };
    let mut i = thread;
    while i < end {
        let done = i * p.tile;
        let rest = if i < n_own { (n - done).min(p.tile) } else { 0 };
        st(tiles.add((tile + i) as usize), U32x4 { x: expert, y: begin + done, z: rest, w: 0 });
        i += THREADS;
    }
}
