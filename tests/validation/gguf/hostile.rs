//! Damaged and hostile files are refused, with a reason.

use std::fs;

use host::gguf::Gguf;

use super::craft::{assert_refused, entry, golden_path, header, one_tensor, pair, refusal, sampler, string};

const STRING: u32 = 8;
const ARRAY: u32 = 9;
const U32: u32 = 4;
const BOOL: u32 = 7;

/// B1: products of dimensions wrap to something small.
#[test]
fn b1_dimensions_that_overflow() {
    let wraps_to_zero = one_tensor(&[1 << 33, 1 << 33], 0, &[]);
    assert_eq!(wraps_to_zero.len(), 65);
    assert_refused(&wraps_to_zero, &["tensor \"t\"", "too large"]);
    let wraps_to_32 = one_tensor(&[32, (1 << 59) + 1], 0, &[0; 128]);
    assert_refused(&wraps_to_32, &["tensor \"t\"", "too large"]);
    let bytes_wrap_to_zero = one_tensor(&[1 << 62], 0, &[0; 128]);
    assert_refused(&bytes_wrap_to_zero, &["tensor \"t\"", "too large"]);
    // Fits 64 bits and no file.
    assert_refused(&one_tensor(&[1 << 60], 0, &[0; 128]), &["tensor \"t\"", "4611686018427387904 bytes"]);
}

/// B2: zeros and counts that are used as divisors and bounds.
#[test]
fn b2_zero_dimensions_and_dimension_counts() {
    assert_refused(&one_tensor(&[4, 0], 0, &[]), &["tensor \"t\"", "zero"]);
    assert_refused(&one_tensor(&[0], 0, &[]), &["tensor \"t\"", "zero"]);
    let five = one_tensor(&[1; 5], 0, &[]);
    assert_eq!(five.len(), 24 + 9 + 4 + 5 * 8 + 4 + 8);
    assert_refused(&five, &["tensor \"t\"", "5 dimensions"]);
    assert_refused(&one_tensor(&[], 0, &[0; 8]), &["tensor \"t\"", "0 dimensions"]);
    let endless = [header(1, 0), string("t"), vec![0xff; 4]].concat();
    assert_refused(&endless, &["tensor \"t\"", "4294967295 dimensions"]);
}

#[test]
fn b2_empty_keys_and_names() {
    let empty_key = [header(0, 1), string(""), U32.to_le_bytes().to_vec(), vec![0; 4]].concat();
    assert_eq!(empty_key.len(), 40);
    assert_refused(&empty_key, &["metadata pair 0", "offset 24", "is empty"]);
    assert_refused(&[header(1, 0), entry("", &[1], 0)].concat(), &["tensor number 0", "is empty"]);
}

/// B4: counts and lengths that the file has no bytes for.
#[test]
fn b4_counts_beyond_the_file() {
    let huge = 1u64 << 62;
    assert_refused(&header(0, huge), &["metadata", "0 left"]);
    assert_refused(&header(huge, 0), &["tensor table", "0 left"]);
    for length in [huge, u64::MAX] {
        let key_length = [header(0, 1), length.to_le_bytes().to_vec(), vec![0; 8]].concat();
        assert_refused(&key_length, &["metadata pair 0", &format!("{length} bytes"), "8 left"]);
    }
    let array = [U32.to_le_bytes().to_vec(), (1u64 << 61).to_le_bytes().to_vec()].concat();
    let array = [header(0, 1), pair("a", ARRAY, &array)].concat();
    assert_eq!(array.len(), 49);
    assert_refused(&array, &["metadata key \"a\"", "9223372036854775808 bytes", "0 left"]);
}

#[test]
fn b4_strings_beyond_the_file() {
    for length in [5, 1 << 62, u64::MAX] {
        let value = [length.to_le_bytes().to_vec(), b"four".to_vec()].concat();
        assert_refused(&[header(0, 1), pair("s", STRING, &value)].concat(), &["metadata key \"s\"", "4 left"]);
    }
    // The third of three strings in an array ends after the file.
    let strings = [string("a"), string("b"), 9u64.to_le_bytes().to_vec()].concat();
    let array = [STRING.to_le_bytes().to_vec(), 3u64.to_le_bytes().to_vec(), strings].concat();
    assert_refused(&[header(0, 1), pair("s", ARRAY, &array)].concat(), &["metadata key \"s\"", "needs 9 bytes"]);
}

/// An array in an array in an array, each of one element: depth costs 12 bytes, and stack if it were
/// followed without a limit.
#[test]
fn arrays_nested_without_end() {
    let level = [ARRAY.to_le_bytes().to_vec(), 1u64.to_le_bytes().to_vec()].concat();
    let file = [header(0, 1), pair("deep", ARRAY, &level.repeat(100_000))].concat();
    assert_refused(&file, &["metadata key \"deep\"", "nested too deeply"]);
}

/// B5: an alignment that cannot be one.
#[test]
fn b5_bad_alignments() {
    for alignment in [0u32, 1, 3, 4, 48, 0x8000_0000] {
        let file = [header(0, 1), pair("general.alignment", U32, &alignment.to_le_bytes())].concat();
        assert_eq!(file.len(), 57);
        assert_refused(&file, &["general.alignment", &alignment.to_string()]);
    }
    let text = [header(0, 1), pair("general.alignment", STRING, &string("32"))].concat();
    assert_refused(&text, &["general.alignment", "string"]);
}

#[test]
fn b5_unaligned_tensor_offset() {
    assert_refused(&one_tensor(&[8], 1, &[0; 64]), &["tensor \"t\"", "offset 1", "alignment 32"]);
}

/// B7: a file that was cut, anywhere.
#[test]
fn b7_cut_files() {
    let file = fs::read(golden_path("llama")).unwrap();
    let whole = Gguf::parse(&file).unwrap();
    let last = whole.tensors().max_by_key(|tensor| tensor.offset).unwrap();
    let end = last.offset + last.n_bytes;
    assert_refused(&file[..end - 1], &[&last.name, &format!("{} bytes", last.n_bytes), &(end - 1).to_string()]);
    assert_refused(&file[..last.offset], &[&last.name, &last.offset.to_string()]);
    let first = whole.tensors().min_by_key(|tensor| tensor.offset).unwrap();
    assert_refused(&file[..first.offset], &["tensor"]);
    // At every byte of the header, and at a few of the data.
    for end in (24..first.offset - 32).step_by(7) {
        assert!(["metadata", "tensor"].iter().any(|part| refusal(&file[..end]).contains(part)), "cut at {end}");
    }
    for end in (0..first.offset).chain((first.offset..end).step_by(99_991)) {
        refusal(&file[..end]);
    }
}

#[test]
fn b7_offset_that_wraps_into_the_file() {
    let file = one_tensor(&[8], 0u64.wrapping_sub(32), &[]);
    assert_eq!(file.len(), 57);
    assert_refused(&file, &["tensor \"t\"", "32 bytes", "it has 57"]);
    let padded = one_tensor(&[8], 0u64.wrapping_sub(32), &[0; 256]);
    assert_refused(&padded, &["tensor \"t\"", "32 bytes"]);
    assert_eq!(Gguf::parse(&one_tensor(&[8], 0, &[7; 32])).unwrap().tensor("t").unwrap().data(), [7; 32]);
}

/// B8: other byte orders, versions, and things that are not GGUF.
#[test]
fn b8_byte_order_and_version() {
    let start = |version: [u8; 4]| [b"GGUF".to_vec(), version.to_vec(), vec![0; 16]].concat();
    assert_refused(&start([0, 0, 0, 3]), &["big-endian"]);
    assert_refused(&start([0, 0, 0, 2]), &["big-endian"]);
    let v1 = [b"GGUF".to_vec(), vec![1, 0, 0, 0], vec![0; 8]].concat();
    assert_eq!(v1.len(), 16);
    assert_refused(&v1, &["version 1"]);
    assert_refused(&start([0, 0, 0, 0]), &["version 0"]);
    assert_refused(&start([99, 0, 0, 0]), &["version 99"]);
    assert_eq!(Gguf::parse(&start([2, 0, 0, 0])).unwrap().tensors().len(), 0);
}

#[test]
fn b8_not_gguf_at_all() {
    let swapped = [vec![0x46, 0x55, 0x47, 0x47], sampler()[4..].to_vec()].concat();
    assert_refused(&swapped, &["not a GGUF file"]);
    for file in [&b""[..], b"GGU", b"version https://git-lfs.github.com/spec/v1\noid sha256:0"] {
        assert_refused(file, &["not a GGUF file"]);
    }
    assert_refused(b"GGUF", &["version", "0 left"]);
}

#[test]
fn b8_not_a_regular_file() {
    let dir = tempfile::tempdir().unwrap();
    let error = Gguf::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("not a regular file") && error.contains(dir.path().to_str().unwrap()), "{error}");
    let missing = dir.path().join("missing.gguf");
    assert!(Gguf::open(&missing).unwrap_err().to_string().contains("missing.gguf"));
    let empty = dir.path().join("empty.gguf");
    fs::write(&empty, b"").unwrap();
    assert!(Gguf::open(&empty).unwrap_err().to_string().contains("not a GGUF file"));
}

#[test]
fn unknown_types_are_named() {
    let unknown_value = [header(0, 1), pair("k", 13, &[0; 8])].concat();
    assert_refused(&unknown_value, &["metadata key \"k\"", "type 13"]);
    let mut q2_k = one_tensor(&[256], 0, &[0; 1024]);
    q2_k[24 + 9 + 4 + 8] = 10;
    assert_refused(&q2_k, &["tensor \"t\"", "Q2_K (10)", "Q4_K", "MXFP4"]);
    let mut unheard_of = one_tensor(&[256], 0, &[0; 1024]);
    unheard_of[24 + 9 + 4 + 8] = 200;
    assert_refused(&unheard_of, &["tensor \"t\"", "number 200"]);
}

#[test]
fn rows_of_partial_blocks() {
    let mut file = one_tensor(&[100, 8], 0, &[0; 4096]);
    let type_at = 24 + 9 + 4 + 16;
    file[type_at] = 8;
    assert_refused(&file, &["tensor \"t\"", "100 elements", "Q8_0", "32"]);
}

#[test]
fn doubled_keys_and_names() {
    let twice = pair("k", BOOL, &[1]).repeat(2);
    assert_refused(&[header(0, 2), twice].concat(), &["metadata key \"k\"", "twice"]);
    let twice = entry("t", &[1], 0).repeat(2);
    assert_refused(&[header(2, 0), twice, vec![0; 64]].concat(), &["tensor \"t\"", "twice"]);
}

#[test]
fn booleans_and_names_of_other_bytes() {
    assert_refused(&[header(0, 1), pair("k", BOOL, &[2])].concat(), &["metadata key \"k\"", "boolean 2"]);
    let key = [header(0, 1), 2u64.to_le_bytes().to_vec(), vec![0xc3, 0x28], vec![0; 8]].concat();
    assert_refused(&key, &["metadata pair 0", "UTF-8"]);
    let long = "k".repeat(65536);
    assert_refused(&[header(0, 1), pair(&long, BOOL, &[1])].concat(), &["metadata pair 0", "longer than"]);
}
