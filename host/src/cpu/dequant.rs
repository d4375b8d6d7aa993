//! Quantised blocks to f32: the definition of every weight format, as plain loops.
//!
//! The equations are those of the block types in [`gpu_kernels::blocks`]; every value is formed by single
//! f32 operations in the order the equation has them, so results equal ggml's bit for bit.
//!
//! The loops run over fixed-size arrays without branches, and everything is `#[inline(always)]` and calls no
//! closures, so that inside a `pulp` dispatch it compiles to the vector instructions of the machine at hand.

use bytemuck::Pod;
use gpu_kernels::blocks::{
    BlockMxfp4, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0, GgmlType, QK, QK_K,
};
use half::f16;
use pulp::{Simd, WithSimd};

/// Writes the values of one row, or of any whole number of blocks, to `out`.
///
/// `bytes` may have any alignment: a file with a small `general.alignment` puts blocks anywhere.
///
/// # Panics
/// If `bytes` is not exactly the blocks of `out.len()` elements of type `ty`.
pub fn dequantize_row(ty: GgmlType, bytes: &[u8], out: &mut [f32]) {
    pulp::Arch::new().dispatch(DequantizeRow { ty, bytes, out });
}

/// [`dequantize_row`] for code that is already inside a `pulp` dispatch.
#[inline(always)]
pub(super) fn dequantize_row_inline(ty: GgmlType, bytes: &[u8], out: &mut [f32]) {
    assert!(
        out.len().is_multiple_of(ty.block_elems()) && bytes.len() == out.len() / ty.block_elems() * ty.block_bytes(),
        "{} bytes are not {} elements of {ty}",
        bytes.len(),
        out.len()
    );
    match ty {
        GgmlType::F32 => floats(bytes, out),
        GgmlType::F16 => halves(bytes, out),
        GgmlType::Bf16 => bfloats(bytes, out),
        GgmlType::Q4_0 => each_block::<BlockQ4_0, _, _>(bytes, out),
        GgmlType::Q4_1 => each_block::<BlockQ4_1, _, _>(bytes, out),
        GgmlType::Q5_0 => each_block::<BlockQ5_0, _, _>(bytes, out),
        GgmlType::Q5_1 => each_block::<BlockQ5_1, _, _>(bytes, out),
        GgmlType::Q8_0 => each_block::<BlockQ8_0, _, _>(bytes, out),
        GgmlType::Q4K => each_block::<BlockQ4K, _, _>(bytes, out),
        GgmlType::Q5K => each_block::<BlockQ5K, _, _>(bytes, out),
        GgmlType::Q6K => each_block::<BlockQ6K, _, _>(bytes, out),
        GgmlType::Mxfp4 => each_block::<BlockMxfp4, _, _>(bytes, out),
    }
}

struct DequantizeRow<'a> {
    ty: GgmlType,
    bytes: &'a [u8],
    out: &'a mut [f32],
}

impl WithSimd for DequantizeRow<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        dequantize_row_inline(self.ty, self.bytes, self.out);
    }
}

#[inline(always)]
fn floats(bytes: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
        *out = f32::from_le_bytes(*bytes);
    }
}

#[inline(always)]
fn halves(bytes: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
        *out = f16_to_f32(f16::from_le_bytes(*bytes));
    }
}

#[inline(always)]
fn bfloats(bytes: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
        *out = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
    }
}

/// A block of `N` elements with `H` half-precision scales.
trait Dequantize<const N: usize, const H: usize>: Pod {
    fn halves(&self) -> [f16; H];
    /// Writes the elements; `halves` are this block's, converted.
    fn dequantize(&self, halves: [f32; H], out: &mut [f32; N]);
}

/// Blocks whose scales are converted together: one at a time, the conversion would cost as much as the rest.
const GROUP: usize = 8;

/// Dequantises every block `B` in `bytes`.
#[inline(always)]
fn each_block<B: Dequantize<N, H>, const N: usize, const H: usize>(bytes: &[u8], out: &mut [f32]) {
    let (outs, _) = out.as_chunks_mut::<N>();
    for (bytes, outs) in bytes.chunks(GROUP * size_of::<B>()).zip(outs.chunks_mut(GROUP)) {
        let mut halves = [[f16::ZERO; H]; GROUP];
        for (bytes, halves) in bytes.chunks_exact(size_of::<B>()).zip(&mut halves) {
            *halves = bytemuck::pod_read_unaligned::<B>(bytes).halves();
        }
        let mut scales = [[0.0; H]; GROUP];
        for (scale, half) in scales.as_flattened_mut().iter_mut().zip(halves.as_flattened()) {
            *scale = f16_to_f32(*half);
        }
        for ((bytes, out), scales) in bytes.chunks_exact(size_of::<B>()).zip(outs).zip(scales) {
            bytemuck::pod_read_unaligned::<B>(bytes).dequantize(scales, out);
        }
    }
}

/// Exact conversion without a branch or a table, so that loops over it vectorise.
///
/// Moving exponent and fraction to their f32 places leaves the value 2^−112 times too small, also for
/// subnormal halves; one exact multiplication puts that right. Infinity and NaN keep an all-ones exponent.
#[inline(always)]
pub(super) fn f16_to_f32(v: f16) -> f32 {
    const TWO_POW_112: f32 = f32::from_bits((127 + 112) << 23);
    let bits = u32::from(v.to_bits());
    let magnitude = (f32::from_bits((bits & 0x7fff) << 13) * TWO_POW_112).to_bits();
    let all_ones = if bits & 0x7c00 == 0x7c00 { 0xff << 23 } else { 0 };
    f32::from_bits(magnitude | all_ones | (bits & 0x8000) << 16)
}

impl Dequantize<QK, 1> for BlockQ4_0 {
    #[inline(always)]
    fn halves(&self) -> [f16; 1] {
        [self.d]
    }

    #[inline(always)]
    fn dequantize(&self, [d]: [f32; 1], out: &mut [f32; QK]) {
        for j in 0..16 {
            out[j] = d * (i32::from(self.qs[j] & 15) - 8) as f32;
            out[j + 16] = d * (i32::from(self.qs[j] >> 4) - 8) as f32;
        }
    }
}

impl Dequantize<QK, 2> for BlockQ4_1 {
    #[inline(always)]
    fn halves(&self) -> [f16; 2] {
        [self.d, self.m]
    }

    #[inline(always)]
    fn dequantize(&self, [d, m]: [f32; 2], out: &mut [f32; QK]) {
        for j in 0..16 {
            out[j] = d * f32::from(self.qs[j] & 15) + m;
            out[j + 16] = d * f32::from(self.qs[j] >> 4) + m;
        }
    }
}

/// The 5-bit values of a block whose fifth bits are the bits of the word `qh`.
#[inline(always)]
fn five_bits(qh: [u8; 4], qs: &[u8; 16]) -> [i32; 32] {
    let qh = u32::from_le_bytes(qh);
    let mut q = [0; 32];
    for j in 0..16 {
        q[j] = (u32::from(qs[j] & 15) | (qh >> j & 1) << 4) as i32;
        q[j + 16] = (u32::from(qs[j] >> 4) | (qh >> (j + 16) & 1) << 4) as i32;
    }
    q
}

impl Dequantize<QK, 1> for BlockQ5_0 {
    #[inline(always)]
    fn halves(&self) -> [f16; 1] {
        [self.d]
    }

    #[inline(always)]
    fn dequantize(&self, [d]: [f32; 1], out: &mut [f32; QK]) {
        for (out, q) in out.iter_mut().zip(five_bits(self.qh, &self.qs)) {
            *out = d * (q - 16) as f32;
        }
    }
}

impl Dequantize<QK, 2> for BlockQ5_1 {
    #[inline(always)]
    fn halves(&self) -> [f16; 2] {
        [self.d, self.m]
    }

    #[inline(always)]
    fn dequantize(&self, [d, m]: [f32; 2], out: &mut [f32; QK]) {
        for (out, q) in out.iter_mut().zip(five_bits(self.qh, &self.qs)) {
            *out = d * q as f32 + m;
        }
    }
}

impl Dequantize<QK, 1> for BlockQ8_0 {
    #[inline(always)]
    fn halves(&self) -> [f16; 1] {
        [self.d]
    }

    #[inline(always)]
    fn dequantize(&self, [d]: [f32; 1], out: &mut [f32; QK]) {
        for (out, q) in out.iter_mut().zip(self.qs) {
            *out = d * f32::from(q);
        }
    }
}

/// Scale and minimum of sub-block `s` of a Q4_K or Q5_K block. The first four have their low six bits in
/// `scales[s]` and `scales[s + 4]`; the other four are split into nibbles of `scales[s + 4]` and the two
/// bits that the first four leave free.
#[inline(always)]
fn scale_min(scales: &[u8; 12], s: usize) -> (u8, u8) {
    if s < 4 {
        (scales[s] & 63, scales[s + 4] & 63)
    } else {
        (scales[s + 4] & 15 | scales[s - 4] >> 6 << 4, scales[s + 4] >> 4 | scales[s] >> 6 << 4)
    }
}

impl Dequantize<QK_K, 2> for BlockQ4K {
    #[inline(always)]
    fn halves(&self) -> [f16; 2] {
        [self.d, self.dmin]
    }

    #[inline(always)]
    fn dequantize(&self, [d, dmin]: [f32; 2], out: &mut [f32; QK_K]) {
        for (s, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (sc, mn) = scale_min(&self.scales, s);
            let (d, m) = (d * f32::from(sc), dmin * f32::from(mn));
            let qs = &self.qs[s / 2 * 32..][..32];
            for (out, q) in out.iter_mut().zip(qs) {
                *out = d * f32::from(q >> (s % 2 * 4) & 15) - m;
            }
        }
    }
}

impl Dequantize<QK_K, 2> for BlockQ5K {
    #[inline(always)]
    fn halves(&self) -> [f16; 2] {
        [self.d, self.dmin]
    }

    #[inline(always)]
    fn dequantize(&self, [d, dmin]: [f32; 2], out: &mut [f32; QK_K]) {
        for (s, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (sc, mn) = scale_min(&self.scales, s);
            let (d, m) = (d * f32::from(sc), dmin * f32::from(mn));
            let qs = &self.qs[s / 2 * 32..][..32];
            for ((out, q), qh) in out.iter_mut().zip(qs).zip(self.qh) {
                *out = d * f32::from(q >> (s % 2 * 4) & 15 | (qh >> s & 1) << 4) - m;
            }
        }
    }
}

impl Dequantize<QK_K, 1> for BlockQ6K {
    #[inline(always)]
    fn halves(&self) -> [f16; 1] {
        [self.d]
    }

    #[inline(always)]
    fn dequantize(&self, [d]: [f32; 1], out: &mut [f32; QK_K]) {
        for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (half, group) = (g / 4, g % 4);
            let ql = &self.ql[half * 64 + group % 2 * 32..][..32];
            let qh = &self.qh[half * 32..][..32];
            for (sub, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                let d = d * f32::from(self.scales[g * 2 + sub]);
                for (j, out) in out.iter_mut().enumerate() {
                    let p = sub * 16 + j;
                    let q = ql[p] >> (group / 2 * 4) & 15 | (qh[p] >> (group * 2) & 3) << 4;
                    *out = d * (i32::from(q) - 32) as f32;
                }
            }
        }
    }
}

/// Twice an E2M1 value, without a table. The bits of a nibble put in place as sign, exponent and fraction
/// of an f32 are the value times 2^−126, its subnormal ½ included, so an exact multiplication finishes it.
/// The addition turns the negative zero of nibble 8 into zero, as in ggml.
#[inline(always)]
fn e2m1_doubled(nibble: u8) -> f32 {
    const TWO_POW_127: f32 = f32::from_bits((127 + 127) << 23);
    let n = u32::from(nibble);
    f32::from_bits((n & 8) << 28 | (n & 7) << 22) * TWO_POW_127 + 0.0
}

/// Half an E8M0 scale, 2^(e − 128): doubling the elements and halving the scale keeps e = 255 finite.
/// The two smallest are subnormal.
#[inline(always)]
fn e8m0_halved(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 1 << (21 + e) } else { u32::from(e - 1) << 23 })
}

impl Dequantize<QK, 0> for BlockMxfp4 {
    #[inline(always)]
    fn halves(&self) -> [f16; 0] {
        []
    }

    #[inline(always)]
    fn dequantize(&self, _: [f32; 0], out: &mut [f32; QK]) {
        let d = e8m0_halved(self.e);
        for j in 0..16 {
            out[j] = d * e2m1_doubled(self.qs[j] & 15);
            out[j + 16] = d * e2m1_doubled(self.qs[j] >> 4);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_converts_exactly() {
        for bits in 0..=u16::MAX {
            let (ours, reference) = (f16_to_f32(f16::from_bits(bits)), f16::from_bits(bits).to_f32());
            assert!(
                ours.to_bits() == reference.to_bits() || ours.is_nan() && reference.is_nan(),
                "{bits:#06x}: {ours}"
            );
        }
    }
}
