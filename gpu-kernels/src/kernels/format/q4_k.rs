//! Q4_K: `v = d·sc·q − dmin·mn`, 256 elements a block in eight sub-blocks of 32, eight chunks.
//!
//! Planes: `qs` (128 bytes a block), the header `d dmin scales` (16 bytes). Chunk `j` of a block has
//! the low nibbles of half of sub-block `2·(j/2)`, the first half if `j` is even, and in its high
//! nibbles the same half of the next sub-block. Source: [`BlockQ4K`](crate::blocks::BlockQ4K).

use cuda_std::prelude::*;

use super::{Format, FormatQ8, Q8Run, Row, dot16, high_nibbles, low_nibbles, unsigned_bytes};
use crate::blocks::GgmlType;

/// See [`BlockQ4K`](crate::blocks::BlockQ4K).
pub struct Q4K;

/// A chunk and its block's header.
#[derive(Clone, Copy)]
pub struct Raw {
    qs: U32x4,
    head: U32x4,
}

/// Scales and minimums of two neighbouring sub-blocks.
#[derive(Clone, Copy)]
pub(super) struct Scales {
    pub(super) d: f32,
    pub(super) dmin: f32,
    pub(super) sc: [u32; 2],
    pub(super) mn: [u32; 2],
}

impl Scales {
    /// Unpacks the 6-bit fields of sub-blocks `2·pair` and `2·pair + 1`.
    ///
    /// `scales` is three words. Sub-blocks 0 to 3 have their scales in the low six bits of word 0's
    /// bytes and their minimums in word 1's; the others have four bits of each in word 2 (scales low,
    /// minimums high) and the top two in the two spare bits of words 0 and 1. Both cases are computed
    /// for two bytes at once and one is picked: no lane waits for a branch that its neighbour takes.
    #[inline(always)]
    pub(super) fn unpack(head: U32x4, pair: u32) -> Self {
        let shift = (pair & 1) * 16;
        let (a, b, c) = (head.y >> shift, head.z >> shift, head.w >> shift);
        let (sc, mn) = if pair < 2 {
            (a & 0x3f3f, b & 0x3f3f)
        } else {
            (c & 0x0f0f | a >> 2 & 0x3030, c >> 4 & 0x0f0f | b >> 2 & 0x3030)
        };
        Self {
            d: convert::f16_to_f32(head.x as u16),
            dmin: convert::f16_to_f32((head.x >> 16) as u16),
            sc: [sc & 0xff, sc >> 8 & 0xff],
            mn: [mn & 0xff, mn >> 8 & 0xff],
        }
    }

    /// `Σ (d·sc·q − dmin·mn)·x` over two runs of 16, one in each sub-block. `sc·Σ q·x` stays below
    /// 2^23 (63 · 16 · 31 · 127), so its conversion is exact.
    #[inline(always)]
    pub(super) fn dot_q8(&self, low: [u32; 4], high: [u32; 4], x: &[Q8Run; 2]) -> f32 {
        let low = (dot16(low, &x[0].qs) * self.sc[0].cast_signed()) as f32;
        let high = (dot16(high, &x[1].qs) * self.sc[1].cast_signed()) as f32;
        let scaled = math::fma(low, x[0].d, high * x[1].d);
        let minimums = math::fma(self.mn[0] as f32, x[0].s, self.mn[1] as f32 * x[1].s);
        math::fma(self.d, scaled, -(self.dmin * minimums))
    }

    /// `d·sc·q − dmin·mn` for four bytes of sub-block `half` of the two.
    #[inline(always)]
    pub(super) fn dequantize(&self, word: u32, half: usize) -> [f32; 4] {
        let (d, m) = (self.d * self.sc[half] as f32, self.dmin * self.mn[half] as f32);
        unsigned_bytes(word).map(|q| d * q - m)
    }
}

/// The element at which run `run` of a chunk starts, for Q4_K and Q5_K.
#[inline(always)]
pub(super) fn run_start(chunk: u32, run: u32) -> u32 {
    chunk / 2 * 64 + chunk % 2 * 16 + run * 32
}

impl Format for Q4K {
    const TYPE: GgmlType = GgmlType::Q4K;
    const RUNS: u32 = 2;
    type Raw = Raw;

    #[inline(always)]
    unsafe fn load(row: &Row, chunk: u32) -> Raw {
        // SAFETY: the caller's promise.
        unsafe { Raw { qs: row.stream::<_, 0>(chunk), head: row.stream::<_, 1>(chunk / Self::BLOCK_CHUNKS) } }
    }

    #[inline(always)]
    fn run_start(chunk: u32, run: u32) -> u32 {
        run_start(chunk, run)
    }

    #[inline(always)]
    fn quad<const I: u32>(raw: &Raw, chunk: u32) -> [f32; 4] {
        let word = raw.qs.to_array()[I as usize % 4];
        let word = if I < 4 { low_nibbles(word) } else { high_nibbles(word) };
        Scales::unpack(raw.head, chunk / 2 % 4).dequantize(word, I as usize / 4)
    }
}

impl FormatQ8 for Q4K {
    #[inline(always)]
    fn dot_q8(raw: &Raw, x: &[Q8Run; 2], chunk: u32) -> f32 {
        let qs = raw.qs.to_array();
        Scales::unpack(raw.head, chunk / 2 % 4).dot_q8(qs.map(low_nibbles), qs.map(high_nibbles), x)
    }
}
