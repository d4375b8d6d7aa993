//! Q5_K: Q4_K with a fifth bit. 256 elements a block, eight chunks.
//!
//! Planes: `qs` (128 bytes a block), `qh` (32), the header `d dmin scales` (16). Bit `s` of `qh[p]`
//! belongs to position `p` of sub-block `s`, so a chunk needs one half of `qh`, the same half for every
//! second chunk, and two bits of each byte. Source: [`BlockQ5K`](crate::blocks::BlockQ5K).

use cuda_std::prelude::*;

use super::q4_k::{Scales, run_start};
use super::{Format, FormatQ8, Q8Run, Row, high_nibbles, low_nibbles};
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

/// Four 5-bit values: word `i` of the chunk, of sub-block `2·pair + half`.
#[inline(always)]
fn word(raw: &Raw, i: usize, pair: u32, half: usize) -> u32 {
    let (qs, qh) = (raw.qs.to_array()[i], raw.qh.to_array()[i]);
    let fifth = (qh >> (2 * pair + half as u32) & 0x0101_0101) << 4;
    fifth | if half == 0 { low_nibbles(qs) } else { high_nibbles(qs) }
}

impl Format for Q5K {
    const TYPE: GgmlType = GgmlType::Q5K;
    const RUNS: u32 = 2;
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
    fn run_start(chunk: u32, run: u32) -> u32 {
        run_start(chunk, run)
    }

    #[inline(always)]
    fn quad<const I: u32>(raw: &Raw, chunk: u32) -> [f32; 4] {
        let (pair, half) = (chunk / 2 % 4, I as usize / 4);
        Scales::unpack(raw.head, pair).dequantize(word(raw, I as usize % 4, pair, half), half)
    }
}

impl FormatQ8 for Q5K {
    #[inline(always)]
    fn dot_q8(raw: &Raw, x: &[Q8Run; 2], chunk: u32) -> f32 {
        let pair = chunk / 2 % 4;
        let run = |half| [0, 1, 2, 3].map(|i| word(raw, i, pair, half));
        Scales::unpack(raw.head, pair).dot_q8(run(0), run(1), x)
    }
}
