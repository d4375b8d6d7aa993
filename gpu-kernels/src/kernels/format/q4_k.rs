//! Q4_K: `v = d·sc·q − dmin·mn`, 256 elements a block in eight sub-blocks of 32, eight chunks.
//!
//! Planes: `qs` (128 bytes a block), the header `d dmin scales` (16 bytes). Chunk `j` of a block has
//! the low nibbles of half of sub-block `2·(j/2)`, the first half if `j` is even, and in its high
//! nibbles the same half of the next sub-block. Source: [`BlockQ4K`](crate::blocks::BlockQ4K).

use cuda_std::prelude::*;

use super::{
    Format, FormatHeld, FormatQ8, FormatTile, FormatWide, Q8Run, Row, byte, dot16, dot16_unsigned, held_whole,
    high_nibbles, high_nibbles_16, low_nibbles, select, unsigned_bytes, wide,
};
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
    /// The two scales, then the two minimums: a byte each.
    bytes: u32,
}

impl Scales {
    /// Unpacks the 6-bit fields of sub-blocks `2·pair` and `2·pair + 1`.
    ///
    /// `scales` is three words. Sub-blocks 0 to 3 have their scales in the low six bits of word 0's
    /// bytes and their minimums in word 1's; the others have four bits of each in word 2 (scales low,
    /// minimums high) and the top two in the two spare bits of words 0 and 1. All four fields are unpacked at once, and
    /// what differs between the cases is picked, not branched on: neighbouring lanes take different cases, and a branch
    /// would keep the loads of later chunks from being issued ahead.
    #[inline(always)]
    pub(super) fn unpack(head: U32x4, pair: u32) -> Self {
        let halves = select(pair & 1 == 0, 0x5410, 0x7632);
        let six = int8::prmt(head.y, head.z, halves);
        let four = int8::prmt(head.w, head.w >> 4, halves);
        let first = pair < 2;
        let (low, high) = (select(first, 0x3f3f_3f3f, 0x0f0f_0f0f), select(first, 0, 0x3030_3030));
        Self {
            d: convert::f16_to_f32(head.x as u16),
            dmin: convert::f16_to_f32((head.x >> 16) as u16),
            bytes: select(first, six, four) & low | six >> 2 & high,
        }
    }

    #[inline(always)]
    fn sc(&self, half: usize) -> f32 {
        byte(self.bytes, half as u32)
    }

    #[inline(always)]
    fn mn(&self, half: usize) -> f32 {
        byte(self.bytes, half as u32 + 2)
    }

    /// `Σ (d·sc·q − dmin·mn)·x` over two runs of 16, one in each sub-block, from their `Σ q·x`, where the
    /// second is given `high_factor` times.
    #[inline(always)]
    pub(super) fn combine(&self, low: f32, high: f32, x: &[Q8Run; 2], high_factor: f32) -> f32 {
        let (low, high) = (low * self.sc(0), high * self.sc(1));
        let scaled = math::fma(low, x[0].d, high * (x[1].d / high_factor));
        let minimums = math::fma(self.mn(0), x[0].s, self.mn(1) * x[1].s);
        math::fma(self.d, scaled, -(self.dmin * minimums))
    }

    /// What multiplies a value of sub-block `half` of the two, and what is subtracted from it.
    #[inline(always)]
    pub(super) fn scale(&self, half: usize) -> [f32; 2] {
        [self.d * self.sc(half), self.dmin * self.mn(half)]
    }

    /// The factors of bf16 products of the four sub-blocks from `first` on, 0 or 4.
    #[inline(always)]
    pub(super) fn factors<const G: usize>(head: U32x4, first: u32) -> [U32x4; G] {
        const { assert!(G == 4) };
        let low = first.is_multiple_of(8);
        let (mask, upper) = (select(low, 0x3f3f_3f3f, 0x0f0f_0f0f), select(low, 0, 0x3030_3030));
        let sc = select(low, head.y, head.w) & mask | head.y >> 2 & upper;
        let mn = select(low, head.z, head.w >> 4) & mask | head.z >> 2 & upper;
        let (d, dmin) = (convert::f16_to_f32(head.x as u16), convert::f16_to_f32((head.x >> 16) as u16));
        let (sc, mn) = (unsigned_bytes(sc), unsigned_bytes(mn));
        core::array::from_fn(|i| wide::affine(d * sc[i], -dmin * mn[i], 0))
    }

    /// `d·sc·q − dmin·mn` for four bytes of sub-block `half` of the two.
    #[inline(always)]
    pub(super) fn dequantize(&self, word: u32, half: usize) -> [f32; 4] {
        let [d, m] = self.scale(half);
        unsigned_bytes(word).map(|q| d * q - m)
    }
}

/// The element at which a chunk's first run starts, for Q4_K and Q5_K.
#[inline(always)]
pub(super) fn start(chunk: u32) -> u32 {
    chunk / 2 * 64 + chunk % 2 * 16
}

impl Format for Q4K {
    const TYPE: GgmlType = GgmlType::Q4K;
    const RUNS: u32 = 2;
    const RUN_DISTANCE: u32 = 32;
    type Raw = Raw;

    #[inline(always)]
    unsafe fn load(row: &Row, chunk: u32) -> Raw {
        // SAFETY: the caller's promise.
        unsafe { Raw { qs: row.stream::<_, 0>(chunk), head: row.stream::<_, 1>(chunk / Self::BLOCK_CHUNKS) } }
    }

    #[inline(always)]
    fn start(chunk: u32) -> u32 {
        start(chunk)
    }

    #[inline(always)]
    fn quad<const I: u32>(raw: &Raw, phase: u32) -> [f32; 4] {
        let word = raw.qs.to_array()[I as usize % 4];
        let word = if I < 4 { low_nibbles(word) } else { high_nibbles(word) };
        Scales::unpack(raw.head, phase / 2).dequantize(word, I as usize / 4)
    }
}

impl FormatQ8 for Q4K {
    #[inline(always)]
    fn dot_q8(raw: &Raw, x: &[Q8Run; 2], phase: u32) -> f32 {
        let qs = raw.qs.to_array();
        let low = dot16(qs.map(low_nibbles), &x[0].qs);
        let high = dot16_unsigned(qs.map(high_nibbles_16), &x[1].qs);
        Scales::unpack(raw.head, phase / 2).combine(low, high, x, 16.0)
    }
}

held_whole! { Q4K, |held| held.qs.x ^ held.head.x; }

impl FormatTile for Q4K {
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn integers(raw: &Raw, _phase: u32) -> [[u32; 4]; 2] {
        let qs = raw.qs.to_array();
        [qs.map(low_nibbles), qs.map(high_nibbles)]
    }

    #[inline(always)]
    fn scale(raw: &Raw, phase: u32, run: usize) -> [f32; 2] {
        Scales::unpack(raw.head, phase / 2).scale(run)
    }
}

impl FormatWide for Q4K {
    const SPAN: u32 = 4;
    type Scales = U32x4;
    type Factors = U32x4;

    #[inline(always)]
    unsafe fn scales(row: &Row, group: u32) -> U32x4 {
        // SAFETY: the caller's promise; a block has eight groups.
        unsafe { row.stream::<_, 1>(group / 8) }
    }

    #[inline(always)]
    fn factors<const L: usize, const G: usize>(head: &[U32x4; L], first: u32, _end: u32) -> [U32x4; G] {
        Scales::factors(head[0], first)
    }

    #[inline(always)]
    fn weights(word: u32, _extra: u32, _t: u32, _chunk: u32, run: usize, factors: &U32x4) -> [u32; 2] {
        wide::with_min(wide::nibbles(word, run), factors)
    }
}
