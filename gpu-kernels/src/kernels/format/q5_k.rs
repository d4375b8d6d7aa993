//! Q5_K: `v = d·sc·q − dmin·mn` as in Q4_K, with five bits for `q`. 256 elements a block, eight chunks.
//!
//! Planes: 16 bytes for each chunk, four more for each chunk, the header `d dmin scales` (16 bytes a block). Chunk `j` of a
//! block has half of sub-block `2·(j/2)`, the first half if `j` is even, and the same half of the next sub-block, as in
//! Q4_K. The file has the four low bits of both in a byte and all of a block's fifth bits after each other: a lane would
//! need half of them, to take two bits of each byte. So they are packed anew ([`pack`]), in as many bits: byte `b` of the
//! chunk has value `b` of the first half sub-block in its low five bits and the upper three of value `b` of the second
//! above them, whose lower two are bits `2·(b/4)` and up of byte `b % 4` of the chunk's word in plane 1. The second values
//! are multiplied eight times as large, where they are. Source of the file's layout: [`BlockQ5K`](crate::blocks::BlockQ5K).

use cuda_std::prelude::*;

use super::q4_k::{Scales, start};
use super::{
    Format, FormatHeld, FormatQ8, FormatTile, FormatWide, Q8Run, Row, dot16, dot16_unsigned, high_nibbles, low_nibbles,
    wide,
};
use crate::blocks::GgmlType;

/// See [`BlockQ5K`](crate::blocks::BlockQ5K).
pub struct Q5K;

/// A chunk, what plane 1 has of it, and the block's header.
#[derive(Clone, Copy)]
pub struct Raw {
    qs: U32x4,
    rest: u32,
    head: U32x4,
}

/// Word `i` of a chunk, and its part of the chunk's word in plane 1, from the file's words of `qs` and `qh`; or two bytes of
/// either from as many.
#[inline(always)]
pub(in crate::kernels) fn pack(qs: u32, qh: u32, pair: u32, i: u32) -> [u32; 2] {
    let fifth = |s: u32| (qh >> s & 0x0101_0101) << 4;
    let (low, high) = (low_nibbles(qs) | fifth(2 * pair), high_nibbles(qs) | fifth(2 * pair + 1));
    [low | (high >> 2 & 0x0707_0707) << 5, (high & 0x0303_0303) << (2 * i)]
}

/// Four 5-bit values of each of the chunk's runs, from word `i` of the chunk and its word in plane 1.
#[inline(always)]
fn values(word: u32, rest: u32, i: u32) -> [u32; 2] {
    [word & 0x1f1f_1f1f, word >> 3 & 0x1c1c_1c1c | rest >> (2 * i) & 0x0303_0303]
}

/// The second of [`values`], times 8.
#[inline(always)]
fn second_8(word: u32, rest: u32, i: u32) -> u32 {
    let rest = if i < 2 { rest << (3 - 2 * i) } else { rest >> (2 * i - 3) };
    word & 0xe0e0_e0e0 | rest & 0x1818_1818
}

impl Format for Q5K {
    const TYPE: GgmlType = GgmlType::Q5K;
    const RUNS: u32 = 2;
    const RUN_DISTANCE: u32 = 32;
    type Raw = Raw;

    #[inline(always)]
    unsafe fn load(row: &Row, chunk: u32) -> Raw {
        // SAFETY: the caller's promise; a chunk has a word of plane 1.
        unsafe {
            Raw {
                qs: row.stream::<_, 0>(chunk),
                rest: row.stream::<_, 1>(chunk),
                head: row.stream::<_, 2>(chunk / Self::BLOCK_CHUNKS),
            }
        }
    }

    #[inline(always)]
    fn start(chunk: u32) -> u32 {
        start(chunk)
    }

    #[inline(always)]
    fn quad<const I: u32>(raw: &Raw, phase: u32) -> [f32; 4] {
        let (i, half) = (I % 4, I as usize / 4);
        let word = values(raw.qs.to_array()[i as usize], raw.rest, i)[half];
        Scales::unpack(raw.head, phase / 2).dequantize(word, half)
    }
}

impl FormatQ8 for Q5K {
    #[inline(always)]
    fn dot_q8(raw: &Raw, x: &[Q8Run; 2], phase: u32) -> f32 {
        let qs = raw.qs.to_array();
        let first = dot16(qs.map(|word| word & 0x1f1f_1f1f), &x[0].qs);
        let second = dot16_unsigned([0, 1, 2, 3].map(|i| second_8(qs[i as usize], raw.rest, i)), &x[1].qs);
        Scales::unpack(raw.head, phase / 2).combine(first, second, x, 8.0)
    }
}

/// A chunk, and of the block's header, which its eight lanes need, the lane's own word of four.
#[derive(Clone, Copy)]
pub struct Held {
    qs: U32x4,
    rest: u32,
    head: u32,
}

impl FormatHeld for Q5K {
    type Held = Held;

    #[inline(always)]
    unsafe fn hold(row: &Row, chunk: u32, phase: u32) -> Held {
        // SAFETY: the caller's promise; a chunk has a word of plane 1, and a header four.
        unsafe {
            Held {
                qs: row.stream::<_, 0>(chunk),
                rest: row.stream::<_, 1>(chunk),
                head: row.stream::<_, 2>(chunk / Self::BLOCK_CHUNKS * 4 + phase % 4),
            }
        }
    }

    #[inline(always)]
    fn word(held: &Held) -> u32 {
        held.qs.x ^ held.rest ^ held.head
    }

    #[inline(always)]
    unsafe fn gather(held: &Held, _phase: u32) -> Raw {
        // SAFETY: the caller's promise.
        let head = [0, 1, 2, 3].map(|i| unsafe { warp::warp_shuffle_idx(warp::FULL_MASK, held.head, i, 8).0 });
        Raw { qs: held.qs, rest: held.rest, head: U32x4::from_array(head) }
    }
}

impl FormatTile for Q5K {
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn integers(raw: &Raw, _phase: u32) -> [[u32; 4]; 2] {
        let words = [0, 1, 2, 3].map(|i| values(raw.qs.to_array()[i as usize], raw.rest, i));
        [words.map(|word| word[0]), words.map(|word| word[1])]
    }

    #[inline(always)]
    fn scale(raw: &Raw, phase: u32, run: usize) -> [f32; 2] {
        Scales::unpack(raw.head, phase / 2).scale(run)
    }
}

impl FormatWide for Q5K {
    const EXTRA: u32 = 2;
    const SPAN: u32 = 4;
    type Scales = U32x4;
    type Factors = U32x4;

    #[inline(always)]
    fn extra(step: u32) -> u32 {
        step / 4 * 2
    }

    #[inline(always)]
    fn extra_word(chunk: u32, _t: u32) -> u32 {
        chunk % 8
    }

    #[inline(always)]
    unsafe fn scales(row: &Row, group: u32) -> U32x4 {
        // SAFETY: the caller's promise; a block has eight groups.
        unsafe { row.stream::<_, 2>(group / 8) }
    }

    #[inline(always)]
    fn factors<const L: usize, const G: usize>(head: &[U32x4; L], first: u32, _end: u32) -> [U32x4; G] {
        Scales::factors(head[0], first)
    }

    #[inline(always)]
    fn weights(word: u32, extra: u32, t: u32, _chunk: u32, run: usize, factors: &U32x4) -> [u32; 2] {
        wide::with_min(values(word, extra, t)[run], factors)
    }
}
