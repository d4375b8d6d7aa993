//! What `host inspect` prints.

use gpu_kernels::blocks::GgmlType;
use host::cli::inspect::{inspect, inspect_tensor};
use host::gguf::{Gguf, Value, Writer};

use super::craft::golden;
use crate::checkout;

fn printed(gguf: &Gguf) -> String {
    let mut out = Vec::new();
    inspect(gguf, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

/// Asserts that some line has all these words in this order.
#[track_caller]
fn assert_line(text: &str, words: &[&str]) {
    let has_all = |line: &&str| {
        let mut rest = *line;
        words.iter().all(|word| {
            let found = rest.find(word);
            rest = found.map_or("", |at| &rest[at + word.len()..]);
            found.is_some()
        })
    };
    assert!(text.lines().any(|line| has_all(&line)), "no line with {words:?} in:\n{text}");
}

#[test]
fn metadata_tensors_and_plan() {
    let text = printed(&Gguf::open(&checkout::zinc_tiny()).unwrap());
    assert_line(&text, &["14.18 MiB, 37 keys, 169 tensors"]);
    assert_line(&text, &["general.architecture = \"qwen35moe\""]);
    assert_line(&text, &["tokenizer.ggml.tokens = [\"!\", ", "…] (4096 of string)"]);
    assert_line(&text, &["token_embd.weight", "Q4_K", "[256, 4096]", "589824"]);
    assert_line(&text, &["Q4_K", "19 tensors", "10485760 elements", "5898240 bytes"]);
    // Two attention layers with keys and values of 2 heads of 64; six states of 4 × 64 × 64 and 8 × 512.
    assert_line(&text, &["KV cache, 1000 tokens", "0.98 MiB as F16, 1.95 MiB as F32"]);
    assert_line(&text, &["state, each sequence", "0.47 MiB as F32"]);
}

/// Names and texts of a hostile file do not steer the terminal, and do not flood it.
#[test]
fn control_characters_and_long_texts() {
    let mut writer = Writer::new();
    writer.put_str("clear\u{1b}[2J", "\u{1b}]0;title\u{7}\nnew line");
    writer.put_str("long", &"é".repeat(100_000));
    writer.put("broken", Value::String(&[0xff, b'x']));
    writer.tensor("t\u{1b}[31m", GgmlType::F32, &[1]).unwrap();
    let text = printed(&Gguf::parse(&writer.to_bytes([&[0; 4][..]])).unwrap());
    assert!(!text.contains(['\u{1b}', '\u{7}']), "{text:?}");
    assert!(text.len() < 2000, "{} bytes", text.len());
    assert_line(&text, &["long = \"éé", "… (200000 bytes)"]);
    assert_line(&text, &["broken = \"\u{fffd}x\""]);
    assert_line(&text, &["not a model that zinc can run", "general.architecture"]);
}

#[test]
fn first_values_of_a_tensor() {
    let gguf = golden("llama");
    let show = |name: &str, n: usize| {
        let mut out = Vec::new();
        inspect_tensor(gguf.tensor(name).unwrap(), n, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    };
    let text = show("output_norm.weight", 10);
    let numbers: Vec<f32> = text
        .lines()
        .skip(1)
        .flat_map(|line| line.split_once(':').unwrap().1.split_whitespace())
        .map(|word| word.parse().unwrap())
        .collect();
    let stored: &[f32] = bytemuck::cast_slice(gguf.tensor("output_norm.weight").unwrap().data());
    assert_eq!(numbers.len(), 10);
    assert!(numbers.iter().zip(stored).all(|(shown, value)| (shown - value).abs() < 1e-6), "{numbers:?}");
    assert_eq!(show("output_norm.weight", 0).lines().count(), 1);
    // All 131072 values, over rows and pieces: the last line starts at the last eight.
    let last = show("token_embd.weight", usize::MAX).lines().last().unwrap().to_owned();
    assert!(last.trim_start().starts_with("131064:"), "{last}");
}
