//! Attention's queries, newest key and newest value straight from their projections.
//!
//! Of rows that are each alone in their sequence, nobody but the blocks of one key head read the newest key. So what
//! [`heads`](super::heads) does between the projections and attention, the blocks of attention can do for themselves: to
//! the same bits, and a launch less. Several splits then make the same queries, which is less than the launch costs.

use cuda_std::{cp_async, prelude::*};

use super::decode::{HEADS, PAD, WARPS, fragments};
use super::head::{Common, Head, HeadsParams, Kind, Loaded, MAX_PAIRS, Projected, Vecs, store_head};
use super::queries::{Place, Queries};
use crate::kernels::kv_cache::physical_token;

/// Heads that a warp makes ready, at most: of the block's queries, its key and its value.
const TASKS: usize = (HEADS + 2).div_ceil(WARPS) as usize;

/// Heads as projected, to be made ready by the blocks that use them, and where the newest key and value go.
pub(super) struct Fresh {
    pub(super) heads: Projected,
    pub(super) p: HeadsParams,
    pub(super) k_cache: *mut u16,
    pub(super) v_cache: *mut u16,
}

/// What a block knows ahead of the wait.
pub(super) struct Early<const K: usize> {
    common: Common<K>,
    /// The row's turns of the lane's pairs, every [`warp::WARP_SIZE`] elements: in shared memory, or else they would be
    /// computed where they are used.
    turns: Shared<F32x2>,
    /// Where the newest key and value go.
    token: usize,
    /// The heads that the warp makes ready.
    heads: [Head; TASKS],
}

impl Fresh {
    /// Bytes of shared memory that [`Fresh::ready`] takes of each warp's, for heads of `16·k`: they, and turns.
    pub(super) const fn bytes_a_warp(k: u32) -> u32 {
        TASKS as u32 * (16 * k + PAD) * 4 + k.div_ceil(4) * warp::WARP_SIZE * 8
    }

    /// The `i`-th head that the warp makes ready, if there is one: the block's queries, then its key and its value, are
    /// dealt out to the warps.
    #[inline(always)]
    fn task(at: Place, i: usize) -> Option<(Kind, u32)> {
        let task = thread::thread_idx_x() / warp::WARP_SIZE + i as u32 * WARPS;
        if task < at.heads {
            Some((Kind::Query, at.first_head + task))
        } else if at.newest && task < at.heads + 2 {
            Some((if task == at.heads { Kind::Key } else { Kind::Value }, at.head_kv))
        } else {
            None
        }
    }
}

impl<const K: usize> Queries<K> for Fresh {
    const ALONE: bool = true;
    type Early = Early<K>;
    type Fetched = [Loaded; TASKS];

    #[inline(always)]
    unsafe fn early(&self, at: Place, mine: Shared<f32>) -> Early<K> {
        let turns = mine.add(TASKS as u32 * (16 * K as u32 + PAD)).cast::<F32x2>().add(warp::lane_id());
        // SAFETY: the caller's promise; the heads exist.
        unsafe {
            let common = Common::load(&self.heads, 16 * K as u32, &self.p);
            let of_row = common.at(at.pos, &self.p);
            let mut i = 0;
            while i < Common::<K>::PAIRS {
                turns.set(i as u32 * warp::WARP_SIZE, of_row[i]);
                i += 1;
            }
            let mut heads = [Head::NONE; TASKS];
            let mut i = 0;
            while i < TASKS {
                if let Some((kind, head)) = Self::task(at, i) {
                    heads[i] = self.heads.head(kind, (at.row as usize, head), &self.p);
                }
                i += 1;
            }
            let token = physical_token(at.table, at.pos);
            Early { common, turns, token, heads: heads.map(Head::found) }
        }
    }

    /// All of a warp's heads are on their way before the first is used.
    #[inline(always)]
    unsafe fn fetch(&self, at: Place, early: &Early<K>) -> [Loaded; TASKS] {
        let mut x = [Loaded::NONE; TASKS];
        let mut i = 0;
        while i < TASKS {
            if Self::task(at, i).is_some() {
                // SAFETY: the head exists.
                x[i] = unsafe { early.common.fetch(early.heads[i]) };
            }
            i += 1;
        }
        x
    }

    /// The newest key and value go to the cache as well: by each block that has them, the same bits, as it may read them
    /// back from there.
    #[inline(always)]
    unsafe fn ready(
        &self,
        at: Place,
        (early, fetched): (Early<K>, [Loaded; TASKS]),
        scratch: impl Fn(u32) -> Shared<f32>,
        keep: impl Fn(Kind, &Vecs),
        scale: f32,
    ) -> [[u32; 2]; K] {
        let (warp, row_elems) = (thread::thread_idx_x() / warp::WARP_SIZE, 16 * K as u32 + PAD);
        // SAFETY: the heads exist; a warp has a row of shared memory for each.
        unsafe {
            let mut x = [[[0.0; 4]; 2]; TASKS];
            let mut turns = [F32x2::splat(0.0); MAX_PAIRS];
            let mut i = 0;
            while i < Common::<K>::PAIRS {
                turns[i] = early.turns.get(i as u32 * warp::WARP_SIZE);
                i += 1;
            }
            let mut i = 0;
            while i < TASKS {
                if let Some((kind, head)) = Self::task(at, i) {
                    let mine = scratch(warp).add(i as u32 * row_elems);
                    x[i] = early.common.finish(kind, (&fetched[i], &turns), mine, &self.p);
                    if kind != Kind::Query {
                        let token = early.token * self.p.n_head_kv as usize + head as usize;
                        let cache = if kind == Kind::Key { self.k_cache } else { self.v_cache };
                        store_head(cache.add(token * 16 * K), &x[i], 16 * K as u32);
                    }
                }
                i += 1;
            }
            cp_async::wait::<0>();
            block::sync_threads(); // queries, key and value are written before they are read, and copies have arrived
            let mut i = 0;
            while i < TASKS {
                if let Some((kind @ (Kind::Key | Kind::Value), _)) = Self::task(at, i) {
                    keep(kind, &x[i]);
                }
                i += 1;
            }
            let pair = |head: u32, dim: u32| {
                let row = scratch(head % WARPS).add(head / WARPS * row_elems);
                row.cast::<F32x2>().get(dim / 2)
            };
            let query = fragments(pair, at.heads, scale);
            block::sync_threads(); // queries are read before tiles take their place, and tiles are whole
            query
        }
    }
}
