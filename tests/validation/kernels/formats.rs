//! The weight formats as their definitions give them, element by element, in f64.
//!
//! Written from ggml's layouts one value at a time: no words, no packing tricks, nothing shared with
//! the kernels.

use gpu_kernels::blocks::GgmlType;
use half::{bf16, f16};

use super::Random;

/// A value as the sum of its two terms, such as `d·sc·q` and `−dmin·mn`; the second is 0 where a format
/// has one only. Rounding errors scale with the terms, not with their sum.
#[derive(Clone, Copy)]
pub(crate) struct Value(f64, f64);

impl Value {
    /// The value.
    pub(crate) fn sum(self) -> f64 {
        self.0 + self.1
    }
    /// The size of its terms.
    pub(crate) fn size(self) -> f64 {
        self.0.abs() + self.1.abs()
    }
}

/// Every value of the file's bytes.
pub(crate) fn dequantize(ty: GgmlType, file: &[u8]) -> Vec<Value> {
    let blocks = file.chunks_exact(ty.block_bytes());
    assert!(blocks.remainder().is_empty(), "{ty}: whole blocks");
    blocks.flat_map(|block| (0..ty.block_elems()).map(move |i| value(ty, block, i))).collect()
}

fn half(bytes: &[u8], at: usize) -> f64 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f64()
}

/// Element `i` of a block.
fn value(ty: GgmlType, block: &[u8], i: usize) -> Value {
    let d = || half(block, 0);
    match ty {
        GgmlType::F32 => Value(f64::from(f32::from_le_bytes([block[0], block[1], block[2], block[3]])), 0.0),
        GgmlType::F16 => Value(d(), 0.0),
        GgmlType::Bf16 => Value(bf16::from_le_bytes([block[0], block[1]]).to_f64(), 0.0),
        GgmlType::Q8_0 => Value(d() * f64::from(block[2 + i] as i8), 0.0),
        GgmlType::Q4_0 => Value(d() * nibble(&block[2..], i), d() * -8.0),
        GgmlType::Q4_1 => Value(d() * nibble(&block[4..], i), half(block, 2)),
        GgmlType::Q5_0 => Value(d() * (nibble(&block[6..], i) + 16.0 * bit(&block[2..], i)), d() * -16.0),
        GgmlType::Q5_1 => Value(d() * (nibble(&block[8..], i) + 16.0 * bit(&block[4..], i)), half(block, 2)),
        GgmlType::Mxfp4 => Value(mxfp4(block, i), 0.0),
        GgmlType::Q4K => k_quant(block, &block[16..], i, 0.0),
        GgmlType::Q5K => {
            // Bit s of qh[p], for position p of sub-block s.
            let fifth = block[16 + i % 32] >> (i / 32) & 1;
            k_quant(block, &block[48..], i, 16.0 * f64::from(fifth))
        }
        GgmlType::Q6K => q6_k(block, i),
    }
}

/// Elements 0 to 15 are low nibbles, 16 to 31 high ones.
fn nibble(qs: &[u8], i: usize) -> f64 {
    f64::from(if i < 16 { qs[i] % 16 } else { qs[i - 16] / 16 })
}

fn bit(bytes: &[u8], i: usize) -> f64 {
    f64::from(bytes[i / 8] >> (i % 8) & 1)
}

fn mxfp4(block: &[u8], i: usize) -> f64 {
    const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let q = nibble(&block[1..], i) as usize;
    let sign = if q >= 8 { -1.0 } else { 1.0 };
    sign * E2M1[q % 8] * f64::from(i32::from(block[0]) - 127).exp2()
}

/// Q4_K and Q5_K: `d·sc·(nibble + fifth) − dmin·mn`.
fn k_quant(block: &[u8], qs: &[u8], i: usize, fifth: f64) -> Value {
    let (s, p) = (i / 32, i % 32);
    let byte = qs[s / 2 * 32 + p];
    let q = f64::from(if s.is_multiple_of(2) { byte % 16 } else { byte / 16 }) + fifth;
    let scales = &block[4..16];
    let (sc, mn) = if s < 4 {
        (scales[s] % 64, scales[s + 4] % 64)
    } else {
        (scales[s + 4] % 16 + scales[s - 4] / 64 * 16, scales[s + 4] / 16 + scales[s] / 64 * 16)
    };
    Value(half(block, 0) * f64::from(sc) * q, -half(block, 2) * f64::from(mn))
}

fn q6_k(block: &[u8], i: usize) -> Value {
    let (ql, qh, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let (h, group, l) = (i / 128, i % 128 / 32, i % 32);
    let low = ql[h * 64 + group % 2 * 32 + l];
    let low = if group < 2 { low % 16 } else { low / 16 };
    let high = qh[h * 32 + l] >> (2 * group) & 3;
    let scale = half(block, 208) * f64::from(scales[i / 16] as i8);
    Value(scale * (f64::from(low) + 16.0 * f64::from(high)), scale * -32.0)
}

/// Blocks of real-looking weights and their values in f32, of a type, as another engine gives them.
#[derive(serde::Deserialize)]
struct Golden {
    type_id: u32,
    blocks_hex: Vec<String>,
    values: Vec<f32>,
}

/// The golden blocks of every type that zinc reads: the file's bytes and the values.
pub(crate) fn golden() -> Vec<(GgmlType, Vec<u8>, Vec<f32>)> {
    let text =
        std::fs::read_to_string(crate::checkout::path("tests/data/dequant.json")).expect("tests/data/dequant.json");
    let all: std::collections::BTreeMap<String, Golden> = serde_json::from_str(&text).expect("its format");
    let known = all.into_values().filter_map(|golden| Some((GgmlType::from_id(golden.type_id)?, golden)));
    let known: Vec<_> = known.map(|(ty, golden)| (ty, unhex(&golden.blocks_hex.concat()), golden.values)).collect();
    assert_eq!(known.len(), GgmlType::ALL.len() - 1, "every type but F32");
    known
}

/// The bytes of a hexadecimal text; blanks are skipped.
pub(crate) fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    digits.chunks_exact(2).map(|pair| pair[0] * 16 + pair[1]).collect()
}

/// Random file bytes of `n` elements with scales of ordinary size.
pub(crate) fn random_blocks(random: &mut Random, ty: GgmlType, n: usize) -> Vec<u8> {
    let mut file = random.bytes(n / ty.block_elems() * ty.block_bytes());
    for block in file.chunks_exact_mut(ty.block_bytes()) {
        let scale = f16::from_f32(0.02 + 0.01 * random.unit()).to_le_bytes();
        match ty {
            GgmlType::F32 => block.copy_from_slice(&random.unit().to_le_bytes()),
            GgmlType::F16 => block.copy_from_slice(&f16::from_f32(random.unit()).to_le_bytes()),
            GgmlType::Bf16 => block.copy_from_slice(&bf16::from_f32(random.unit()).to_le_bytes()),
            GgmlType::Mxfp4 => block[0] = 118 + random.below(12) as u8,
            GgmlType::Q6K => block[208..].copy_from_slice(&scale),
            GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4K | GgmlType::Q5K => {
                block[..2].copy_from_slice(&scale);
                block[2..4].copy_from_slice(&f16::from_f32(0.1 * random.unit()).to_le_bytes());
            }
            _ => block[..2].copy_from_slice(&scale),
        }
    }
    file
}
