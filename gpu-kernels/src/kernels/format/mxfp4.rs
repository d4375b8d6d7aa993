//! MXFP4: `v = 2^(e − 127)·E2M1(q)`, 32 elements a block, one chunk.
//!
//! Planes: `qs` (16 bytes a block), `e` (1). Low nibbles are elements 0 to 15, high nibbles 16 to 31.
//! E2M1's magnitudes are halves, so the kernel works with their doubles, which are integers, and halves
//! the scale. Source: OCP Microscaling Formats (MX) v1.0; [`BlockMxfp4`](crate::blocks::BlockMxfp4).

use cuda_std::prelude::*;

use super::{Format, FormatHeld, FormatQ8, FormatTile, FormatWide, Q8Run, Row, held_whole, signed_bytes, wide};
use crate::blocks::GgmlType;

/// See [`BlockMxfp4`](crate::blocks::BlockMxfp4).
pub struct Mxfp4;

/// A block.
#[derive(Clone, Copy)]
pub struct Raw {
    qs: U32x4,
    e: u8,
}

/// Twice E2M1's eight magnitudes, as the bytes of two words: 0 1 2 3, 4 6 8 12.
const DOUBLED: [u32; 2] = [0x0302_0100, 0x0c08_0604];
/// Four times the magnitudes.
const QUADRUPLED: [u32; 2] = [0x0604_0200, 0x1810_0c08];
/// 128 less twice the magnitudes, in seven bits: 0 127 126 125, 124 122 120 116.
const COMPLEMENTS: [u32; 2] = [0x7d7e_7f00, 0x7478_7a7c];
/// Flips the sign bit of eight nibbles.
const SIGNS: u32 = 0x8888_8888;

/// Looks up the low four nibbles of `nibbles`: a byte of [`DOUBLED`] where the sign bit is clear, else 0.
///
/// `prmt` takes three bits of each selector nibble as the byte to pick, and with the fourth set spreads
/// that byte's own sign over the result; every magnitude's is 0.
#[inline(always)]
fn positive(nibbles: u32) -> u32 {
    int8::prmt(DOUBLED[0], DOUBLED[1], nibbles)
}

/// Four times E2M1 for the low four nibbles of `nibbles`, as signed bytes; `flipped` are the same with the other sign.
///
/// Twice a complement is the byte of minus four times E2M1. One of the two lookups is 0 in each byte, so nothing
/// carries.
#[inline(always)]
fn quadrupled(nibbles: u32, flipped: u32) -> u32 {
    int8::prmt(QUADRUPLED[0], QUADRUPLED[1], nibbles) + 2 * int8::prmt(COMPLEMENTS[0], COMPLEMENTS[1], flipped)
}

/// The low nibbles of a word's bytes, one after another: the low 16 bits of a `prmt` selector.
#[inline(always)]
fn selector(word: u32) -> u32 {
    let word = word & 0x000f_000f | (word & 0x0f00_0f00) >> 4;
    word | word >> 8
}

/// `2^(e − 128)`: half of the block's scale. Written as bits, because the two smallest are subnormal.
#[inline(always)]
fn half_scale(e: u8) -> f32 {
    let e = u32::from(e);
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 })
}

#[inline(always)]
fn dp4a(weights: u32, activations: u32, sum: i32) -> i32 {
    int8::dp4a(weights.cast_signed(), activations.cast_signed(), sum)
}

impl Format for Mxfp4 {
    const TYPE: GgmlType = GgmlType::Mxfp4;
    const RUNS: u32 = 2;
    const RUN_DISTANCE: u32 = 16;
    type Raw = Raw;

    #[inline(always)]
    unsafe fn load(row: &Row, chunk: u32) -> Raw {
        // SAFETY: the caller's promise.
        unsafe { Raw { qs: row.stream::<_, 0>(chunk), e: row.load::<_, 1>(chunk) } }
    }

    #[inline(always)]
    fn start(chunk: u32) -> u32 {
        chunk * 32
    }

    #[inline(always)]
    fn quad<const I: u32>(raw: &Raw, _phase: u32) -> [f32; 4] {
        let nibbles = selector(raw.qs.to_array()[I as usize % 4] >> (I / 4 * 4));
        let d = half_scale(raw.e);
        let minus = signed_bytes(positive(nibbles ^ SIGNS));
        let mut values = signed_bytes(positive(nibbles));
        for i in 0..4 {
            values[i] = d * (values[i] - minus[i]);
        }
        values
    }
}

impl FormatQ8 for Mxfp4 {
    /// A word's nibbles alternate between the runs, so the lookup's bytes do, too, and are parted: that is less than
    /// to part the nibbles.
    #[inline(always)]
    fn dot_q8(raw: &Raw, x: &[Q8Run; 2], _phase: u32) -> f32 {
        let (mut low, mut high) = (0, 0);
        let words = raw.qs.to_array();
        for i in 0..4 {
            let (word, flipped) = (words[i], words[i] ^ SIGNS);
            let (first, second) = (quadrupled(word, flipped), quadrupled(word >> 16, flipped >> 16));
            low = dp4a(int8::prmt(first, second, 0x6420), x[0].qs[i], low);
            high = dp4a(int8::prmt(first, second, 0x7531), x[1].qs[i], high);
        }
        // Activation scales first: a tiny weight scale must not be all that is left of the product.
        math::fma(low as f32, 0.5 * x[0].d, high as f32 * (0.5 * x[1].d)) * half_scale(raw.e)
    }
}

held_whole! { Mxfp4, |held| held.qs.x ^ u32::from(held.e); }

impl FormatTile for Mxfp4 {
    /// Twice the values. A byte is 0 either among the positive or among the negative ones, so they join by `|`.
    #[inline(always)]
    fn integers(raw: &Raw, _phase: u32) -> [[u32; 4]; 2] {
        [0, 4].map(|shift| {
            raw.qs.to_array().map(|word| {
                let nibbles = selector(word >> shift);
                let minus = positive(nibbles ^ SIGNS);
                positive(nibbles) | (0x8080_8080 - minus) ^ 0x8080_8080
            })
        })
    }

    #[inline(always)]
    fn scale(raw: &Raw, _phase: u32, _run: usize) -> [f32; 2] {
        [half_scale(raw.e), 0.0]
    }
}

impl FormatWide for Mxfp4 {
    type Scales = u8;
    type Factors = u32;

    #[inline(always)]
    unsafe fn scales(row: &Row, group: u32) -> u8 {
        // SAFETY: the caller's promise.
        unsafe { row.load::<_, 1>(group) }
    }

    /// 2¹²⁸, the scale of e = 255, becomes infinite.
    #[inline(always)]
    fn factors<const L: usize, const G: usize>(e: &[u8; L], first: u32, end: u32) -> [u32; G] {
        wide::each(e, first, end, |e, live| wide::scale(2.0 * half_scale(*e), live))
    }

    #[inline(always)]
    fn weights(word: u32, _extra: u32, _t: u32, _chunk: u32, run: usize, scale: &u32) -> [u32; 2] {
        wide::e2m1(word, run, *scale)
    }
}
