//! Quantised blocks to f32: the definition of every weight format, as plain loops.
//!
//! The equations are those of the block types in [`gpu_kernels::blocks`]; every value is formed by single
//! f32 operations in the order the equation has them, so results equal ggml's bit for bit.
//!
//! The loops run over fixed-size arrays without branches, and everything is `#[inline(always)]` and calls no
//! closures, so that inside a `pulp` dispatch it compiles to the vector instructions of the machine at hand.

use bytemuck::{Pod, Zeroable};
use gpu_kernels::blocks::{
    BlockMxfp4, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0, GgmlType, QK_K,
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
        // A row of these may end anywhere.
        GgmlType::F32 => floats(bytes, out),
        GgmlType::F16 => halves(bytes, out),
        GgmlType::Bf16 => bfloats(bytes, out),
        _ => with_block(ty, EachBlock { bytes, out }),
    }
}

/// Something to do with blocks, of a type that is known only at run time.
pub(super) trait WithBlock {
    /// Its result.
    type Output;

    /// Does it with the type `B`.
    fn with_block<B: Block<H>, const H: usize>(self) -> Self::Output;
}

/// Does `work` with the blocks of `ty`.
#[inline(always)]
pub(super) fn with_block<W: WithBlock>(ty: GgmlType, work: W) -> W::Output {
    match ty {
        GgmlType::F32 => work.with_block::<Plain<f32>, _>(),
        GgmlType::F16 => work.with_block::<Plain<f16>, _>(),
        GgmlType::Bf16 => work.with_block::<Plain<bf16>, _>(),
        GgmlType::Q4_0 => work.with_block::<BlockQ4_0, _>(),
        GgmlType::Q4_1 => work.with_block::<BlockQ4_1, _>(),
        GgmlType::Q5_0 => work.with_block::<BlockQ5_0, _>(),
        GgmlType::Q5_1 => work.with_block::<BlockQ5_1, _>(),
        GgmlType::Q8_0 => work.with_block::<BlockQ8_0, _>(),
        GgmlType::Q4K => work.with_block::<BlockQ4K, _>(),
        GgmlType::Q5K => work.with_block::<BlockQ5K, _>(),
        GgmlType::Q6K => work.with_block::<BlockQ6K, _>(),
        GgmlType::Mxfp4 => work.with_block::<BlockMxfp4, _>(),
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

/// Elements that are dequantised at once. Every block is a whole number of such parts.
pub(super) const PART: usize = 32;

/// A block with `H` half-precision scales.
pub(super) trait Block<const H: usize>: Pod {
    /// [`PART`]s of a block.
    const PARTS: usize;

    /// The block's scales.
    fn halves(&self) -> [f16; H];

    /// Writes the elements of one part; `scales` are [`Block::halves`], converted.
    fn part(&self, scales: [f32; H], part: usize, out: &mut [f32; PART]);
}

/// Blocks of a row whose scales are converted together: one at a time, the conversion would cost as much as the rest.
pub(super) const GROUP: usize = 8;

/// The converted scales of a group of up to [`GROUP`] blocks of each of `R` rows.
#[inline(always)]
pub(super) fn scales<B: Block<H>, const H: usize, const R: usize>(rows: [&[u8]; R]) -> [[[f32; H]; GROUP]; R] {
    // All are gathered before the first is converted: a vector is read back slowly while its parts are being written.
    let mut halves = [[[f16::ZERO; H]; GROUP]; R];
    for (bytes, halves) in rows.iter().zip(&mut halves) {
        for (bytes, halves) in bytes.chunks_exact(size_of::<B>()).zip(halves) {
            *halves = bytemuck::pod_read_unaligned::<B>(bytes).halves();
        }
    }
    let mut scales = [[[0.0; H]; GROUP]; R];
    let flat = scales.as_flattened_mut().as_flattened_mut();
    for (scale, half) in flat.iter_mut().zip(halves.as_flattened().as_flattened()) {
        *scale = f16_to_f32(*half);
    }
    scales
}

/// Dequantises every block in `bytes`.
struct EachBlock<'a> {
    bytes: &'a [u8],
    out: &'a mut [f32],
}

impl WithBlock for EachBlock<'_> {
    type Output = ();

    #[inline(always)]
    fn with_block<B: Block<H>, const H: usize>(self) {
        let (parts, _) = self.out.as_chunks_mut::<PART>();
        for (bytes, parts) in self.bytes.chunks(GROUP * size_of::<B>()).zip(parts.chunks_mut(GROUP * B::PARTS)) {
            let blocks = bytes.chunks_exact(size_of::<B>()).zip(parts.chunks_exact_mut(B::PARTS));
            let [scales] = scales::<B, H, 1>([bytes]);
            for ((bytes, parts), scales) in blocks.zip(scales) {
                let block: B = bytemuck::pod_read_unaligned(bytes);
                for (part, out) in parts.iter_mut().enumerate() {
                    block.part(scales, part, out);
                }
            }
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

/// Plain numbers, taken [`PART`] at a time where a row has a whole number of those.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
pub(super) struct Plain<T>([T; PART]);

/// The 4-bit values of a block: the low nibbles, then the high ones.
#[inline(always)]
fn four_bits(qs: &[u8; 16]) -> [u8; PART] {
    let mut q = [0; PART];
    for j in 0..16 {
        q[j] = qs[j] & 15;
        q[j + 16] = qs[j] >> 4;
    }
    q
}

/// The 5-bit values of a block whose fifth bits are the bits of the word `qh`.
#[inline(always)]
fn five_bits(qs: &[u8; 16], qh: [u8; 4]) -> [u8; PART] {
    let (mut q, qh) = (four_bits(qs), u32::from_le_bytes(qh));
    for (j, q) in q.iter_mut().enumerate() {
        *q |= ((qh >> j & 1) << 4) as u8;
    }
    q
}

/// `out = d·(q − zero)`.
#[inline(always)]
fn centred(d: f32, q: [u8; PART], zero: i32, out: &mut [f32; PART]) {
    for (out, q) in out.iter_mut().zip(q) {
        *out = d * (i32::from(q) - zero) as f32;
    }
}

/// `out = d·q + m`.
#[inline(always)]
fn shifted(d: f32, q: [u8; PART], m: f32, out: &mut [f32; PART]) {
    for (out, q) in out.iter_mut().zip(q) {
        *out = d * f32::from(q) + m;
    }
}

/// A format of one part: its type, its scales, and the values that they make.
macro_rules! small_block {
    ($block:ty, $h:literal, [$($scale:ident),*], |$this:ident, $out:ident| $write:expr) => {
        impl Block<$h> for $block {
            const PARTS: usize = 1;

            #[inline(always)]
            fn halves(&self) -> [f16; $h] {
                [$(self.$scale),*]
            }

            #[inline(always)]
            fn part(&self, [$($scale),*]: [f32; $h], _: usize, $out: &mut [f32; PART]) {
                let $this = self;
                $write;
            }
        }
    };
}

small_block!(Plain<f32>, 0, [], |block, out| floats(bytemuck::bytes_of(block), out));
small_block!(Plain<f16>, 0, [], |block, out| halves(bytemuck::bytes_of(block), out));
small_block!(Plain<bf16>, 0, [], |block, out| bfloats(bytemuck::bytes_of(block), out));
small_block!(BlockQ4_0, 1, [d], |block, out| centred(d, four_bits(&block.qs), 8, out));
small_block!(BlockQ4_1, 2, [d, m], |block, out| shifted(d, four_bits(&block.qs), m, out));
small_block!(BlockQ5_0, 1, [d], |block, out| centred(d, five_bits(&block.qs, block.qh), 16, out));
small_block!(BlockQ5_1, 2, [d, m], |block, out| shifted(d, five_bits(&block.qs, block.qh), m, out));
small_block!(BlockQ8_0, 1, [d], |block, out| eight_bits(d, &block.qs, out));
small_block!(BlockMxfp4, 0, [], |block, out| e2m1(e8m0_halved(block.e), four_bits(&block.qs), out));

/// `out = d·q`.
#[inline(always)]
fn eight_bits(d: f32, q: &[i8; PART], out: &mut [f32; PART]) {
    for (out, q) in out.iter_mut().zip(q) {
        *out = d * f32::from(*q);
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

impl Block<2> for BlockQ4K {
    const PARTS: usize = QK_K / PART;

    #[inline(always)]
    fn halves(&self) -> [f16; 2] {
        [self.d, self.dmin]
    }

    #[inline(always)]
    fn part(&self, [d, dmin]: [f32; 2], s: usize, out: &mut [f32; PART]) {
        let (sc, mn) = scale_min(&self.scales, s);
        let (d, m) = (d * f32::from(sc), dmin * f32::from(mn));
        for (out, q) in out.iter_mut().zip(&self.qs[s / 2 * PART..][..PART]) {
            *out = d * f32::from(q >> (s % 2 * 4) & 15) - m;
        }
    }
}

impl Block<2> for BlockQ5K {
    const PARTS: usize = QK_K / PART;

    #[inline(always)]
    fn halves(&self) -> [f16; 2] {
        [self.d, self.dmin]
    }

    #[inline(always)]
    fn part(&self, [d, dmin]: [f32; 2], s: usize, out: &mut [f32; PART]) {
        let (sc, mn) = scale_min(&self.scales, s);
        let (d, m) = (d * f32::from(sc), dmin * f32::from(mn));
        for ((out, q), qh) in out.iter_mut().zip(&self.qs[s / 2 * PART..][..PART]).zip(self.qh) {
            *out = d * f32::from(q >> (s % 2 * 4) & 15 | (qh >> s & 1) << 4) - m;
        }
    }
}

impl Block<1> for BlockQ6K {
    const PARTS: usize = QK_K / PART;

    #[inline(always)]
    fn halves(&self) -> [f16; 1] {
        [self.d]
    }

    #[inline(always)]
    fn part(&self, [d]: [f32; 1], g: usize, out: &mut [f32; PART]) {
        let (half, group) = (g / 4, g % 4);
        let ql = &self.ql[half * 64 + group % 2 * PART..][..PART];
        let qh = &self.qh[half * PART..][..PART];
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

/// `out = d·(2·value of q)`.
#[inline(always)]
fn e2m1(d: f32, q: [u8; PART], out: &mut [f32; PART]) {
    for (out, q) in out.iter_mut().zip(q) {
        *out = d * e2m1_doubled(q);
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
