//! Q8_0: `v = d·q`, 32 elements a block, two chunks.
//!
//! Planes: `qs` (32 bytes a block), `d` (f16). Source: [`BlockQ8_0`](crate::blocks::BlockQ8_0).

use cuda_std::prelude::*;

use super::{Format, FormatHeld, FormatQ8, FormatTile, FormatWide, Q8Run, Row, dot16, held_whole, signed_bytes, wide};
use crate::blocks::GgmlType;

/// See [`BlockQ8_0`](crate::blocks::BlockQ8_0).
pub struct Q8_0;

/// Half a block.
#[derive(Clone, Copy)]
pub struct Raw {
    qs: U32x4,
    d: u16,
}

impl Format for Q8_0 {
    const TYPE: GgmlType = GgmlType::Q8_0;
    const RUNS: u32 = 1;
    const RUN_DISTANCE: u32 = 0;
    type Raw = Raw;

    #[inline(always)]
    unsafe fn load(row: &Row, chunk: u32) -> Raw {
        // SAFETY: the caller's promise.
        unsafe { Raw { qs: row.stream::<_, 0>(chunk), d: row.load::<_, 1>(chunk / 2) } }
    }

    #[inline(always)]
    fn start(chunk: u32) -> u32 {
        chunk * 16
    }

    #[inline(always)]
    fn quad<const I: u32>(raw: &Raw, _phase: u32) -> [f32; 4] {
        let d = convert::f16_to_f32(raw.d);
        signed_bytes(raw.qs.to_array()[I as usize]).map(|q| d * q)
    }
}

impl FormatQ8 for Q8_0 {
    #[inline(always)]
    fn dot_q8(raw: &Raw, x: &[Q8Run; 2], _phase: u32) -> f32 {
        dot16(raw.qs.to_array(), &x[0].qs) * (convert::f16_to_f32(raw.d) * x[0].d)
    }
}

held_whole! { Q8_0, |held| held.qs.x ^ u32::from(held.d); }

impl FormatTile for Q8_0 {
    #[inline(always)]
    fn integers(raw: &Raw, _phase: u32) -> [[u32; 4]; 2] {
        [raw.qs.to_array(), [0; 4]]
    }

    #[inline(always)]
    fn scale(raw: &Raw, _phase: u32, _run: usize) -> [f32; 2] {
        [convert::f16_to_f32(raw.d), 0.0]
    }
}

impl FormatWide for Q8_0 {
    type Scales = u16;
    type Factors = u32;

    #[inline(always)]
    unsafe fn scales(row: &Row, group: u32) -> u16 {
        // SAFETY: the caller's promise.
        unsafe { row.load::<_, 1>(group) }
    }

    #[inline(always)]
    fn factors<const L: usize, const G: usize>(d: &[u16; L], first: u32, end: u32) -> [u32; G] {
        wide::each(d, first, end, |d, live| wide::scale(convert::f16_to_f32(*d), live))
    }

    #[inline(always)]
    fn weights(word: u32, _extra: u32, _t: u32, _chunk: u32, _run: usize, scale: &u32) -> [u32; 2] {
        wide::signed(word, *scale)
    }
}
