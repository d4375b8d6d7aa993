//! Q5_K: Q4_K with a fifth bit. 256 elements a block, eight chunks.
//!
//! Planes: `qs` (128 bytes a block), `qh` (32), the header `d dmin scales` (16). Bit `s` of `qh[p]`
//! belongs to position `p` of sub-block `s`, so a chunk needs one half of `qh`, the same half for every
//! second chunk, and two bits of each byte. Source: [`BlockQ5K`](crate::blocks::BlockQ5K).

use cuda_std::prelude::*;

use super::q4_k::{Scales, start};
use super::{Format, FormatHeld, FormatQ8, FormatTile, FormatWide, Q8Run, Row, dot16, high_nibbles, low_nibbles, wide};
use crate::blocks::GgmlType;

/// See [`BlockQ5K`](crate::blocks::BlockQ5K).
pub struct Q5K;

/// A chunk, its half of the block's fifth bits, and the block's header.
#[derive(Clone, Copy)]
pub struct Raw {
    qs: U32x4,
    qh: U32x4,
    head: U32x4,
}

/// Four 5-bit values of sub-block `2·pair` and four of the next: word `i` of the chunk.
///
/// Bit `2·pair` of each byte of `qh` is turned to bit 4, where it belongs, and with it the next bit to
/// bit 5; neither leaves its byte.
#[inline(always)]
fn words(raw: &Raw, i: usize, pair: u32) -> [u32; 2] {
    values(raw.qs.to_array()[i], raw.qh.to_array()[i], pair)
}

/// The same from the chunk's word and that of its half of `qh`.
#[inline(always)]
fn values(qs: u32, qh: u32, pair: u32) -> [u32; 2] {
    let fifth = qh.rotate_left(4u32.wrapping_sub(2 * pair) & 31);
    [low_nibbles(qs) | fifth & 0x1010_1010, high_nibbles(qs) | fifth >> 1 & 0x1010_1010]
}

impl Format for Q5K {
    const TYPE: GgmlType = GgmlType::Q5K;
    const RUNS: u32 = 2;
    const RUN_DISTANCE: u32 = 32;
    type Raw = Raw;

    #[inline(always)]
    unsafe fn load(row: &Row, chunk: u32) -> Raw {
        let block = chunk / Self::BLOCK_CHUNKS;
        // SAFETY: the caller's promise; a block has two 16-byte halves of `qh`.
        unsafe {
            Raw {
                qs: row.stream::<_, 0>(chunk),
                qh: row.stream::<_, 1>(block * 2 + chunk % 2),
                head: row.stream::<_, 2>(block),
            }
        }
    }

    #[inline(always)]
    fn start(chunk: u32) -> u32 {
        start(chunk)
    }

    #[inline(always)]
    fn quad<const I: u32>(raw: &Raw, phase: u32) -> [f32; 4] {
        let (pair, half) = (phase / 2, I as usize / 4);
        Scales::unpack(raw.head, pair).dequantize(words(raw, I as usize % 4, pair)[half], half)
    }
}

impl FormatQ8 for Q5K {
    #[inline(always)]
    fn dot_q8(raw: &Raw, x: &[Q8Run; 2], phase: u32) -> f32 {
        let pair = phase / 2;
        let words = [0, 1, 2, 3].map(|i| words(raw, i, pair));
        let run = |r: usize| dot16(words.map(|word| word[r]), &x[r].qs);
        Scales::unpack(raw.head, pair).combine(run(0), run(1), x, 1.0)
    }
}

/// A chunk's nibbles, and a word each of its half of the block's fifth bits and of the header: the lane's own of the
/// four that four lanes, or all eight of the block, need.
#[derive(Clone, Copy)]
pub struct Held {
    qs: U32x4,
    qh: u32,
    head: u32,
}

impl FormatHeld for Q5K {
    type Held = Held;

    #[inline(always)]
    unsafe fn hold(row: &Row, chunk: u32, phase: u32) -> Held {
        let block = chunk / Self::BLOCK_CHUNKS;
        // SAFETY: the caller's promise; a block has eight words of `qh`, and four of the header.
        unsafe {
            Held {
                qs: row.stream::<_, 0>(chunk),
                qh: row.stream::<_, 1>(block * 8 + phase % 2 * 4 + phase / 2),
                head: row.stream::<_, 2>(block * 4 + phase % 4),
            }
        }
    }

    #[inline(always)]
    fn word(held: &Held) -> u32 {
        held.qs.x ^ held.qh ^ held.head
    }

    #[inline(always)]
    unsafe fn gather(held: &Held, _phase: u32) -> Raw {
        // The block's lanes with the same half, in order.
        let first = warp::lane_id() & !6;
        // SAFETY: the caller's promise.
        unsafe {
            let half = [0, 2, 4, 6].map(|i| warp::shuffle_idx(held.qh, first + i));
            let head = [0, 1, 2, 3].map(|i| warp::warp_shuffle_idx(warp::FULL_MASK, held.head, i, 8).0);
            Raw { qs: held.qs, qh: U32x4::from_array(half), head: U32x4::from_array(head) }
        }
    }
}

impl FormatTile for Q5K {
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn integers(raw: &Raw, phase: u32) -> [[u32; 4]; 2] {
        let words = [0, 1, 2, 3].map(|i| words(raw, i, phase / 2));
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
    unsafe fn scales(row: &Row, group: u32) -> U32x4 {
        // SAFETY: the caller's promise; a block has eight groups.
        unsafe { row.stream::<_, 2>(group / 8) }
    }

    #[inline(always)]
    fn factors<const L: usize, const G: usize>(head: &[U32x4; L], first: u32, _end: u32) -> [U32x4; G] {
        Scales::factors(head[0], first)
    }

    #[inline(always)]
    fn weights(word: u32, extra: u32, _t: u32, chunk: u32, run: usize, factors: &U32x4) -> [u32; 2] {
        wide::with_min(values(word, extra, chunk % 8 / 2)[run], factors)
    }
}
