//! Valid files read back as what was written, also what other tools wrote.

use std::path::Path;

use gpu_kernels::blocks::GgmlType;
use host::gguf::{ErrorKind, Gguf, Value, Writer};
use host::model::config::Config;

use super::craft::{ARCHS, copy, golden, golden_path, header, logits, pair, sampler, scalars, string};
use crate::checkout;

/// B8: the magic and everything else against files that our writer had no part in.
#[test]
fn b8_foreign_files_open() {
    let mut files = vec![checkout::zinc_tiny()];
    files.extend(ARCHS.map(golden_path));
    for file in files {
        let gguf = Gguf::open(&file).unwrap();
        let embd = gguf.tensor("token_embd.weight").unwrap();
        assert_eq!(embd.data().len(), embd.rows() * embd.row_bytes());
        assert_eq!(embd.row(embd.rows() - 1).len(), embd.row_bytes());
        let name = file.file_name().unwrap().to_str().unwrap();
        assert!(name.contains(gguf.arch().unwrap()), "{name}");
    }
}

/// Data starts where the other tool put it: all norm weights of the golden models are near 1.
#[test]
fn foreign_tensor_data_is_found() {
    for arch in ARCHS {
        let gguf = golden(arch);
        let norm = gguf.tensor("output_norm.weight").unwrap();
        assert_eq!(norm.info.ty, GgmlType::F32);
        let values: &[f32] = bytemuck::cast_slice(norm.data());
        assert_eq!(values.len(), 256);
        assert!(values.iter().all(|value| (0.2..1.8).contains(value)), "{arch}: {values:?}");
    }
}

#[test]
fn every_value_type_reads_back() {
    let gguf = Gguf::parse(&sampler()).unwrap();
    for (key, value) in scalars() {
        assert_eq!(gguf.get(key), Some(value), "{key}");
    }
    assert_eq!(gguf.strings("strings").unwrap(), ["a", "", "ccc"]);
    assert_eq!(gguf.i32s("i32s").unwrap(), [1, -2, 3]);
    assert_eq!(gguf.f32s("f32s").unwrap(), [0.5]);
    assert!(gguf.array("empty").unwrap().is_empty());
    let shapes: Vec<_> = gguf.tensors().map(|t| (t.name.as_str(), t.dims(), t.n_bytes)).collect();
    assert_eq!(shapes, [("a", &[3, 2][..], 24), ("b", &[64], 68), ("c", &[1, 1, 1, 1], 2)]);
    assert!(gguf.tensors().all(|t| gguf.tensor(&t.name).unwrap().data().iter().all(|&byte| byte == 0x11)));
}

#[test]
fn integers_of_any_type_are_checked_by_value() {
    let gguf = Gguf::parse(&sampler()).unwrap();
    assert_eq!(gguf.u32("u8").unwrap(), 200);
    assert_eq!(gguf.u32("u16").unwrap(), 60000);
    assert_eq!(gguf.opt_u64("u64").unwrap(), Some(u64::MAX));
    assert_eq!(gguf.f32("f64").unwrap(), -2.5);
    for key in ["i8", "i16", "i32", "i64", "u64"] {
        let error = gguf.u32(key).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::KeyRange { .. }), "{error}");
        assert!(error.to_string().contains(&format!("{key:?}")), "{error}");
    }
}

#[test]
fn missing_and_mistyped_keys_are_named() {
    let gguf = Gguf::parse(&sampler()).unwrap();
    let message = |error: host::gguf::GgufError| error.to_string();
    assert!(message(gguf.u32("no.such").unwrap_err()).contains("\"no.such\" is missing"));
    assert!(message(gguf.u32("f32").unwrap_err()).contains("\"f32\" is f32, expected an integer"));
    assert!(message(gguf.bool("u8").unwrap_err()).contains("\"u8\" is u8, expected a boolean"));
    assert!(message(gguf.str("strings").unwrap_err()).contains("is array of string"));
    assert!(message(gguf.strings("i32s").unwrap_err()).contains("\"i32s\" is i32, expected a string"));
    assert!(message(gguf.tensor("no.weight").unwrap_err()).contains("\"no.weight\" is missing"));
    assert_eq!(gguf.opt_u32("no.such").unwrap(), None);
}

/// Token texts are bytes; a getter for text says which one is not UTF-8.
#[test]
fn strings_need_not_be_utf8() {
    let broken = [2u64.to_le_bytes().to_vec(), vec![0xc3, 0x28]].concat();
    let elements = [8u32.to_le_bytes().to_vec(), 2u64.to_le_bytes().to_vec(), string("ok"), broken].concat();
    let gguf = Gguf::parse(&[header(0, 1), pair("tokens", 9, &elements)].concat()).unwrap();
    let error = gguf.strings("tokens").unwrap_err().to_string();
    assert!(error.contains("\"tokens\": element 1 is not valid UTF-8"), "{error}");
    let values: Vec<_> = gguf.array("tokens").unwrap().iter().collect();
    assert_eq!(values, [Value::String(b"ok"), Value::String(&[0xc3, 0x28])]);
}

#[test]
fn nested_arrays_read_back() {
    let inner = |n: u8| [0u32.to_le_bytes().to_vec(), 2u64.to_le_bytes().to_vec(), vec![n, n + 1]].concat();
    let outer = [9u32.to_le_bytes().to_vec(), 2u64.to_le_bytes().to_vec(), inner(1), inner(3)].concat();
    let gguf = Gguf::parse(&[header(0, 1), pair("nested", 9, &outer)].concat()).unwrap();
    let mut numbers = Vec::new();
    for row in gguf.array("nested").unwrap().iter() {
        let Value::Array(row) = row else { panic!("{row:?}") };
        numbers.extend(row.iter().map(|value| value.int().unwrap()));
    }
    assert_eq!(numbers, [1, 2, 3, 4]);
}

/// B5: every legal alignment, with metadata that ends at every residue.
#[test]
fn b5_alignments_are_obeyed() {
    for alignment in [8, 16, 32, 64, 4096] {
        for padding in 0..64 {
            let mut writer = Writer::with_alignment(alignment);
            writer.put_str("dummy", &"x".repeat(padding));
            for name in ["a", "b", "c"] {
                writer.tensor(name, GgmlType::F32, &[4]).unwrap();
            }
            let file = writer.to_bytes([&[0x11; 16][..], &[0x22; 16], &[0x33; 16]]);
            let gguf = Gguf::parse(&file).unwrap();
            for (name, fill) in [("a", 0x11), ("b", 0x22), ("c", 0x33)] {
                let tensor = gguf.tensor(name).unwrap();
                assert_eq!(tensor.data(), [fill; 16], "alignment {alignment}, padding {padding}");
                assert!(tensor.info.offset.is_multiple_of(alignment as usize));
                assert!((tensor.data().as_ptr() as usize).is_multiple_of(8), "blocks must be aligned in memory");
            }
        }
    }
}

/// An alignment is an alignment in any integer type.
#[test]
fn b5_alignment_as_u64() {
    let mut writer = Writer::new();
    writer.put("general.alignment", Value::U64(8));
    writer.tensor("a", GgmlType::F32, &[4]).unwrap();
    let mut file = writer.layout().header;
    // The writer pads to 32; with the alignment 8 the data starts at the next multiple of 8.
    let end: usize = 24 + (8 + 17 + 4 + 8) + (8 + 1 + 4 + 8 + 4 + 8);
    file.truncate(end.next_multiple_of(8));
    file.extend([0x44; 16]);
    assert_eq!(Gguf::parse(&file).unwrap().tensor("a").unwrap().data(), [0x44; 16]);
}

/// B8: version 2 differs from 3 in nothing that is read.
#[test]
fn b8_version_2_loads_like_3() {
    let mut file = std::fs::read(golden_path("qwen3")).unwrap();
    let v3 = Gguf::parse(&file).unwrap();
    file[4] = 2;
    let v2 = Gguf::parse(&file).unwrap();
    assert!(v2.tensors().eq(v3.tensors()));
    assert!(v2.metadata().eq(v3.metadata()));
}

/// B11: the head is the embedding only where there is no other, whatever its type.
#[test]
fn b11_embeddings_are_tied_where_there_is_no_head() {
    let tied = |gguf: &Gguf| Config::from_gguf(gguf).unwrap().tied_embeddings;
    for arch in ARCHS {
        assert_eq!(tied(&golden(arch)), arch == "llama", "{arch}");
    }
    for arch in ["qwen3moe", "qwen2"] {
        let file = copy(&golden(arch), |_| true, |name| name != "output.weight", |_| (), &[]);
        assert!(tied(&Gguf::parse(&file).unwrap()), "{arch}");
    }
    // Qwen3moe's output.weight is Q6_K: make it the embedding.
    let from = golden("qwen3moe");
    let head = from.tensor("output.weight").unwrap();
    assert_eq!(head.info.ty, GgmlType::Q6K);
    let embd = [("token_embd.weight", GgmlType::Q6K, head.info.dims().to_vec(), head.data())];
    let others = |name: &str| !["output.weight", "token_embd.weight"].contains(&name);
    let without_head = Gguf::parse(&copy(&from, |_| true, others, |_| (), &embd)).unwrap();
    assert!(tied(&without_head));
    a_copied_head_changes_nothing(&without_head);
}

/// A copy of the embedding as the head gives the same logits to the last bit.
#[track_caller]
fn a_copied_head_changes_nothing(tied: &Gguf) {
    let embd = tied.tensor("token_embd.weight").unwrap();
    let head = [("output.weight", embd.info.ty, embd.info.dims().to_vec(), embd.data())];
    let gguf = Gguf::parse(&copy(tied, |_| true, |_| true, |_| (), &head)).unwrap();
    assert!(!Config::from_gguf(&gguf).unwrap().tied_embeddings);
    let without = Gguf::parse(&copy(tied, |_| true, |_| true, |_| (), &[])).unwrap();
    assert_eq!(logits(gguf), logits(without));
}

#[test]
fn b11_a_copied_head_is_the_embedding() {
    a_copied_head_changes_nothing(&golden("llama"));
}

/// B11: the real model without `output.weight`.
#[test]
fn b11_smollm2_is_tied() {
    let Some(path) = checkout::fetched("SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
    let gguf = Gguf::open(Path::new(&path)).unwrap();
    let config = Config::from_gguf(&gguf).unwrap();
    assert!(config.tied_embeddings);
    let embd = gguf.tensor("token_embd.weight").unwrap();
    assert_eq!((embd.info.ty, embd.info.dims()), (GgmlType::Q8_0, &[576, 49152][..]));
    assert_eq!(gguf.strings("tokenizer.ggml.tokens").unwrap().len(), config.n_vocab);
}
