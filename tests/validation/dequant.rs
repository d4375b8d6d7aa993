//! The CPU's reading of every weight format: values of another engine, and blocks made by hand.

use std::collections::BTreeMap;

use gpu_kernels::blocks::GgmlType;
use host::cpu::dequant::dequantize_row;
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    type_id: u32,
    block_elems: usize,
    block_bytes: usize,
    blocks_hex: Vec<String>,
    values: Vec<f32>,
}

fn from_hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|d| d as u8).collect();
    digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

fn dequantize(ty: GgmlType, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; bytes.len() / ty.block_bytes() * ty.block_elems()];
    dequantize_row(ty, bytes, &mut out);
    out
}

#[test]
fn dequantized_blocks_equal_the_golden_values() {
    let golden: BTreeMap<String, Golden> =
        serde_json::from_str(include_str!("../data/dequant.json")).expect("golden file");
    let mut seen = Vec::new();
    for (name, golden) in &golden {
        // The file also holds formats that zinc does not read.
        let Some(ty) = GgmlType::from_id(golden.type_id) else { continue };
        assert_eq!((ty.name(), ty.block_elems(), ty.block_bytes()), (&**name, golden.block_elems, golden.block_bytes));
        let bytes: Vec<u8> = golden.blocks_hex.iter().flat_map(|block| from_hex(block)).collect();
        // At an odd address: a file may put a tensor anywhere.
        let shifted = [&[0xaa], &*bytes].concat();
        let values = dequantize(ty, &shifted[1..]);
        assert_eq!(values.len(), golden.values.len(), "{name}");
        for (i, (ours, theirs)) in values.iter().zip(&golden.values).enumerate() {
            assert_eq!(ours.to_bits(), theirs.to_bits(), "{name} value {i}: {ours} instead of {theirs}");
        }
        seen.push(ty);
    }
    for ty in GgmlType::ALL {
        assert!(*ty == GgmlType::F32 || seen.contains(ty), "no golden values for {ty}");
    }
}

/// Dequantises one block and checks that it has the listed values, and `rest` everywhere else.
fn check_block(ty: GgmlType, bytes: &[u8], expected: &[(usize, f32)], rest: Option<f32>) {
    assert_eq!(bytes.len(), ty.block_bytes());
    let values = dequantize(ty, bytes);
    for (i, &value) in values.iter().enumerate() {
        match (expected.iter().find(|(at, _)| *at == i), rest) {
            (Some(&(_, wanted)), _) => assert_eq!(value, wanted, "{ty} value {i}"),
            (None, Some(rest)) => assert_eq!(value, rest, "{ty} value {i}"),
            (None, None) => {}
        }
    }
}

/// B22, on the CPU, with the three after it.
#[test]
fn mxfp4_low_nibbles_are_the_first_half() {
    let block = |e: u8| {
        let mut bytes = [0; 17];
        bytes[..3].copy_from_slice(&[e, 0x21, 0x9f]);
        bytes
    };
    check_block(GgmlType::Mxfp4, &block(0x7f), &[(0, 0.5), (1, -6.0), (16, 1.0), (17, -0.5)], Some(0.0));
    check_block(GgmlType::Mxfp4, &block(0x80), &[(0, 1.0), (1, -12.0), (16, 2.0), (17, -1.0)], Some(0.0));
    // Exponent 0 is the subnormal 2^-127, so v0 = 2^-128 exactly; flushing would give 0.
    check_block(GgmlType::Mxfp4, &block(0), &[(0, 2f32.powi(-126) / 4.0), (16, 2f32.powi(-126) / 2.0)], None);
}

/// A Q4_K or Q5_K block with d = 1, dmin = 0 and all scales 1, then `edits` as (offset, byte).
fn k_block(ty: GgmlType, edits: &[(usize, u8)]) -> Vec<u8> {
    let mut bytes = vec![0; ty.block_bytes()];
    bytes[..2].copy_from_slice(&[0x00, 0x3c]);
    bytes[4..16].copy_from_slice(&[1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]);
    for &(at, byte) in edits {
        bytes[at] = byte;
    }
    bytes
}

#[test]
fn q5_k_fifth_bit_of_sub_block_s_is_bit_s_of_qh() {
    let (ty, qh, qs) = (GgmlType::Q5K, 16, 48);
    check_block(ty, &k_block(ty, &[(qh, 0x02), (qh + 9, 0x01)]), &[(32, 16.0), (9, 16.0)], Some(0.0));
    check_block(ty, &k_block(ty, &[(qs, 0x21)]), &[(0, 1.0), (32, 2.0)], Some(0.0));
}

#[test]
fn q4_k_scales_are_split_six_bit_fields() {
    let (ty, scales, qs) = (GgmlType::Q4K, 4, 16);
    let values = [(0, 1.0), (32, 2.0), (192, 3.0), (224, 4.0)];
    check_block(ty, &k_block(ty, &[(qs, 0x21), (qs + 96, 0x43)]), &values, Some(0.0));
    let edits = [(scales + 3, 0xc0), (scales + 11, 0x0f), (qs + 96, 0x10)];
    check_block(ty, &k_block(ty, &edits), &[(224, 63.0)], Some(0.0));
}

#[test]
fn q6_k_scale_covers_sixteen_elements() {
    let mut bytes = [0; 210];
    bytes[0] = 0x01;
    bytes[192] = 0xfe;
    bytes[208..].copy_from_slice(&[0x00, 0x3c]);
    // Element 0 is −2·(1 − 32) and its neighbours −2·(0 − 32); all other scales are 0.
    let first: Vec<(usize, f32)> = (0..16).map(|i| (i, if i == 0 { 62.0 } else { 64.0 })).collect();
    check_block(GgmlType::Q6K, &bytes, &first, Some(0.0));
}

#[test]
#[should_panic(expected = "are not 256 elements of Q4_K")]
fn a_row_of_the_wrong_length_is_refused() {
    dequantize_row(GgmlType::Q4K, &[0; 143], &mut [0.0; 256]);
}
