//! Routes grouped by expert, a few to each: what [`gate_up_grouped`](super::gate_up_grouped) and
//! [`expert_down_grouped`](super::expert_down_grouped) have in common.
//!
//! Where hardly any expert has more than a few tokens, a step is bound by the bytes of the experts' weights. A block
//! takes some rows of one expert's matrix for a tile of at most [`TILE`] of its routes
//! ([`route_groups`](super::route_groups)). Weights go from memory to registers, once, and are multiplied there by
//! dp4a with each of the tile's rows of activations: as in a [`matvec`](super::matvec), and to the same bits, however
//! many tokens are beside. An expert of more routes has further tiles. Their blocks are neighbours in the grid and find
//! the weights in the cache.

use cuda_std::prelude::*;

use super::format::{FormatQ8, Row, select};
use super::matvec::{Lane, Operand, Quantized, group_sum};
use crate::layout::MAX_PLANES;

/// The most routes of a tile.
pub const TILE: u32 = 4;
/// It as a size of tiles.
pub const TILE_SIZE: super::matmul::Tile = super::matmul::Tile { tokens: TILE, rows: 0, step: 0, threads: THREADS };
/// Lanes of a block. Small blocks, of which four fit on a multiprocessor: while one begins or ends, the others load.
pub const THREADS: u32 = 128;
/// Rows that a group of lanes computes together for one token or two.
pub(super) const GROUP: usize = 4;

/// A tile: an expert, and some of the routes that go there.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub(super) expert: u32,
    first: u32,
    /// How many, at most [`TILE`].
    pub(super) n: u32,
}

impl Tile {
    /// Number `i` of a list; it may be empty.
    ///
    /// # Safety
    /// The list is `route_groups`' for tiles of [`TILE`] and has such an entry. The grid that wrote it has ended.
    #[inline(always)]
    pub(super) unsafe fn of_list(tiles: *const U32x4, i: u32) -> Self {
        // SAFETY: the caller's promise.
        let entry = unsafe { ld(tiles.add(i as usize)) };
        Tile { expert: entry.x, first: entry.y, n: entry.z }
    }

    /// Number `i` of the tiles that `tokens` consecutive tokens make, all of which go to one expert.
    #[inline(always)]
    pub(super) fn of_tokens(i: u32, tokens: u32) -> Self {
        Tile { expert: 0, first: i * TILE, n: (tokens - i * TILE).min(TILE) }
    }

    /// Its `i`-th route, or its first where it has not so many. Without an `order`, of consecutive ones.
    ///
    /// # Safety
    /// The tile is not empty; `order` is null or the list's.
    #[inline(always)]
    pub(super) unsafe fn route(&self, order: *const u32, i: u32) -> u32 {
        let at = self.first + if i < self.n { i } else { 0 };
        // SAFETY: the caller's promise.
        if order.is_null() { at } else { unsafe { ld(order.add(at as usize)) } }
    }
}

/// Rows of a tensor that follow each other.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) w: *const u8,
    pub(super) planes: &'a [u64; MAX_PLANES],
    /// The first, counted over all experts.
    pub(super) first: u32,
    /// How many there are, at least one. Others are read as the last.
    pub(super) n: u32,
}

/// `R` rows times `T` rows of activations, which start at `starts`: the whole sums, in every lane that shares the rows. `S`
/// chunks of a row are loaded before the first is used.
///
/// Places in 32 bits, from which an address is made where it is used: of pointers to each row in every plane there would
/// not be registers enough.
///
/// # Safety
/// The rows exist and have `place.chunks` chunks, as the activations; the tensor has fewer than 2^32 blocks; all of the warp
/// is here.
#[inline(always)]
pub(super) unsafe fn group_sums<F: FormatQ8, const R: usize, const S: usize, const T: usize>(
    place: Lane,
    rows: &Rows<'_>,
    x: Quantized,
    starts: &[u32; T],
) -> [[f32; R]; T] {
    let (start, phase) = (F::start(place.lane), place.lane % F::BLOCK_CHUNKS);
    let mut sums = [[0.0; R]; T];
    let mut done = 0;
    // SAFETY: the caller's promise. A live chunk exists in the activations as in the weights, and chunk 0 in any case.
    unsafe {
        loop {
            let raw: [[F::Raw; R]; S] = core::array::from_fn(|s| {
                let chunk = (place.lane + done + ((s as u32) << place.lanes_log2)).min(place.chunks - 1);
                core::array::from_fn(|r| {
                    let row = rows.first + (r as u32).min(rows.n - 1);
                    let block = row * (place.chunks / F::BLOCK_CHUNKS) + chunk / F::BLOCK_CHUNKS;
                    let row = Row::from_block::<F>(rows.w, rows.planes, u64::from(block));
                    F::load(&row, chunk % F::BLOCK_CHUNKS)
                })
            });
            for s in 0..S {
                // `lanes` is a multiple of a block's chunks, so a step moves every lane by whole blocks.
                let ahead = done + ((s as u32) << place.lanes_log2);
                let live = place.lane + ahead < place.chunks;
                let at = select(live, start + ahead * F::CHUNK_ELEMS, 0);
                // Activations come from nearby, one token's after the other's: for all at once there are not registers
                // enough.
                for t in 0..T {
                    let x = Operand::<F>::load(x, starts[t] + at, live);
                    for r in 0..R {
                        sums[t][r] += F::dot_q8(&raw[s][r], &x, phase);
                    }
                }
            }
            done += (S as u32) << place.lanes_log2;
            if done >= place.chunks {
                break;
            }
        }
        sums.map(|sums| group_sum(sums, 1 << place.lanes_log2))
    }
}

/// Where the rows of activations start that belong to a tile's first `T` routes. `div` consecutive routes share one.
///
/// # Safety
/// As [`Tile::route`]; `div` is not 0.
#[inline(always)]
pub(super) unsafe fn starts<const T: usize>(cols: u32, tile: Tile, order: *const u32, div: u32) -> [u32; T] {
    // SAFETY: the caller's promise.
    core::array::from_fn(|t| unsafe { math::div_rem(tile.route(order, t as u32), div).0 * cols })
}
