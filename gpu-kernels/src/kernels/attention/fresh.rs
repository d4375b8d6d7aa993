//! Attention's queries, newest key and newest value straight from their projections.
//!
//! Of rows that are each alone in their sequence, nobody but one block of attention reads the newest key. So what
//! [`heads`](super::heads) does between the projections and attention, the blocks of attention can do for themselves: to
//! the same bits, and a launch less. Several splits then make the same queries, which is less than the launch costs.

use cuda_std::prelude::*;

use super::decode::{PAD, WARPS, fragments};
use super::heads::{HeadsParams, Kind, Projected, store_head};
use crate::kernels::kv_cache::physical_token;

/// Heads as projected, to be made ready by the blocks that use them, and where the newest key and value go.
pub(super) struct Fresh {
    pub(super) heads: Projected,
    pub(super) p: HeadsParams,
    pub(super) k_cache: *mut u16,
    pub(super) v_cache: *mut u16,
}

/// What a block does before it looks at keys.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) row: u32,
    /// The position of the row.
    pub(super) pos: u32,
    pub(super) first_head: u32,
    pub(super) heads: u32,
    pub(super) head_kv: u32,
    /// The sequence's row of the page table.
    pub(super) table: *const u32,
    /// Whether the newest key is among the block's.
    pub(super) newest: bool,
}

impl Fresh {
    /// The queries' fragments; the newest key and value are in the cache, for this block, after the call.
    ///
    /// # Safety
    /// The whole block comes here, whose shared memory nobody uses; the operands are those of `attention_heads_f16`.
    #[inline(always)]
    pub(super) unsafe fn ready<const K: usize>(&self, at: Place, scale: f32) -> [[u32; 2]; K] {
        let (warp, row_elems) = (thread::thread_idx_x() / warp::WARP_SIZE, 16 * K as u32 + PAD);
        let rows = dynamic::<f32>(0);
        // The block's queries, then its key and its value.
        let mut task = warp;
        // SAFETY: the heads exist; a warp has a row of shared memory for each.
        unsafe {
            while task < at.heads + if at.newest { 2 } else { 0 } {
                let (kind, head) = if task < at.heads {
                    (Kind::Query, at.first_head + task)
                } else {
                    (if task == at.heads { Kind::Key } else { Kind::Value }, at.head_kv)
                };
                let x = self.heads.head(kind, (at.row as usize, head, at.pos), rows.add(task * row_elems), &self.p);
                if kind != Kind::Query {
                    let token = physical_token(at.table, at.pos) * self.p.n_head_kv as usize + head as usize;
                    let cache = if kind == Kind::Key { self.k_cache } else { self.v_cache };
                    store_head(cache.add(token * 16 * K), &x, 16 * K as u32);
                }
                task += WARPS;
            }
            block::sync_threads(); // queries, key and value are written before they are read
            let pair = |head: u32, dim: u32| rows.cast::<F32x2>().get((head * row_elems + dim) / 2);
            let query = fragments(pair, at.heads, scale);
            block::sync_threads(); // queries are read before tiles take their place
            query
        }
    }
}
