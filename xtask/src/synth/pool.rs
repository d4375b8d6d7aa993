//! Random blocks of each tensor type.
//!
//! Drawing every byte of a 20 GiB file would take minutes. A pool holds some tens of thousands of
//! distinct blocks of one type and standard deviation, and a tensor is made of runs of it.

use std::collections::BTreeMap;

use bytemuck::bytes_of;
use gpu_kernels::blocks::{
    BlockMxfp4, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0,
};
use half::{bf16, f16};
use host::gguf::GgmlType;
use rayon::prelude::*;

use super::layout::{Fill, TensorPlan};
use super::random::Rng;

const POOL_BLOCKS: usize = 1 << 16;
/// Blocks of plain floats hold one element; take more of them.
const POOL_FLOATS: usize = 1 << 20;

/// A pool for each type and standard deviation that the tensors need.
pub(super) struct Pools(BTreeMap<(u32, u32), Vec<u8>>);

impl Pools {
    pub(super) fn new(plans: &[TensorPlan], seed: u64) -> Pools {
        let mut wanted = BTreeMap::new();
        for plan in plans {
            if let Fill::Blocks { std } = plan.fill {
                wanted.insert(key(plan.ty, std), (plan.ty, std));
            }
        }
        let make = |(key, (ty, std)): ((u32, u32), (GgmlType, f32))| {
            let mut rng = Rng::new(seed ^ (u64::from(key.0) << 32 | u64::from(key.1)));
            (key, pool(ty, std, &mut rng))
        };
        Pools(wanted.into_par_iter().map(make).collect())
    }

    /// Fills whole blocks with runs of the pool that start at random blocks.
    pub(super) fn fill(&self, ty: GgmlType, std: f32, rng: &mut Rng, mut out: &mut [u8]) {
        let pool = &self.0[&key(ty, std)];
        let block = ty.block_bytes();
        while !out.is_empty() {
            let run = &pool[rng.below(pool.len() / block) * block..];
            let (now, later) = out.split_at_mut(run.len().min(out.len()));
            now.copy_from_slice(&run[..now.len()]);
            out = later;
        }
    }
}

fn key(ty: GgmlType, std: f32) -> (u32, u32) {
    (ty as u32, std.to_bits())
}

fn pool(ty: GgmlType, std: f32, rng: &mut Rng) -> Vec<u8> {
    let n_blocks = if ty.block_elems() == 1 { POOL_FLOATS } else { POOL_BLOCKS };
    let mut pool = Vec::with_capacity(n_blocks * ty.block_bytes());
    for _ in 0..n_blocks {
        push_block(ty, std, rng, &mut pool);
    }
    pool
}

/// One block whose values have about the standard deviation `std` and the mean 0. Quants are uniform;
/// the divisors are the standard deviation of `d = 1` values: that of a uniform integer, times for the
/// K types the root mean square of the sub-block scales.
fn push_block(ty: GgmlType, std: f32, rng: &mut Rng, out: &mut Vec<u8>) {
    let jitter = rng.uniform(0.7, 1.3);
    let scale = |divisor: f32| f16::from_f32(std / divisor * jitter);
    let times = |d: f16, factor: f32| f16::from_f32(d.to_f32() * factor);
    match ty {
        GgmlType::F32 => out.extend((std * rng.normal()).to_le_bytes()),
        GgmlType::F16 => out.extend(f16::from_f32(std * rng.normal()).to_le_bytes()),
        GgmlType::Bf16 => out.extend(bf16::from_f32(std * rng.normal()).to_le_bytes()),
        GgmlType::Q8_0 => {
            let qs = random_bytes(rng).map(u8::cast_signed);
            out.extend(bytes_of(&BlockQ8_0 { d: scale(73.9), qs }));
        }
        GgmlType::Q4_0 => {
            out.extend(bytes_of(&BlockQ4_0 { d: scale(4.6), qs: random_bytes(rng) }));
        }
        GgmlType::Q4_1 => {
            let d = scale(4.6);
            out.extend(bytes_of(&BlockQ4_1 { d, m: times(d, -7.5), qs: random_bytes(rng) }));
        }
        GgmlType::Q5_0 => {
            let (qh, qs) = (random_bytes(rng), random_bytes(rng));
            out.extend(bytes_of(&BlockQ5_0 { d: scale(9.2), qh, qs }));
        }
        GgmlType::Q5_1 => {
            let (d, qh, qs) = (scale(9.2), random_bytes(rng), random_bytes(rng));
            out.extend(bytes_of(&BlockQ5_1 { d, m: times(d, -15.5), qh, qs }));
        }
        GgmlType::Mxfp4 => {
            let exponent = 127.0 + (std / 2.7).log2().round() + rng.below(3) as f32 - 1.0;
            let e = exponent.clamp(1.0, 254.0) as u8;
            out.extend(bytes_of(&BlockMxfp4 { e, qs: random_bytes(rng) }));
        }
        GgmlType::Q4K => {
            let (d, scales, qs) = (scale(180.0), packed_scales(rng), random_bytes(rng));
            out.extend(bytes_of(&BlockQ4K { d, dmin: times(d, 7.5), scales, qs }));
        }
        GgmlType::Q5K => {
            let (d, scales) = (scale(360.0), packed_scales(rng));
            let (qh, qs) = (random_bytes(rng), random_bytes(rng));
            out.extend(bytes_of(&BlockQ5K { d, dmin: times(d, 15.5), scales, qh, qs }));
        }
        GgmlType::Q6K => {
            let (ql, qh) = (random_bytes(rng), random_bytes(rng));
            let scales = random_bytes(rng).map(u8::cast_signed);
            out.extend(bytes_of(&BlockQ6K { ql, qh, scales, d: scale(1365.0) }));
        }
    }
}

fn random_bytes<const N: usize>(rng: &mut Rng) -> [u8; N] {
    let mut bytes = [0; N];
    rng.bytes(&mut bytes);
    bytes
}

/// Eight 6-bit scales from 8 to 63, and the same eight as minimums, so that with `dmin` half of the
/// quants' range times `d` each sub-block has the mean 0. Packed as in [`BlockQ4K`]: byte `j < 4` has
/// scale `j` and the high bits of scale `j + 4`, bytes 4 to 7 likewise for minimums, and bytes 8 to 11
/// have the low nibbles of scales and minimums 4 to 7.
fn packed_scales(rng: &mut Rng) -> [u8; 12] {
    let mut packed = [0; 12];
    for j in 0..4 {
        let (low, high) = (8 + rng.below(56) as u8, 8 + rng.below(56) as u8);
        packed[j] = low | (high >> 4) << 6;
        packed[j + 4] = packed[j];
        packed[j + 8] = (high & 15) | (high & 15) << 4;
    }
    packed
}
