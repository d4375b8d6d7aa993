//! The spans of a batch, and how kernels that work on tiles of their rows find them.

use cuda_std::prelude::*;

/// One element a span, all of one length. Spans follow each other without a gap, from row 0 on.
#[derive(Clone, Copy)]
pub(crate) struct Spans {
    /// Slot of the recurrent state.
    pub slot: *const u32,
    /// First row.
    pub first: *const u32,
    /// Number of rows.
    pub rows: *const u32,
    /// Position of the first row.
    pub start: *const u32,
}

/// One span.
#[derive(Clone, Copy)]
pub(crate) struct Span {
    pub slot: u32,
    pub first: u32,
    pub rows: u32,
    pub start: u32,
}

impl Spans {
    /// Span `i`.
    ///
    /// # Safety
    /// There is one.
    #[inline(always)]
    pub(crate) unsafe fn get(self, i: u32) -> Span {
        let i = i as usize;
        // SAFETY: the caller's promise.
        unsafe {
            Span {
                slot: ld(self.slot.add(i)),
                first: ld(self.first.add(i)),
                rows: ld(self.rows.add(i)),
                start: ld(self.start.add(i)),
            }
        }
    }

    /// The span of a tile, and the tile's first row within it, which may lie past the span's end: spans are cut into
    /// tiles of `SIZE` rows, and those of span `i` begin with number [`first_tile`].
    ///
    /// # Safety
    /// The whole warp comes here, with the same tile; there are `n > 0` spans.
    #[inline(always)]
    pub(crate) unsafe fn of_tile<const SIZE: u32>(self, n: u32, tile: u32) -> (Span, u32) {
        // Spans that begin at or before the tile.
        let (mut up_to, mut base) = (0, 0);
        while base < n {
            let i = base + warp::lane_id();
            // SAFETY: `i < n`; the whole warp votes.
            unsafe {
                let begun = i < n && first_tile::<SIZE>(ld(self.first.add(i as usize)), i) <= tile;
                up_to += warp::ballot(begun).count_ones();
            }
            base += warp::WARP_SIZE;
        }
        let i = up_to.max(1) - 1;
        // SAFETY: `i < n`.
        let span = unsafe { self.get(i) };
        (span, (tile - first_tile::<SIZE>(span.first, i)) * SIZE)
    }
}

/// The first tile of span `i`, whose first row is `first`.
///
/// Not every number is used, but no two spans share one: a span of `n` rows has `⌈n / SIZE⌉` tiles, and the next one
/// begins `⌊(first + n) / SIZE⌋ − ⌊first / SIZE⌋ + 1` later, which is no less.
#[inline(always)]
pub(crate) fn first_tile<const SIZE: u32>(first: u32, i: u32) -> u32 {
    first / SIZE + i
}

/// Above every tile of a batch, as the kernels number them.
pub const fn n_tiles(size: u32, rows: u32, n_spans: u32) -> u32 {
    rows / size + n_spans
}
