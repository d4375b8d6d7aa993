//! Grouped-query attention over a paged cache.
//!
//! For a query at position `t` with `scores[j] = scale·q·k[j]` over the keys `j` in its window,
//! `out = Σ_j softmax(scores)[j]·v[j]`. A head's *sink* joins the softmax as one more score without a value.
//!
//! | kernel | for | how |
//! |---|---|---|
//! | [`decode`] | few rows a sequence, f16 cache | keys split over blocks, all heads of a key head together, tensor cores |
//! | [`prefill`] | many rows a sequence, f16 cache | tiles of queries and keys, tensor cores |
//! | [`exact`] | f32 cache | keys split over blocks, f32 arithmetic |
//! | [`merge`] | after [`decode`] of several splits, and [`exact`] | joins the splits, applies sink and gate, quantises |
//! | [`heads`] | before them all | bias, norm and rotation; keys and values to their pages; [`decode`] can do it itself |
//!
//! In [`decode`] and [`exact`] a block with the keys of one split leaves the softmax open: an unnormalised output,
//! the maximum score and the sum. The number of splits is the grid's; where a split begins and ends follows from
//! the length read from device memory ([`Keys`]), so a captured graph serves every length, and blocks without keys
//! end at once.
//!
//! Source: Milakov & Gimelshein, online softmax (2018); Dao et al., FlashAttention (2022), Flash-Decoding (2023).

pub mod decode;
pub mod exact;
mod fresh;
mod head;
pub mod heads;
mod join;
pub mod merge;
mod output;
pub mod prefill;
mod queries;
mod ring;
mod tile;

use bytemuck::{Pod, Zeroable};
use cuda_std::prelude::*;

/// Scalars of the attention kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct AttentionParams {
    /// Query heads.
    pub n_head: u32,
    /// Key and value heads.
    pub n_head_kv: u32,
    /// Multiplies the scores.
    pub scale: f32,
    /// Keys a query sees, itself included; 0: all.
    pub window: u32,
    /// Entries of a span's row of the page table.
    pub max_pages: u32,
    /// Query heads of a block, of one key head, in [`decode`].
    pub block_heads: u32,
}

/// Keys that are looked at together. A chunk lies within a page.
pub const CHUNK: u32 = 16;
/// A split has a multiple of so many keys: a chunk for each warp of a block of [`decode`].
pub const SPLIT_KEYS: u32 = 64;

/// The keys that a query sees, and how they are split.
#[derive(Clone, Copy)]
pub(crate) struct Keys {
    /// The first key.
    begin: u32,
    /// One past the last.
    end: u32,
    /// Where the first split starts: `begin`, or up to a chunk before it.
    first: u32,
    /// Keys of a split, but for the last.
    each: u32,
}

impl Keys {
    /// The keys of a query at `pos`, in at most `n_split` parts.
    ///
    /// # Safety
    /// `n_split` is not zero.
    #[inline(always)]
    unsafe fn new(pos: u32, window: u32, n_split: u32) -> Self {
        let end = pos + 1;
        let begin = if window == 0 || window > end { 0 } else { end - window };
        let first = begin / CHUNK * CHUNK;
        // SAFETY: the caller's promise.
        let each = unsafe { math::div_rem(end - first + n_split - 1, n_split).0 };
        Self { begin, end, first, each: each.next_multiple_of(SPLIT_KEYS) }
    }

    /// First and last key (exclusive) of a split; they are equal for a split without keys.
    #[inline(always)]
    fn split(&self, split: u32) -> (u32, u32) {
        let from = (self.first + split * self.each).min(self.end);
        (from, (from + self.each).min(self.end))
    }

    /// Splits that have keys: the first so many.
    #[inline(always)]
    fn n_split(&self) -> u32 {
        // SAFETY: there is a key, so `each` is at least `SPLIT_KEYS`.
        unsafe { math::div_rem(self.end - self.first + self.each - 1, self.each).0 }
    }
}

/// `e^(a − max)` for `a` up to `max`, where −∞ minus itself counts as no weight: an open softmax without keys.
#[inline(always)]
fn weight(a: f32, max: f32) -> f32 {
    math::exp(a - if max == f32::NEG_INFINITY { 0.0 } else { max })
}
