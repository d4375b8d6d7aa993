//! Quantised blocks to f32: the definition of every weight format, as plain loops.
//!
//! The equations are those of the block types in [`gpu_kernels::blocks`]; every value is formed by single
//! f32 operations in the order the equation has them, so results equal ggml's bit for bit.
//!
//! The loops run over fixed-size arrays without branches, and everything is `#[inline(always)]`, so that
//! inside a `pulp` dispatch they compile to the vector instructions of the machine at hand.

use bytemuck::Pod;
use gpu_kernels::blocks::{
    Block, BlockMxfp4, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0, GgmlType,
};
use half::{bf16, f16};
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
        GgmlType::F32 => each_block(bytes, out, |v: f32, out: &mut [f32; 1]| out[0] = v),
        GgmlType::F16 => each_block(bytes, out, |v: f16, out: &mut [f32; 1]| out[0] = f16_to_f32(v)),
        GgmlType::Bf16 => each_block(bytes, out, |v: bf16, out: &mut [f32; 1]| {
            out[0] = f32::from_bits(u32::from(v.to_bits()) << 16);
        }),
        GgmlType::Q4_0 => each_block(bytes, out, q4_0),
        GgmlType::Q4_1 => each_block(bytes, out, q4_1),
        GgmlType::Q5_0 => each_block(bytes, out, q5_0),
        GgmlType::Q5_1 => each_block(bytes, out, q5_1),
        GgmlType::Q8_0 => each_block(bytes, out, q8_0),
        GgmlType::Q4K => each_block(bytes, out, q4_k),
        GgmlType::Q5K => each_block(bytes, out, q5_k),
        GgmlType::Q6K => each_block(bytes, out, q6_k),
        GgmlType::Mxfp4 => each_block(bytes, out, mxfp4),
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

/// Calls `f` with every block `B` in `bytes` and the `N` elements of `out` that it describes.
#[inline(always)]
fn each_block<B: Pod, const N: usize>(bytes: &[u8], out: &mut [f32], f: impl Fn(B, &mut [f32; N])) {
    let (outs, _) = out.as_chunks_mut::<N>();
    for (block, out) in bytes.chunks_exact(size_of::<B>()).zip(outs) {
        f(bytemuck::pod_read_unaligned(block), out);
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

#[inline(always)]
fn q4_0(b: BlockQ4_0, out: &mut [f32; BlockQ4_0::ELEMS]) {
    let d = f16_to_f32(b.d);
    for j in 0..16 {
        out[j] = d * (i32::from(b.qs[j] & 15) - 8) as f32;
        out[j + 16] = d * (i32::from(b.qs[j] >> 4) - 8) as f32;
    }
}

#[inline(always)]
fn q4_1(b: BlockQ4_1, out: &mut [f32; BlockQ4_1::ELEMS]) {
    let (d, m) = (f16_to_f32(b.d), f16_to_f32(b.m));
    for j in 0..16 {
        out[j] = d * f32::from(b.qs[j] & 15) + m;
        out[j + 16] = d * f32::from(b.qs[j] >> 4) + m;
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

#[inline(always)]
fn q5_0(b: BlockQ5_0, out: &mut [f32; BlockQ5_0::ELEMS]) {
    let d = f16_to_f32(b.d);
    for (out, q) in out.iter_mut().zip(five_bits(b.qh, &b.qs)) {
        *out = d * (q - 16) as f32;
    }
}

#[inline(always)]
fn q5_1(b: BlockQ5_1, out: &mut [f32; BlockQ5_1::ELEMS]) {
    let (d, m) = (f16_to_f32(b.d), f16_to_f32(b.m));
    for (out, q) in out.iter_mut().zip(five_bits(b.qh, &b.qs)) {
        *out = d * q as f32 + m;
    }
}

#[inline(always)]
fn q8_0(b: BlockQ8_0, out: &mut [f32; BlockQ8_0::ELEMS]) {
    let d = f16_to_f32(b.d);
    for (out, q) in out.iter_mut().zip(b.qs) {
        *out = d * f32::from(q);
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

#[inline(always)]
fn q4_k(b: BlockQ4K, out: &mut [f32; BlockQ4K::ELEMS]) {
    let (d, dmin) = (f16_to_f32(b.d), f16_to_f32(b.dmin));
    for (s, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (sc, mn) = scale_min(&b.scales, s);
        let (d, m) = (d * f32::from(sc), dmin * f32::from(mn));
        let qs = &b.qs[s / 2 * 32..][..32];
        for (out, q) in out.iter_mut().zip(qs) {
            *out = d * f32::from(q >> (s % 2 * 4) & 15) - m;
        }
    }
}

#[inline(always)]
fn q5_k(b: BlockQ5K, out: &mut [f32; BlockQ5K::ELEMS]) {
    let (d, dmin) = (f16_to_f32(b.d), f16_to_f32(b.dmin));
    for (s, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (sc, mn) = scale_min(&b.scales, s);
        let (d, m) = (d * f32::from(sc), dmin * f32::from(mn));
        let qs = &b.qs[s / 2 * 32..][..32];
        for ((out, q), qh) in out.iter_mut().zip(qs).zip(b.qh) {
            *out = d * f32::from(q >> (s % 2 * 4) & 15 | (qh >> s & 1) << 4) - m;
        }
    }
}

#[inline(always)]
fn q6_k(b: BlockQ6K, out: &mut [f32; BlockQ6K::ELEMS]) {
    let d = f16_to_f32(b.d);
    for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (half, group) = (g / 4, g % 4);
        let ql = &b.ql[half * 64 + group % 2 * 32..][..32];
        let qh = &b.qh[half * 32..][..32];
        for (sub, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let d = d * f32::from(b.scales[g * 2 + sub]);
            for (j, out) in out.iter_mut().enumerate() {
                let p = sub * 16 + j;
                let q = ql[p] >> (group / 2 * 4) & 15 | (qh[p] >> (group * 2) & 3) << 4;
                *out = d * (i32::from(q) - 32) as f32;
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

#[inline(always)]
fn mxfp4(b: BlockMxfp4, out: &mut [f32; BlockMxfp4::ELEMS]) {
    let d = e8m0_halved(b.e);
    for j in 0..16 {
        out[j] = d * e2m1_doubled(b.qs[j] & 15);
        out[j + 16] = d * e2m1_doubled(b.qs[j] >> 4);
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
