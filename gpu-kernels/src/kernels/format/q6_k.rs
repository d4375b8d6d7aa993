//! Q6_K: `v = d·scales[e/16]·(q − 32)`, 256 elements a block, eight chunks.
//!
//! Planes: `ql` (128 bytes a block), `qh` (64), `scales` (16 signed bytes), `d` (f16). Four chunks make
//! a half of 128 elements. Chunk `k` of a half has in its low nibbles elements `16·k ..+16` of the half
//! and in its high nibbles elements `64 + 16·k ..+16`, each run with a scale of its own. Their upper two
//! bits are in `qh[16·(k % 2) ..+16]` of the half, shifted by 2 for the second pair of chunks and by 4
//! for the high nibbles. Source: [`BlockQ6K`](crate::blocks::BlockQ6K).

use cuda_std::prelude::*;

use super::{
    Format, FormatHeld, FormatQ8, FormatTile, FormatWide, Q8Run, Row, byte, centred, dot16, high_nibbles, low_nibbles,
    select, unsigned_bytes, wide,
};
use crate::blocks::GgmlType;

/// See [`BlockQ6K`](crate::blocks::BlockQ6K).
pub struct Q6K;

/// A chunk, its upper bits, the scales of its half and the block's scale.
#[derive(Clone, Copy)]
pub struct Raw {
    ql: U32x4,
    qh: U32x4,
    scales: U32x2,
    d: u16,
}

/// Four 6-bit values of the first run and four of the second: word `i` of the chunk.
#[inline(always)]
fn words(raw: &Raw, i: usize, phase: u32) -> [u32; 2] {
    values(raw.ql.to_array()[i], raw.qh.to_array()[i], phase)
}

/// The same from the chunk's word and that of its piece of `qh`.
#[inline(always)]
fn values(ql: u32, qh: u32, phase: u32) -> [u32; 2] {
    let upper = qh >> (phase & 2);
    [low_nibbles(ql) | upper << 4 & 0x3030_3030, high_nibbles(ql) | upper & 0x3030_3030]
}

/// The scale of a run: byte `phase % 4` of the half's first four scales, or of its last four.
#[inline(always)]
fn scale(raw: &Raw, phase: u32, run: usize) -> f32 {
    let four = if run == 0 { raw.scales.x } else { raw.scales.y };
    byte(four ^ 0x8080_8080, phase % 4) - 128.0
}

impl Format for Q6K {
    const TYPE: GgmlType = GgmlType::Q6K;
    const RUNS: u32 = 2;
    const RUN_DISTANCE: u32 = 64;
    type Raw = Raw;

    #[inline(always)]
    unsafe fn load(row: &Row, chunk: u32) -> Raw {
        let half = chunk / 4;
        // SAFETY: the caller's promise; a half has two 16-byte pieces of `qh` and eight scales.
        unsafe {
            Raw {
                ql: row.stream::<_, 0>(chunk),
                qh: row.stream::<_, 1>(half * 2 + chunk % 2),
                scales: row.stream::<_, 2>(half),
                d: row.load::<_, 3>(chunk / Self::BLOCK_CHUNKS),
            }
        }
    }

    #[inline(always)]
    fn start(chunk: u32) -> u32 {
        chunk / 4 * 128 + chunk % 4 * 16
    }

    #[inline(always)]
    fn quad<const I: u32>(raw: &Raw, phase: u32) -> [f32; 4] {
        let run = I as usize / 4;
        let scale = convert::f16_to_f32(raw.d) * scale(raw, phase, run);
        unsigned_bytes(words(raw, I as usize % 4, phase)[run]).map(|q| scale * (q - 32.0))
    }
}

impl FormatQ8 for Q6K {
    /// `d·sc·(Σ q·x − 32·Σ x)`: the offset is taken from the sum of the activations, once for sixteen.
    #[inline(always)]
    fn dot_q8(raw: &Raw, x: &[Q8Run; 2], phase: u32) -> f32 {
        let words = [0, 1, 2, 3].map(|i| words(raw, i, phase));
        let run = |r: usize| math::fma(dot16(words.map(|word| word[r]), &x[r].qs), x[r].d, -32.0 * x[r].s);
        // Which of the two products is rounded is said: left to the compiler, it differs from kernel to kernel.
        let second = math::mul_rn(scale(raw, phase, 1), run(1));
        convert::f16_to_f32(raw.d) * math::fma(scale(raw, phase, 0), run(0), second)
    }
}

/// A chunk's nibbles, half of its upper bits, of which a neighbour has the other, and one word of the two that four lanes
/// need as scales.
#[derive(Clone, Copy)]
pub struct Held {
    ql: U32x4,
    qh: U32x2,
    scales: u32,
    d: u16,
}

impl FormatHeld for Q6K {
    type Held = Held;

    #[inline(always)]
    unsafe fn hold(row: &Row, chunk: u32, phase: u32) -> Held {
        let half = chunk / 4;
        // SAFETY: the caller's promise; a half has two 16-byte pieces of `qh` and eight scales.
        unsafe {
            Held {
                ql: row.stream::<_, 0>(chunk),
                qh: row.stream::<_, 1>((half * 2 + phase % 2) * 2 + phase / 2 % 2),
                scales: row.stream::<_, 2>(half * 2 + phase % 2),
                d: row.load::<_, 3>(chunk / Self::BLOCK_CHUNKS),
            }
        }
    }

    #[inline(always)]
    fn word(held: &Held) -> u32 {
        held.ql.x ^ held.qh.x ^ held.scales ^ u32::from(held.d)
    }

    #[inline(always)]
    unsafe fn gather(held: &Held, phase: u32) -> Raw {
        let (even, lower) = (phase.is_multiple_of(2), phase & 2 == 0);
        // SAFETY: the caller's promise.
        let (x, y, scales) = unsafe {
            (warp::shuffle_xor(held.qh.x, 2), warp::shuffle_xor(held.qh.y, 2), warp::shuffle_xor(held.scales, 1))
        };
        let qh = U32x4 {
            x: select(lower, held.qh.x, x),
            y: select(lower, held.qh.y, y),
            z: select(lower, x, held.qh.x),
            w: select(lower, y, held.qh.y),
        };
        let scales = U32x2 { x: select(even, held.scales, scales), y: select(even, scales, held.scales) };
        Raw { ql: held.ql, qh, scales, d: held.d }
    }
}

impl FormatTile for Q6K {
    const GROUP_ELEMS: u32 = 16;

    #[inline(always)]
    fn integers(raw: &Raw, phase: u32) -> [[u32; 4]; 2] {
        let words = [0, 1, 2, 3].map(|i| words(raw, i, phase));
        [words.map(|word| centred(word[0], 32)), words.map(|word| centred(word[1], 32))]
    }

    #[inline(always)]
    fn scale(raw: &Raw, phase: u32, run: usize) -> [f32; 2] {
        [convert::f16_to_f32(raw.d) * scale(raw, phase, run), 0.0]
    }
}

impl FormatWide for Q6K {
    const STEP: u32 = 128;
    const EXTRA: u32 = 2;
    type Scales = (u8, u16);
    type Factors = u32;

    #[inline(always)]
    fn extra(step: u32) -> u32 {
        step * 2
    }

    #[inline(always)]
    unsafe fn scales(row: &Row, group: u32) -> (u8, u16) {
        // SAFETY: the caller's promise; a block has sixteen groups.
        unsafe { (row.load::<_, 2>(group), row.load::<_, 3>(group / 16)) }
    }

    #[inline(always)]
    fn factors<const L: usize, const G: usize>(scales: &[(u8, u16); L], first: u32, end: u32) -> [u32; G] {
        wide::each(scales, first, end, |(scale, d), live| {
            wide::scale(convert::f16_to_f32(*d) * f32::from(scale.cast_signed()), live)
        })
    }

    #[inline(always)]
    fn weights(word: u32, extra: u32, _t: u32, chunk: u32, run: usize, scale: &u32) -> [u32; 2] {
        wide::symmetric(values(word, extra, chunk % 8)[run], 32.0, *scale)
    }
}
