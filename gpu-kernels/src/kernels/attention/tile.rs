//! Keys or values on their way to the tensor cores: from pages to shared memory to fragments.
//!
//! A tile is some rows of `16·K` f16, a key or value each. Vector `v` of row `r` (16 bytes) lies at place
//! `v ^ (r % 8)` of its row: rows are a multiple of 128 bytes apart, so that `ldmatrix`, which reads one
//! vector of eight rows at a time, would find them all in the same banks otherwise.

use crate::kernels::kv_cache::PAGE_TOKENS;
use cuda_std::{cp_async, mma, opaque, prelude::*};

use super::CHUNK;
use super::head::{Vecs, places};

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
    pub(super) stride: u32,
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

    /// The tile that starts so many rows, a multiple of 8, further on.
    #[inline(always)]
    pub(super) fn rows(self, n: u32) -> Self {
        Self { at: self.at.add(n * Self::VECS) }
    }

    #[inline(always)]
    fn place(row: u32, vec: u32) -> u32 {
        row * Self::VECS + (vec ^ (row % 8))
    }

    /// Starts to copy `n` keys from `key` on, `n_lanes` lanes together, of which this is number `lane`. Keys outside of
    /// `begin .. end` become zeros and are not read, for they may be anything, and 0·NaN is NaN.
    ///
    /// # Safety
    /// The keys are in one page, some of them in `begin .. end`, and those are in the pages, which are 16-byte aligned.
    /// `n_lanes` is a multiple of 32. Nobody uses the tile's rows before the copies are waited for.
    #[inline(always)]
    pub(super) unsafe fn copy(
        self,
        from: Pages,
        (key, n): (u32, u32),
        (begin, end): (u32, u32),
        (lane, n_lanes): (u32, u32),
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let page = ld(from.table.add((key / PAGE_TOKENS) as usize)) as usize;
            let first = page * PAGE_TOKENS as usize + (key % PAGE_TOKENS) as usize;
            // Vectors of a row are no more than a warp's lanes, so a lane keeps its vector from one of its rows to the next.
            let (lane, stride) = (opaque(lane), opaque(from.stride) as usize);
            let (first_row, vec) = (lane / Self::VECS, lane % Self::VECS);
            let step = n_lanes / Self::VECS;
            let mut source = from.head.wrapping_add((first + first_row as usize) * stride + 8 * vec as usize);
            // Four rows a turn, always a divisor here; unrolled as a whole it takes too many registers.
            let turns = opaque(n / step / 4);
            let mut row = first_row;
            let mut turn = 0;
            while turn < turns {
                let mut i = 0;
                while i < 4 {
                    let inside = (begin <= key + row) & (key + row < end);
                    cp_async::copy_16_or_zero(self.at, Self::place(row, vec), source.cast(), inside);
                    source = source.wrapping_add(step as usize * stride);
                    row += step;
                    i += 1;
                }
                turn += 1;
            }
        }
    }

    /// Stores four neighbouring elements, the first at a column that is a multiple of 4.
    ///
    /// # Safety
    /// As [`Shared::set`].
    #[inline(always)]
    pub(super) unsafe fn set4(self, row: u32, column: u32, [x, y]: [u32; 2]) {
        // SAFETY: the caller's promise.
        unsafe { self.at.cast::<U32x2>().set(2 * Self::place(row, column / 8) + column % 8 / 4, U32x2 { x, y }) }
    }

    /// Stores a row that a warp has as vectors of f32, rounded to f16.
    ///
    /// # Safety
    /// As [`Shared::set`]; every lane of the warp comes here.
    #[inline(always)]
    pub(super) unsafe fn set_row(self, row: u32, x: &Vecs) {
        let at = places();
        let mut i = 0;
        while i < 2 {
            if at[i] < 16 * K as u32 {
                let [a, b, c, d] = x[i];
                // SAFETY: the caller's promise.
                unsafe { self.set4(row, at[i], [convert::pack_f16x2(a, b), convert::pack_f16x2(c, d)]) };
            }
            i += 1;
        }
    }

    /// The fragments B of 16 keys, dimensions `16·k` on, for the product with queries: those of the first eight keys,
    /// then of the other eight. `lane` is the lane's place in its warp.
    ///
    /// # Safety
    /// Every lane of the warp comes here; 16 rows are there.
    #[inline(always)]
    pub(super) unsafe fn keys(self, k: u32, lane: u32) -> [[u32; 2]; 2] {
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
    pub(super) unsafe fn values(self, k: u32, lane: u32) -> [[u32; 2]; 2] {
        let (row, vec) = (lane % 16, 2 * k + lane / 16);
        // SAFETY: the caller's promise.
        let [a, b, c, d] = unsafe { mma::ldmatrix_x4_trans(self.at, Self::place(row, vec)) };
        [[a, b], [c, d]]
    }

    /// The fragment A of 16 queries, dimensions `16·k` on.
    ///
    /// # Safety
    /// As [`Tile::keys`].
    #[inline(always)]
    pub(super) unsafe fn queries(self, k: u32, lane: u32) -> [u32; 4] {
        let (row, vec) = (lane % 16, 2 * k + lane / 16);
        // SAFETY: the caller's promise.
        unsafe { mma::ldmatrix_x4(self.at, Self::place(row, vec)) }
    }
}
