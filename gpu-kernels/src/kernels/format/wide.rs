//! Weights as bf16, for the products of warpgroups ([`matmul::wide`](crate::kernels::matmul)).
//!
//! Integers become bf16 two at a time and without a conversion: an integer `q` below 128 beside the byte `0x43` is the
//! bf16 `128 + q`. From that `(128 + q) − (128 + q₀)`, which is exact, and then `(q − q₀)·scale + add`, which is rounded
//! once. For types without minimums `q₀` is their offset and `add` is 0. For the others it is the integer nearest to the
//! value 0, so that `add`, what is left of the minimum, is at most half a scale and its rounding does not matter. The
//! scale is rounded, too: a weight is off by two roundings of 2⁻⁸ at most.
//!
//! Four weights that a lane takes together are columns `4t ..+4` of a run of 16. In the factors of the product they are
//! rows `2t`, `2t + 1`, `2t + 8` and `2t + 9` of 16: which is which does not matter, as long as the activations are in
//! the same order ([`to_bf16`](crate::kernels::to_bf16)). It is the order in which pairs of bytes come out of a word:
//! `4t`, `4t + 2`, `4t + 1`, `4t + 3`.

use cuda_std::prelude::*;

use super::{FormatTile, MAGIC, Row, high_nibbles, low_nibbles};

/// 1 as two bf16.
const ONE: u32 = 0x3f80_3f80;
/// −0 as two bf16: added, it changes nothing.
const NOTHING: u32 = 0x8000_8000;

/// A format as bf16 factors.
pub trait FormatWide: FormatTile {
    /// Columns of a step, a multiple of 64: both runs of each of its chunks lie in them.
    const STEP: u32 = 64;
    /// 16-byte units of plane 1 that are brought for a step, besides its chunks: 0 or 2.
    const EXTRA: u32 = 0;
    /// Steps whose factors are made together, by two lanes a row.
    const SPAN: u32 = 1;
    /// What a group's factors are made of, or those of a span.
    type Scales: Copy;
    /// What turns the integers of a group into weights.
    type Factors: Pod;

    /// The first of the step's units in plane 1.
    #[inline(always)]
    fn extra(_step: u32) -> u32 {
        0
    }

    /// The word of those units that belongs to word `t` of chunk `chunk`: of every second chunk in the same unit.
    #[inline(always)]
    fn extra_word(chunk: u32, t: u32) -> u32 {
        chunk % 2 * 4 + t
    }

    /// Loads what the factors of group `group` of a row are made of.
    ///
    /// # Safety
    /// The row has such a group.
    unsafe fn scales(row: &Row, group: u32) -> Self::Scales;

    /// The factors that a lane makes: of groups `first`, `first + 2`, … of a row, each from its scales, those of 0 from
    /// group `end` on; or, where a span has one set of scales, of `G` groups from `first` on.
    fn factors<const L: usize, const G: usize>(scales: &[Self::Scales; L], first: u32, end: u32) -> [Self::Factors; G];

    /// Four weights of run `run` of chunk `chunk`, from their word of the chunk and the [`extra_word`](Self::extra_word):
    /// the first and third, the second and fourth. `t` is the word's number in the chunk.
    fn weights(word: u32, extra: u32, t: u32, chunk: u32, run: usize, factors: &Self::Factors) -> [u32; 2];
}

/// A unit of plane `P`, to be copied; the first of the row for one that is not there.
///
/// # Safety
/// The row has such a unit, or one at least.
#[inline(always)]
pub(crate) unsafe fn unit<const P: usize>(row: &Row, unit: u32, inside: bool) -> *const U32x4 {
    let unit = super::select(inside, unit, 0);
    // SAFETY: the caller's promise.
    unsafe { row.planes[P].cast::<U32x4>().add(unit as usize) }
}

/// A number as two bf16.
#[inline(always)]
pub(super) fn twice(x: f32) -> u32 {
    convert::pack_bf16x2(x, x)
}

/// A scale as two bf16, or 0.
#[inline(always)]
pub(super) fn scale(x: f32, live: bool) -> u32 {
    super::select(live, twice(x), 0)
}

/// [`FormatWide::factors`] group by group.
#[inline(always)]
pub(super) fn each<S, F, const L: usize, const G: usize>(
    scales: &[S; L],
    first: u32,
    end: u32,
    factors: impl Fn(&S, bool) -> F,
) -> [F; G] {
    const { assert!(L == G) };
    core::array::from_fn(|i| factors(&scales[i], first + 2 * (i as u32) < end))
}

/// `-(128 + q₀)`, scale and `add` for `v = scale·q + min`, each twice, and a word that goes with them.
#[inline(always)]
pub(super) fn affine(scale: f32, min: f32, word: u32) -> U32x4 {
    // Whatever q₀ is, the result is right; how well it is rounded is all that depends on it. Where the scale is 0, the
    // quotient is none, and q₀ is 64.
    let zero = math::max(math::min(-min * math::rcp_ftz(scale), 64.0), -64.0) + MAGIC - MAGIC;
    let add = math::fma(zero, scale, min);
    U32x4 { x: twice(-128.0 - zero), y: twice(scale), z: twice(add), w: word }
}

/// The bytes of a word, below 128, as bf16 that are 128 more: the first and third, the second and fourth.
#[inline(always)]
fn pairs(bytes: u32) -> [u32; 2] {
    const EXPONENTS: u32 = 0x4343_4343;
    [int8::prmt(bytes, EXPONENTS, 0x4240), int8::prmt(bytes, EXPONENTS, 0x4341)]
}

/// `(q − offset)·scale` for the bytes of a word.
#[inline(always)]
pub(super) fn symmetric(bytes: u32, offset: f32, scale: u32) -> [u32; 2] {
    let offset = twice(-128.0 - offset);
    pairs(bytes).map(|q| math::fma_bf16x2(math::fma_bf16x2(q, ONE, offset), scale, NOTHING))
}

/// The weights of [`affine`] for the bytes of a word.
#[inline(always)]
pub(super) fn with_min(bytes: u32, factors: &U32x4) -> [u32; 2] {
    pairs(bytes).map(|q| math::fma_bf16x2(math::fma_bf16x2(q, ONE, factors.x), factors.y, factors.z))
}

/// The nibbles of run `run`.
#[inline(always)]
pub(super) fn nibbles(word: u32, run: usize) -> u32 {
    if run == 0 { low_nibbles(word) } else { high_nibbles(word) }
}

/// `q·scale` for the signed bytes of a word. Their low seven bits beside the exponent are `128 + q mod 128`, and the
/// sign bit is the exponent's last: 128, or 256 where it is set.
#[inline(always)]
pub(super) fn signed(word: u32, scale: u32) -> [u32; 2] {
    const MAGIC: u32 = 0x4300_4300;
    const MINUS_ONE: u32 = 0xbf80_bf80;
    [word, word >> 8].map(|word| {
        let q = math::fma_bf16x2(word & 0x0080_0080 | MAGIC, MINUS_ONE, word & 0x007f_007f | MAGIC);
        math::fma_bf16x2(q, scale, NOTHING)
    })
}

/// `E2M1·scale` for the low nibbles of a word's bytes, or the high ones. Exponent and fraction are put where a bf16's
/// end and begin: a number 2¹²⁶ times too small, for small ones are subnormal in both.
#[inline(always)]
pub(super) fn e2m1(word: u32, run: usize, scale: u32) -> [u32; 2] {
    const TWO_126: u32 = 0x7e80_7e80;
    let word = if run == 0 { word << 4 } else { word };
    [word << 8, word].map(|word| {
        let small = word & 0x8000_8000 | word >> 6 & 0x01c0_01c0;
        math::fma_bf16x2(math::fma_bf16x2(small, TWO_126, NOTHING), scale, NOTHING)
    })
}
