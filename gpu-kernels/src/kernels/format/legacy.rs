//! Q4_0, Q4_1, Q5_0, Q5_1: 32 elements a block, one chunk.
//!
//! Low nibbles are elements 0 to 15, high nibbles 16 to 31; the five-bit types have the fifth bit of
//! element `j` in bit `j` of a 32-bit word. Planes: `qs` (16 bytes a block), `qh` (4) for the five-bit
//! types, then `d`, or `d` and `m` together.
//!
//! Source: [`BlockQ4_0`](crate::blocks::BlockQ4_0) and its neighbours.

use cuda_std::prelude::*;

use super::{
    Format, FormatHeld, FormatQ8, FormatTile, FormatWide, Q8Run, Row, centred, dot16, held_whole, unsigned_bytes, wide,
};
use crate::blocks::GgmlType;

/// See [`BlockQ4_0`](crate::blocks::BlockQ4_0).
pub struct Q4_0;
/// See [`BlockQ4_1`](crate::blocks::BlockQ4_1).
pub struct Q4_1;
/// See [`BlockQ5_0`](crate::blocks::BlockQ5_0).
pub struct Q5_0;
/// See [`BlockQ5_1`](crate::blocks::BlockQ5_1).
pub struct Q5_1;

/// A block: nibbles, fifth bits (0 where the type has none) and one or two f16.
#[derive(Clone, Copy)]
pub struct Raw {
    qs: U32x4,
    qh: u32,
    dm: u32,
}

/// A block without its nibbles.
#[derive(Clone, Copy)]
pub struct Scales {
    qh: u32,
    dm: u32,
}

impl Scales {
    #[inline(always)]
    fn d(&self) -> f32 {
        convert::f16_to_f32(self.dm as u16)
    }

    #[inline(always)]
    fn m(&self) -> f32 {
        convert::f16_to_f32((self.dm >> 16) as u16)
    }
}

/// The values of word `t` of a block's nibbles, low for run 0, high for run 1, with their bits of `qh`.
#[inline(always)]
fn values(word: u32, qh: u32, t: u32, run: usize) -> u32 {
    wide::nibbles(word, run) | fifth_bits(qh >> (16 * run as u32 + 4 * t) & 0xf)
}

impl Raw {
    /// The values of word `i`: low nibbles for run 0, high for run 1.
    #[inline(always)]
    fn word(&self, i: usize, run: usize) -> u32 {
        values(self.qs.to_array()[i], self.qh, i as u32, run)
    }

    #[inline(always)]
    fn scales(&self) -> Scales {
        Scales { qh: self.qh, dm: self.dm }
    }

    #[inline(always)]
    fn d(&self) -> f32 {
        self.scales().d()
    }

    #[inline(always)]
    fn m(&self) -> f32 {
        self.scales().m()
    }

    /// The values of both runs.
    #[inline(always)]
    fn integers(&self) -> [[u32; 4]; 2] {
        [0, 1].map(|run| [0, 1, 2, 3].map(|i| self.word(i, run)))
    }

    /// `Σ q·x + more` over the block, without the weights' scale.
    #[inline(always)]
    fn dot(&self, x: &[Q8Run; 2], more: f32) -> f32 {
        let run = |r: usize| dot16([0, 1, 2, 3].map(|i| self.word(i, r)), &x[r].qs);
        math::fma(run(0), x[0].d, math::fma(run(1), x[1].d, more))
    }
}

/// Bit `j` of four bits to bit 4 of byte `j`. The factor's copies do not overlap, so nothing carries.
#[inline(always)]
fn fifth_bits(bits: u32) -> u32 {
    bits.wrapping_mul(0x0204_0810) & 0x1010_1010
}

/// `v = d·(q − $offset)`.
macro_rules! symmetric {
    ($name:ident, $offset:literal, [$($qh_plane:literal)?], $d_plane:literal) => {
        legacy!($name, [$($qh_plane)?], $d_plane, u16, |raw: &Raw, q: f32| raw.d() * (q - $offset));

        impl FormatQ8 for $name {
            /// `d·(Σ q·x − offset·Σ x)`.
            #[inline(always)]
            fn dot_q8(raw: &Raw, x: &[Q8Run; 2], _phase: u32) -> f32 {
                raw.d() * raw.dot(x, -$offset * (x[0].s + x[1].s))
            }
        }

        impl FormatTile for $name {
            #[inline(always)]
            fn integers(raw: &Raw, _phase: u32) -> [[u32; 4]; 2] {
                raw.integers().map(|run| run.map(|word| centred(word, $offset as u8)))
            }

            #[inline(always)]
            fn scale(raw: &Raw, _phase: u32, _run: usize) -> [f32; 2] {
                [raw.d(), 0.0]
            }
        }

        impl FormatWide for $name {
            type Scales = Scales;
            type Factors = U32x2;

            #[inline(always)]
            unsafe fn scales(row: &Row, group: u32) -> Scales {
                // SAFETY: the caller's promise.
                unsafe { legacy!(@scales row, group, [$($qh_plane)?], $d_plane, u16) }
            }

            #[inline(always)]
            fn factors<const L: usize, const G: usize>(scales: &[Scales; L], first: u32, end: u32) -> [U32x2; G] {
                wide::each(scales, first, end, |scales, live| {
                    U32x2 { x: wide::scale(scales.d(), live), y: scales.qh }
                })
            }

            #[inline(always)]
            fn weights(word: u32, _extra: u32, t: u32, _chunk: u32, run: usize, factors: &U32x2) -> [u32; 2] {
                wide::symmetric(values(word, factors.y, t, run), $offset, factors.x)
            }
        }
    };
}

/// `v = d·q + m`.
macro_rules! affine {
    ($name:ident, [$($qh_plane:literal)?], $dm_plane:literal) => {
        legacy!($name, [$($qh_plane)?], $dm_plane, u32, |raw: &Raw, q: f32| raw.d() * q + raw.m());

        impl FormatQ8 for $name {
            /// `d·Σ q·x + m·Σ x`.
            #[inline(always)]
            fn dot_q8(raw: &Raw, x: &[Q8Run; 2], _phase: u32) -> f32 {
                math::fma(raw.d(), raw.dot(x, 0.0), raw.m() * (x[0].s + x[1].s))
            }
        }

        impl FormatTile for $name {
            const HAS_MIN: bool = true;

            #[inline(always)]
            fn integers(raw: &Raw, _phase: u32) -> [[u32; 4]; 2] {
                raw.integers()
            }

            #[inline(always)]
            fn scale(raw: &Raw, _phase: u32, _run: usize) -> [f32; 2] {
                [raw.d(), -raw.m()]
            }
        }

        impl FormatWide for $name {
            type Scales = Scales;
            type Factors = U32x4;

            #[inline(always)]
            unsafe fn scales(row: &Row, group: u32) -> Scales {
                // SAFETY: the caller's promise.
                unsafe { legacy!(@scales row, group, [$($qh_plane)?], $dm_plane, u32) }
            }

            #[inline(always)]
            fn factors<const L: usize, const G: usize>(scales: &[Scales; L], first: u32, end: u32) -> [U32x4; G] {
                wide::each(scales, first, end, |scales, live| {
                    let (d, m) = if live { (scales.d(), scales.m()) } else { (0.0, 0.0) };
                    wide::affine(d, m, scales.qh)
                })
            }

            #[inline(always)]
            fn weights(word: u32, _extra: u32, t: u32, _chunk: u32, run: usize, factors: &U32x4) -> [u32; 2] {
                wide::with_min(values(word, factors.w, t, run), factors)
            }
        }
    };
}

macro_rules! legacy {
    (@load u16, $row:ident, $plane:tt, $chunk:ident) => {
        u32::from($row.load::<u16, $plane>($chunk))
    };
    (@load u32, $row:ident, $plane:tt, $chunk:ident) => {
        $row.stream::<u32, $plane>($chunk)
    };
    (@scales $row:ident, $chunk:ident, [$($qh_plane:literal)?], $dm_plane:tt, $dm:tt) => {{
        let dm = legacy!(@load $dm, $row, $dm_plane, $chunk);
        #[allow(unused_mut, unused_assignments, reason = "the four-bit types have no qh")]
        let mut qh = 0;
        $( qh = $row.stream::<_, $qh_plane>($chunk); )?
        Scales { qh, dm }
    }};
    ($name:ident, [$($qh_plane:literal)?], $dm_plane:tt, $dm:tt, $value:expr) => {
        impl Format for $name {
            const TYPE: GgmlType = GgmlType::$name;
            const RUNS: u32 = 2;
            const RUN_DISTANCE: u32 = 16;
            type Raw = Raw;

            #[inline(always)]
            unsafe fn load(row: &Row, chunk: u32) -> Raw {
                // SAFETY: the caller's promise.
                unsafe {
                    let qs = row.stream::<_, 0>(chunk);
                    let Scales { qh, dm } = legacy!(@scales row, chunk, [$($qh_plane)?], $dm_plane, $dm);
                    Raw { qs, qh, dm }
                }
            }

            #[inline(always)]
            fn start(chunk: u32) -> u32 {
                chunk * 32
            }

            #[inline(always)]
            fn quad<const I: u32>(raw: &Raw, _phase: u32) -> [f32; 4] {
                let value = $value;
                unsigned_bytes(raw.word(I as usize % 4, I as usize / 4)).map(|q| value(raw, q))
            }
        }
    };
}

symmetric!(Q4_0, 8.0, [], 1);
affine!(Q4_1, [], 1);
symmetric!(Q5_0, 16.0, [1], 2);
affine!(Q5_1, [1], 2);

held_whole! {
    Q4_0, |held| held.qs.x ^ held.dm;
    Q4_1, |held| held.qs.x ^ held.dm;
    Q5_0, |held| held.qs.x ^ held.qh ^ held.dm;
    Q5_1, |held| held.qs.x ^ held.qh ^ held.dm;
}
