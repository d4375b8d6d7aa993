//! Files made byte by byte, and the files that other tools made.

use std::path::PathBuf;
use std::sync::Arc;

use gpu_kernels::blocks::GgmlType;
use host::backend::{Batch, Span};
use host::cpu::CpuBackend;
use host::gguf::{Gguf, Value, Writer};
use host::model::{Executor, Limits, Session};

use crate::checkout;

pub(crate) const ARCHS: [&str; 6] = ["llama", "qwen2", "qwen3", "qwen3moe", "qwen35moe", "gpt-oss"];

/// The golden model of an architecture, which our writer had no part in.
pub(crate) fn golden_path(arch: &str) -> PathBuf {
    checkout::path(&format!("tests/data/logits/{arch}-tiny.gguf"))
}

pub(crate) fn golden(arch: &str) -> Gguf {
    Gguf::open(&golden_path(arch)).unwrap()
}

/// The bits of the CPU's logits of a few tokens, at every position.
pub(super) fn logits(gguf: Gguf) -> Vec<u32> {
    let gguf = Arc::new(gguf);
    let tokens = vec![1, 5, 2, 9, 3];
    let rows = tokens.len() as u32;
    let limits = Limits { n_pages: 1, n_slots: 1, n_batch: rows, n_outputs: rows };
    let mut session = Session::new(CpuBackend::new(Arc::clone(&gguf)), &gguf, limits).unwrap();
    let spans = vec![Span { slot: 0, start: 0, rows, pages: vec![0] }];
    let mut logits = Vec::new();
    session.forward(&Batch { tokens, spans, outputs: (0..rows).collect() }, &mut logits).unwrap();
    assert!(logits.iter().any(|x| *x != 0.0));
    logits.into_iter().map(f32::to_bits).collect()
}

/// The start of a version 3 file with so many tensors and metadata pairs.
pub(super) fn header(n_tensors: u64, n_pairs: u64) -> Vec<u8> {
    let mut file = vec![0x47, 0x47, 0x55, 0x46, 3, 0, 0, 0];
    file.extend(n_tensors.to_le_bytes());
    file.extend(n_pairs.to_le_bytes());
    file
}

pub(super) fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

/// A metadata pair: key, value type, and the value's bytes.
pub(super) fn pair(key: &str, ty: u32, value: &[u8]) -> Vec<u8> {
    [string(key), ty.to_le_bytes().to_vec(), value.to_vec()].concat()
}

/// An entry of the tensor table with type F32.
pub(super) fn entry(name: &str, dims: &[u64], offset: u64) -> Vec<u8> {
    let mut bytes = string(name);
    bytes.extend((dims.len() as u32).to_le_bytes());
    dims.iter().for_each(|dim| bytes.extend(dim.to_le_bytes()));
    bytes.extend(0u32.to_le_bytes());
    bytes.extend(offset.to_le_bytes());
    bytes
}

/// A file with one F32 tensor `t` in its table, and `data` after the padding.
pub(super) fn one_tensor(dims: &[u64], offset: u64, data: &[u8]) -> Vec<u8> {
    let mut file = [header(1, 0), entry("t", dims, offset)].concat();
    if !data.is_empty() {
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend(data);
    }
    file
}

/// A valid file with a value of every type and tensors of several; about 1 KiB.
pub(super) fn sampler() -> Vec<u8> {
    let mut writer = Writer::new();
    writer.put_str("general.architecture", "qwen2");
    for (key, value) in scalars() {
        writer.put(key, value);
    }
    writer.put_strings("strings", &["a", "", "ccc"]);
    writer.put_i32s("i32s", &[1, -2, 3]);
    writer.put_f32s("f32s", &[0.5]);
    writer.put_strings("empty", &[] as &[&str]);
    let tensors = [("a", GgmlType::F32, vec![3, 2]), ("b", GgmlType::Q8_0, vec![64]), ("c", GgmlType::F16, vec![1; 4])];
    let sizes: Vec<usize> = tensors.iter().map(|(name, ty, dims)| writer.tensor(name, *ty, dims).unwrap()).collect();
    let data: Vec<Vec<u8>> = sizes.into_iter().map(|n| vec![0x11; n]).collect();
    writer.to_bytes(data.iter().map(Vec::as_slice))
}

/// A value of each type that is not a string or an array.
pub(super) fn scalars() -> [(&'static str, Value<'static>); 11] {
    [
        ("u8", Value::U8(200)),
        ("i8", Value::I8(-100)),
        ("u16", Value::U16(60000)),
        ("i16", Value::I16(-30000)),
        ("u32", Value::U32(4_000_000_000)),
        ("i32", Value::I32(-2_000_000_000)),
        ("f32", Value::F32(1.5)),
        ("bool", Value::Bool(true)),
        ("u64", Value::U64(u64::MAX)),
        ("i64", Value::I64(i64::MIN)),
        ("f64", Value::F64(-2.5)),
    ]
}

/// Copies a model: its metadata with `change` applied to the writer afterwards, and the tensors that
/// `keep` keeps, then `extra` ones.
pub(crate) fn copy(
    from: &Gguf,
    keep_key: impl Fn(&str) -> bool,
    keep: impl Fn(&str) -> bool,
    change: impl FnOnce(&mut Writer),
    extra: &[(&str, GgmlType, Vec<usize>, &[u8])],
) -> Vec<u8> {
    let mut writer = Writer::new();
    from.metadata().filter(|(key, _)| keep_key(key)).for_each(|(key, value)| writer.put(key, value));
    change(&mut writer);
    let mut data = Vec::new();
    for info in from.tensors().filter(|info| keep(&info.name)) {
        writer.tensor(&info.name, info.ty, info.dims()).unwrap();
        data.push(from.tensor(&info.name).unwrap().data());
    }
    for (name, ty, dims, bytes) in extra {
        writer.tensor(name, *ty, dims).unwrap();
        data.push(bytes);
    }
    writer.to_bytes(data)
}

/// The message with which a file is refused.
pub(super) fn refusal(file: &[u8]) -> String {
    let message = Gguf::parse(file).expect_err("the file must be refused").to_string();
    assert!(!message.contains('\n'), "one line: {message}");
    message
}

/// Asserts that a file is refused with a message that has all these parts.
#[track_caller]
pub(super) fn assert_refused(file: &[u8], parts: &[&str]) {
    let message = refusal(file);
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}
