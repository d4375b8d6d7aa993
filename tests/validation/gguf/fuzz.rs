//! Random and mutated files: any result, but never a panic, a hang, or a large allocation.
//!
//! `ZINC_FUZZ_RUNS=1000000` sets the number of cases of each test; the default is short.

use std::cell::Cell;
use std::time::Instant;

use gpu_kernels::blocks::GgmlType;
use host::gguf::{Array, Gguf, Value};
use host::model::config::Config;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestRunner;

use super::craft::{copy, golden, header, sampler};
use super::limits::limited;

const DEFAULT_RUNS: u32 = 4000;

fn runner() -> TestRunner {
    let runs = std::env::var("ZINC_FUZZ_RUNS").map_or(DEFAULT_RUNS, |runs| runs.parse().unwrap());
    // A failing case is printed in full; files with seeds are not kept beside the sources.
    TestRunner::new(ProptestConfig { cases: runs, failure_persistence: None, ..ProptestConfig::default() })
}

/// Opens a file, and looks at everything in it if it opens. Returns whether it opened, and had a config.
fn exercise(file: &[u8]) -> (bool, bool) {
    let start = Instant::now();
    let (mut opened, mut has_config) = (false, false);
    if let Ok(gguf) = Gguf::parse(file) {
        opened = true;
        let mut n_values = 0;
        for (key, value) in gguf.metadata() {
            n_values += count(value);
            let _ = (gguf.opt_u32(key), gguf.opt_f32(key), gguf.opt_str(key), gguf.strings(key), gguf.i32s(key));
        }
        assert!(n_values <= file.len(), "every value takes a byte");
        for info in gguf.tensors() {
            let tensor = gguf.tensor(&info.name).unwrap();
            assert_eq!(tensor.data().len(), tensor.rows() * tensor.row_bytes());
            assert!(tensor.data().len() <= file.len());
        }
        if let Ok(config) = Config::from_gguf(&gguf) {
            assert!(config.n_head.is_multiple_of(config.n_head_kv) && config.layers.len() == config.n_layer);
            let _ = (config.kv_elems_per_token(), config.state_elems_per_sequence());
            has_config = true;
        }
    }
    assert!(start.elapsed().as_millis() < 1000);
    (opened, has_config)
}

/// Values in a value, itself included.
fn count(value: Value<'_>) -> usize {
    let inside = |array: Array<'_>| array.iter().map(count).sum::<usize>();
    match value {
        Value::Array(array) => 1 + inside(array),
        _ => 1,
    }
}

/// One change to a file.
#[derive(Clone, Debug)]
enum Mutation {
    Byte(Index, u8),
    /// A number that breaks careless arithmetic.
    Word(Index, u64),
    Cut(Index),
    Remove(Index, u8),
    Insert(Index, Vec<u8>),
    /// Copies a piece over another place.
    Move(Index, Index, u8),
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let at = any::<Index>;
    let word = prop_oneof![
        any::<u64>(),
        (0..64u32, -2..=2i64).prop_map(|(bit, near)| (1u64 << bit).wrapping_add_signed(near)),
        0..300u64,
    ];
    prop_oneof![
        (at(), any::<u8>()).prop_map(|(i, byte)| Mutation::Byte(i, byte)),
        (at(), word).prop_map(|(i, word)| Mutation::Word(i, word)),
        at().prop_map(Mutation::Cut),
        (at(), any::<u8>()).prop_map(|(i, n)| Mutation::Remove(i, n)),
        (at(), prop::collection::vec(any::<u8>(), 1..16)).prop_map(|(i, bytes)| Mutation::Insert(i, bytes)),
        (at(), at(), any::<u8>()).prop_map(|(from, to, n)| Mutation::Move(from, to, n)),
    ]
}

fn apply(file: &mut Vec<u8>, mutation: &Mutation) {
    let len = file.len();
    if len == 0 {
        return;
    }
    match mutation {
        Mutation::Byte(i, byte) => file[i.index(len)] = *byte,
        Mutation::Word(i, word) => {
            let at = i.index(len);
            let n = (file.len() - at).min(8);
            file[at..at + n].copy_from_slice(&word.to_le_bytes()[..n]);
        }
        Mutation::Cut(i) => file.truncate(i.index(len)),
        Mutation::Remove(i, n) => {
            let at = i.index(len);
            file.drain(at..(at + usize::from(*n)).min(len));
        }
        Mutation::Insert(i, bytes) => {
            let at = i.index(len);
            file.splice(at..at, bytes.iter().copied());
        }
        Mutation::Move(from, to, n) => {
            let (from, to) = (from.index(len), to.index(len));
            let n = usize::from(*n).min(len - from).min(len - to);
            file.copy_within(from..from + n, to);
        }
    }
}

/// Files to mutate: one with a value of every type, and the metadata of two golden models with an embedding
/// of four rows, which is all that a config needs.
fn seeds() -> Vec<Vec<u8>> {
    let embd = [("token_embd.weight", GgmlType::Q4K, vec![256, 4], &[0; 4 * 144][..])];
    let model = |arch| copy(&golden(arch), |_| true, |_| false, |_| (), &embd);
    vec![sampler(), model("qwen35moe"), model("gpt-oss")]
}

#[test]
fn random_bytes_never_crash() {
    limited("gguf::fuzz::random_bytes_never_crash", || {
        let bytes = prop::collection::vec(any::<u8>(), 0..256);
        let counts = (0..4u64, 0..4u64);
        runner()
            .run(&(bytes, counts), |(bytes, (n_tensors, n_pairs))| {
                exercise(&bytes);
                // Past the magic, where there is more to get wrong.
                exercise(&[header(n_tensors, n_pairs), bytes].concat());
                Ok(())
            })
            .unwrap();
    });
}

#[test]
fn mutated_files_never_crash() {
    limited("gguf::fuzz::mutated_files_never_crash", || {
        let seeds = seeds();
        let (n_cases, n_opened, n_configs) = (Cell::new(0), Cell::new(0), Cell::new(0));
        runner()
            .run(&(0..seeds.len(), prop::collection::vec(mutation(), 1..6)), |(which, mutations)| {
                let mut file = seeds[which].clone();
                mutations.iter().for_each(|mutation| apply(&mut file, mutation));
                let (opened, config) = exercise(&file);
                n_cases.set(n_cases.get() + 1);
                n_opened.set(n_opened.get() + u32::from(opened));
                n_configs.set(n_configs.get() + u32::from(config));
                Ok(())
            })
            .unwrap();
        // Not all in vain: some files survive, so that what comes after opening is tested too.
        let (n_cases, n_opened, n_configs) = (n_cases.get(), n_opened.get(), n_configs.get());
        println!("{n_cases} files, {n_opened} opened, {n_configs} with a config");
        assert!(n_opened > n_cases / 50 && n_configs > n_cases / 500);
    });
}
