//! Activations to 8-bit integers: in every 16 consecutive elements of a row `d = max|x| / 127`,
//! `qs[i] = round(x[i] / d)` and `s = d·Σ qs`.
//!
//! `d` is f32. `s` serves formats with a minimum or an offset: `Σ (d·q − m)·x = d·Σ q·x − m·Σ x`. A NaN or infinity in a
//! block makes its `d` one of them, so that it is not lost. Blocks of nothing above 2⁻¹¹⁹ count as zeros.

use cuda_std::{pdl, prelude::*};

use super::format::MAGIC;
use crate::params::{Q8_BLOCK, QUANTIZE_Q8_LANE_ELEMS, QuantizeQ8Params};

/// The largest integer: symmetric, so −128 is not used.
const Q_MAX: f32 = 127.0;
/// A block of nothing as large as this, 2⁻¹¹⁹, counts as zeros: its scale has no finite reciprocal.
const MIN_MAX: f32 = f32::from_bits((127 - 119) << 23);

/// Quantises `x: [rows, x_stride]`, `cols` elements of each row, to `qs: [rows, cols]`,
/// `d: [rows, cols/16]`, `s: [rows, cols/16]`.
///
/// A lane takes four elements, four lanes a block of 16.
/// Grid: `(⌈cols / (4·FLAT_BLOCK)⌉, rows)`, blocks of `FLAT_BLOCK` lanes.
///
/// # Safety
/// - `p.cols` is a multiple of 32, `p.x_stride` of 4; `x` and `qs` are 16-byte aligned.
/// - The arrays have the shapes above for the grid's rows; the outputs overlap nothing else.
#[kernel(max_threads = 256)]
pub unsafe fn quantize_q8(x: *const f32, qs: *mut i8, d: *mut f32, s: *mut f32, p: QuantizeQ8Params) {
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let row = thread::block_idx_y() as usize;
    let column = thread::index_1d() * QUANTIZE_Q8_LANE_ELEMS;
    // Lanes past the end read the last elements again and store nothing: they are needed by the shuffles.
    let live = column < p.cols;
    let at = column.min(p.cols - QUANTIZE_Q8_LANE_ELEMS) as usize;
    let x: F32x4 = ld(x.add(row * p.x_stride as usize + at).cast());

    quantize4(x.to_array(), live, row * p.cols as usize + at, qs, d, s);
}

/// Four quantised elements, and the scale and sum of their block.
#[derive(Clone, Copy)]
pub(crate) struct Quad {
    /// The integers, in the bytes of a word.
    pub(crate) qs: u32,
    /// The block's scale.
    pub(crate) d: f32,
    /// `d·Σ qs` of the block.
    pub(crate) s: f32,
}

/// Quantises four elements a lane, four lanes a block of 16.
///
/// # Safety
/// Every lane of the warp comes here, each four of them with consecutive elements, a multiple of 16 in the first.
#[inline(always)]
pub(crate) unsafe fn quantized4(x: [f32; 4]) -> Quad {
    const MAGNITUDE: u32 = 0x7fff_ffff;
    // As integers, magnitudes have the same order, and NaN is the largest: `max` of floats would lose it.
    let mut max = 0;
    for i in 0..4 {
        max = u32::max(max, x[i].to_bits() & MAGNITUDE);
    }
    // SAFETY: the caller's promise.
    unsafe {
        max = max.max(warp::shuffle_xor(max, 1));
        max = max.max(warp::shuffle_xor(max, 2));

        let max = f32::from_bits(max);
        // `max / 127` and `127 / max`, both rounded as divisions are, without their branches for numbers that are not here:
        // where `127 / max` is not finite, the integers are 0; and of a fourth of `max` the reciprocal is always normal.
        let d = quotient(max, Q_MAX, 1.0 / Q_MAX);
        let near = math::rcp_ftz(max / 4.0);
        let reciprocal = math::fma(near, math::fma(-max / 4.0, near, 1.0), near);
        let inverse = if max < MIN_MAX { 0.0 } else { quotient(Q_MAX / 4.0, max / 4.0, reciprocal) };
        // |x·inverse| may round to just above 127 but never to 127.5, so the integers fit. Added to [`MAGIC`], a number
        // leaves the nearest integer in the low bits, ties to even.
        let qs = int8::pack_i8x4(x.map(|x| (math::mul_rn(x, inverse) + MAGIC).to_bits().cast_signed()));
        let mut sum = int8::dp4a(qs.cast_signed(), 0x0101_0101, 0);
        sum += warp::shuffle_xor(sum, 1);
        sum += warp::shuffle_xor(sum, 2);
        Quad { qs, d, s: d * sum as f32 }
    }
}

/// `a / b` by a reciprocal of `b`, with one correction.
#[inline(always)]
fn quotient(a: f32, b: f32, reciprocal: f32) -> f32 {
    let near = a * reciprocal;
    math::fma(math::fma(-b, near, a), reciprocal, near)
}

/// [`quantized4`], stored at element `at` of `qs` where `live`. Rows follow each other without a gap, so `at` counts
/// through all of them.
///
/// # Safety
/// - As [`quantized4`], with consecutive `at`; four lanes are live together.
/// - Of a live lane, `at + 4` elements are in `qs`, a 16th of them in `d` and in `s`.
#[inline(always)]
pub(crate) unsafe fn quantize4(x: [f32; 4], live: bool, at: usize, qs: *mut i8, d: *mut f32, s: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        let quad = quantized4(x);
        if live {
            st(qs.add(at).cast(), quad.qs);
            if at.is_multiple_of(Q8_BLOCK as usize) {
                st(d.add(at / Q8_BLOCK as usize), quad.d);
                st(s.add(at / Q8_BLOCK as usize), quad.s);
            }
        }
    }
}
