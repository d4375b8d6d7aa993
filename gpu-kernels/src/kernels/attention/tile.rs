//! Keys or values on their way to the tensor cores: from pages to shared memory to fragments.
//!
//! A tile is some rows of `16·K` f16, a key or value each. Vector `v` of row `r` (16 bytes) lies at place
//! `v ^ (r % 8)` of its row: rows are a multiple of 128 bytes apart, so that `ldmatrix`, which reads one
//! vector of eight rows at a time, would find them all in the same banks otherwise.

use crate::kernels::kv_cache::PAGE_TOKENS;
use cuda_std::{cp_async, mma, opaque, prelude::*};

use super::CHUNK;

/// Rows of `16·K` f16 in shared memory.
#[derive(Clone, Copy)]
pub(super) struct Tile<const K: usize> {
    at: Shared<U32x4>,
}

/// One head of a sequence's keys or values in its pages.
#[derive(Clone, Copy)]
pub(super) struct Pages {
    /// The head's first element in page 0.
    pub(super) head: *const u16,
    /// The sequence's row of the page table.
    pub(super) table: *const u32,
    /// Elements from a token to the next.
    pub(super) stride: usize,
}

impl<const K: usize> Tile<K> {
    /// Vectors of a row.
    const VECS: u32 = 2 * K as u32;
    /// Bytes of a chunk's rows.
    pub(super) const CHUNK_BYTES: u32 = CHUNK * Self::VECS * 16;

    /// The tile that starts at this byte of the block's shared memory.
    #[inline(always)]
    pub(super) fn at(byte: u32) -> Self {
        Self { at: dynamic(byte) }
    }

    #[inline(always)]
    fn place(row: u32, vec: u32) -> u32 {
        row * Self::VECS + (vec ^ (row % 8))
    }

    /// Starts to copy a chunk's rows, the warp's lanes together: keys outside of `begin .. end` become zeros and are
    /// not read, for they may be anything, and 0·NaN is NaN.
    ///
    /// # Safety
    /// `chunk` is a multiple of [`CHUNK`], of whose keys some are in `begin .. end`; those are in the pages, which
    /// are 16-byte aligned. Nobody uses the tile's rows before they wait for the copies.
    #[inline(always)]
    pub(super) unsafe fn copy_chunk(self, from: Pages, chunk: u32, begin: u32, end: u32) {
        // SAFETY: the caller's promise; a chunk lies within a page.
        unsafe {
            let page = ld(from.table.add((chunk / PAGE_TOKENS) as usize)) as usize;
            let first = page * PAGE_TOKENS as usize + (chunk % PAGE_TOKENS) as usize;
            // Vectors of a row are no more than lanes, so a lane keeps its vector from one of its rows to the next.
            let lane = opaque(warp::lane_id());
            let (mut row, vec) = (lane / Self::VECS, lane % Self::VECS);
            let step = warp::WARP_SIZE / Self::VECS;
            let mut key = from.head.add((first + row as usize) * from.stride + 8 * vec as usize);
            while row < CHUNK {
                let inside = begin <= chunk + row && chunk + row < end;
                cp_async::copy_16_or_zero(self.at, Self::place(row, vec), key.cast(), inside);
                key = key.wrapping_add(step as usize * from.stride);
                row += step;
            }
        }
    }

    /// The fragments B of 16 keys, dimensions `16·k` on, for the product with queries: those of the first eight keys,
    /// then of the other eight.
    ///
    /// # Safety
    /// Every lane of the warp comes here; 16 rows are there.
    #[inline(always)]
    pub(super) unsafe fn keys(self, k: u32) -> [[u32; 2]; 2] {
        let lane = opaque(warp::lane_id());
        let (row, vec) = (lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2);
        // SAFETY: the caller's promise.
        let [a, b, c, d] = unsafe { mma::ldmatrix_x4(self.at, Self::place(row, vec)) };
        [[a, b], [c, d]]
    }

    /// The fragments B of 16 values, dimensions `16·k` on, for the product with weights: those of the first eight
    /// dimensions, then of the other eight.
    ///
    /// # Safety
    /// As [`Tile::keys`].
    #[inline(always)]
    pub(super) unsafe fn values(self, k: u32) -> [[u32; 2]; 2] {
        let lane = opaque(warp::lane_id());
        let (row, vec) = (lane % 16, 2 * k + lane / 16);
        // SAFETY: the caller's promise.
        let [a, b, c, d] = unsafe { mma::ldmatrix_x4_trans(self.at, Self::place(row, vec)) };
        [[a, b], [c, d]]
    }
}
