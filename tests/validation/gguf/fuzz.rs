//! Random and mutated files: any result, but never a panic, a hang, or a large allocation.
//!
//! `ZINC_FUZZ_RUNS=1000000` sets the number of cases of each test; the default is short.

use std::time::Instant;

use host::gguf::{Array, Gguf, Value};
use host::model::config::Config;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestRunner;

use super::craft::{golden_path, header, sampler};
use super::limits::limited;

const DEFAULT_RUNS: u32 = 4000;

fn runner() -> TestRunner {
    let runs = std::env::var("ZINC_FUZZ_RUNS").map_or(DEFAULT_RUNS, |runs| runs.parse().unwrap());
    // A failing case is printed in full; files with seeds are not kept beside the sources.
    TestRunner::new(ProptestConfig { cases: runs, failure_persistence: None, ..ProptestConfig::default() })
}

/// Opens a file, and looks at everything in it if it opens.
fn exercise(file: &[u8]) {
    let start = Instant::now();
    if let Ok(gguf) = Gguf::parse(file) {
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
        }
    }
    assert!(start.elapsed().as_millis() < 1000);
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

/// Applies a change to the first `head` bytes, where header fields are.
fn apply(file: &mut Vec<u8>, head: usize, mutation: &Mutation) {
    let head = head.min(file.len());
    if head == 0 {
        return;
    }
    match mutation {
        Mutation::Byte(i, byte) => file[i.index(head)] = *byte,
        Mutation::Word(i, word) => {
            let at = i.index(head);
            let n = (file.len() - at).min(8);
            file[at..at + n].copy_from_slice(&word.to_le_bytes()[..n]);
        }
        Mutation::Cut(i) => file.truncate(i.index(head)),
        Mutation::Remove(i, n) => {
            let at = i.index(head);
            file.drain(at..(at + usize::from(*n)).min(head));
        }
        Mutation::Insert(i, bytes) => {
            let at = i.index(head);
            file.splice(at..at, bytes.iter().copied());
        }
        Mutation::Move(from, to, n) => {
            let (from, to) = (from.index(head), to.index(head));
            let n = usize::from(*n).min(head - from).min(head - to);
            file.copy_within(from..from + n, to);
        }
    }
}

/// Files to mutate, each with the length of the part that is changed: a small one with everything in it,
/// and the whole header of a golden model, which takes longer to copy.
fn seeds() -> Vec<(Vec<u8>, usize)> {
    let small = sampler();
    let golden = std::fs::read(golden_path("qwen2")).unwrap();
    let data_start = Gguf::parse(&golden).unwrap().tensors().map(|tensor| tensor.offset).min().unwrap();
    vec![(small.clone(), small.len()), (golden, data_start)]
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
        let which = prop_oneof![9 => Just(0usize), 1 => Just(1usize)];
        runner()
            .run(&(which, prop::collection::vec(mutation(), 1..6)), |(which, mutations)| {
                let (mut file, head) = seeds[which].clone();
                mutations.iter().for_each(|mutation| apply(&mut file, head, mutation));
                exercise(&file);
                Ok(())
            })
            .unwrap();
    });
}
