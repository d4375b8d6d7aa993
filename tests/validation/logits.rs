//! Whole models on the CPU against logits of another engine.

use std::path::Path;
use std::sync::Arc;

use host::backend::{Batch, PAGE_TOKENS, Span};
use host::cpu::CpuBackend;
use host::cpu::dequant::dequantize_row;
use host::gguf::Gguf;
use host::model::golden::{self, Case};
use host::model::{Executor, Limits, Session};

use crate::checkout;

/// The engine that made the files differs from itself by 8e-7 between batched and stepwise runs, and the CPU from
/// it by at most 1.3e-6.
const TOLERANCE: f64 = 1e-5;
/// Of single logits: the files have four decimals, so 5e-5 of it is rounding. It is tight enough to see where the
/// delta net's normalisation puts its epsilon, which makes 2.7e-4.
const TOP_TOLERANCE: f64 = 1.2e-4;

fn session(model: &Path, n_pages: u32, n_batch: u32) -> Session<CpuBackend> {
    let gguf = Arc::new(Gguf::open(model).expect("the golden model opens"));
    let limits = Limits { n_pages, n_slots: 2, n_batch, n_outputs: n_batch };
    Session::new(CpuBackend::new(Arc::clone(&gguf)), &gguf, limits).expect("the golden model loads")
}

fn tiny_cases() -> Vec<Case> {
    golden::read_manifest(&checkout::path("tests/data/logits")).expect("golden logits")
}

/// Index and values of the first two logits that differ in a bit.
fn first_difference(a: &[f32], b: &[f32]) -> Option<(usize, f32, f32)> {
    assert_eq!(a.len(), b.len());
    (0..a.len()).find(|i| a[*i].to_bits() != b[*i].to_bits()).map(|i| (i, a[i], b[i]))
}

#[test]
fn logits_of_every_architecture_equal_the_golden_ones() {
    let cases = tiny_cases();
    assert_eq!(cases.len(), 6);
    for case in cases {
        let mut session = session(&case.model, case.n_pages(), 64);
        let report = case.run(&mut session, usize::MAX).expect("the model runs");
        println!("{}: {:.1e} at position {}", case.name, report.worst_error, report.worst_position);
        assert_eq!(report.n_positions, 63, "{}", case.name);
        assert!(report.worst_error < TOLERANCE, "{}: {report:?}", case.name);
        assert_eq!(report.wrong_greedy, [0; 0], "{}", case.name);
    }
}

#[test]
fn a_prompt_may_come_whole_in_chunks_or_token_by_token() {
    for case in tiny_cases() {
        let mut session = session(&case.model, case.n_pages(), 64);
        let whole = case.logits(&mut session, 64).expect("the model runs");
        for chunk in [1, 7] {
            let chunked = case.logits(&mut session, chunk).expect("the model runs");
            assert_eq!(first_difference(&chunked, &whole), None, "{} in chunks of {chunk}", case.name);
        }
    }
}

/// Models with experts tell how near to another choice they were: the same in one step as in many.
#[test]
fn the_narrowest_choice_of_experts_is_told() {
    for case in tiny_cases() {
        let mut session = session(&case.model, case.n_pages(), 64);
        let has_experts = session.config().moe.is_some();
        case.logits(&mut session, 64).expect("the model runs");
        let whole = session.take_narrowest_choice();
        assert_eq!(session.take_narrowest_choice(), None, "{}: taken", case.name);
        let mut narrowest: Option<f32> = None;
        for position in 0..case.tokens.len() {
            case.step(&mut session, position).expect("the model runs");
            let step = session.take_narrowest_choice();
            assert_eq!(step.is_some(), has_experts, "{} at {position}", case.name);
            assert!(step.is_none_or(|lead| lead >= 0.0), "{} at {position}: {step:?}", case.name);
            narrowest = narrowest.map_or(step, |narrowest| step.map(|step| step.min(narrowest)));
        }
        assert_eq!(narrowest, whole, "{}", case.name);
    }
}

/// Two sequences that start and end at different times share batches, with their pages interleaved.
#[test]
fn sequences_in_one_batch_do_not_touch_each_other() {
    for case in tiny_cases() {
        let mut session = session(&case.model, 4, 16);
        let sequences: [&[u32]; 2] = [&case.tokens, &case.tokens[20..]];
        let pages = [vec![3, 1], vec![2, 0]];
        let (mut mixed, mut done) = ([vec![], vec![]], [0, 0]);
        let mut logits = Vec::new();
        for step in 0.. {
            let mut batch = Batch::default();
            for (slot, sequence) in sequences.iter().enumerate() {
                // Three or five tokens at a time, and the second sequence joins late.
                let rows = (if slot == step % 2 { 3 } else { 5 }).min(sequence.len() - done[slot]);
                if rows > 0 && (slot == 0 || step > 2) {
                    batch.tokens.extend(&sequence[done[slot]..done[slot] + rows]);
                    let start = done[slot] as u32;
                    batch.spans.push(Span { slot: slot as u32, start, rows: rows as u32, pages: pages[slot].clone() });
                }
            }
            if batch.spans.is_empty() && step > 2 {
                break;
            }
            batch.outputs = (0..batch.tokens.len() as u32).collect();
            session.forward(&batch, &mut logits).expect("the model runs");
            let mut rest = &*logits;
            for span in &batch.spans {
                let (own, after) = rest.split_at(span.rows as usize * session.config().n_vocab);
                mixed[span.slot as usize].extend_from_slice(own);
                done[span.slot as usize] += span.rows as usize;
                rest = after;
            }
        }
        for (sequence, mixed) in sequences.iter().zip(&mixed) {
            let alone = Case { tokens: sequence.to_vec(), ..case.clone() };
            let alone = alone.logits(&mut session, 64).expect("the model runs");
            assert_eq!(first_difference(mixed, &alone), None, "{}", case.name);
        }
    }
}

fn check_top(file: &str, model: &Path, chunk: usize) {
    let cases = golden::read_top(&checkout::path("tests/data").join(file), model).expect("golden file");
    assert!(!cases.is_empty());
    let n_pages = cases.iter().map(Case::n_pages).max().expect("there are cases");
    let mut session = session(model, n_pages, 128);
    for case in &cases {
        let report = case.run(&mut session, chunk).expect("the model runs");
        println!("{:?}: {:.1e} at step {}", case.name, report.worst_error, report.worst_position);
        assert!(report.worst_error < TOP_TOLERANCE, "{:?}: {report:?}", case.name);
        assert_eq!(report.wrong_greedy, [0; 0], "{:?}", case.name);
    }
}

#[test]
fn zinc_tiny_continues_its_golden_prompts() {
    check_top("zinc-tiny.json", &checkout::zinc_tiny(), usize::MAX);
}

#[test]
fn smollm2_continues_its_golden_prompts() {
    let Some(model) = checkout::fetched("SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
    check_top("smollm2.json", &model, usize::MAX);
}

/// What loading the tiny llama says after `from` in its header became `to`.
fn load_error_after(from: &[u8], to: &[u8]) -> String {
    let mut bytes = std::fs::read(checkout::path("tests/data/logits/llama-tiny.gguf")).expect("the golden model");
    let at = bytes.windows(from.len()).position(|window| window == from).expect("the header has it");
    bytes[at..at + to.len()].copy_from_slice(to);
    let gguf = Arc::new(Gguf::parse(&bytes).expect("still a GGUF file"));
    let limits = Limits { n_pages: 1, n_slots: 1, n_batch: 1, n_outputs: 1 };
    Session::new(CpuBackend::new(Arc::clone(&gguf)), &gguf, limits).err().expect("a damaged model").to_string()
}

#[test]
fn a_tensor_that_does_not_fit_is_named() {
    let missing = load_error_after(b"blk.1.attn_k.weight", b"blk.1.attn_x.weight");
    assert!(missing.contains("tensor \"blk.1.attn_k.weight\" is missing"), "{missing}");
    let key = |n_ff: u32| [&b"llama.feed_forward_length"[..], &4u32.to_le_bytes(), &n_ff.to_le_bytes()].concat();
    let misfit = load_error_after(&key(512), &key(480));
    assert_eq!(misfit, "tensor \"blk.0.ffn_gate.weight\" is [256, 512], the model needs [256, 480]");
}

fn batch(tokens: &[u32], start: usize) -> Batch {
    let rows = tokens.len() as u32;
    let span = Span { slot: 0, start: start as u32, rows, pages: vec![0] };
    Batch { tokens: tokens.to_vec(), spans: vec![span], outputs: (0..rows).collect() }
}

#[test]
fn a_checkpoint_replays_the_same_logits() {
    let case = tiny_cases().into_iter().find(|case| case.name == "qwen35moe").expect("the recurrent one");
    let mut session = session(&case.model, 1, 16);
    let (before, after) = case.tokens[..20].split_at(12);
    let (mut first, mut again) = (Vec::new(), Vec::new());
    session.forward(&batch(before, 0), &mut first).expect("run");
    session.copy_state(0, 1).expect("kept");
    session.forward(&batch(after, 12), &mut first).expect("run");
    session.forward(&batch(after, 12), &mut again).expect("run");
    assert_ne!(first_difference(&first, &again), None, "without the checkpoint the state has moved on");
    session.copy_state(1, 0).expect("restored");
    session.forward(&batch(after, 12), &mut again).expect("run");
    assert_eq!(first_difference(&first, &again), None);
}

#[test]
fn hidden_states_times_the_head_are_the_logits() {
    let case = tiny_cases().into_iter().find(|case| case.name == "llama").expect("one with a tied head");
    let mut session = session(&case.model, 1, 16);
    let (mut hidden, mut logits) = (Vec::new(), Vec::new());
    session.hidden(&batch(&case.tokens[..5], 0), &mut hidden).expect("run");
    session.forward(&batch(&case.tokens[..5], 0), &mut logits).expect("run");
    let n_embd = session.config().n_embd;
    let gguf = Gguf::open(&case.model).expect("the golden model opens");
    let head = gguf.tensor("token_embd.weight").expect("the head");
    let mut row = vec![0.0; n_embd];
    for (i, logit) in logits.iter().enumerate() {
        let (m, token) = (i / session.config().n_vocab, i % session.config().n_vocab);
        dequantize_row(head.info.ty, head.row(token), &mut row);
        let wanted: f64 = row.iter().zip(&hidden[m * n_embd..]).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
        assert!((f64::from(*logit) - wanted).abs() < 1e-4, "row {m} token {token}: {logit} instead of {wanted}");
    }
}

#[test]
fn a_cache_that_no_machine_holds_is_an_error() {
    let gguf = Arc::new(Gguf::open(&tiny_cases()[0].model).expect("the golden model opens"));
    let limits = Limits { n_pages: u32::MAX, n_slots: 1, n_batch: 8, n_outputs: 1 };
    let error = Session::new(CpuBackend::new(Arc::clone(&gguf)), &gguf, limits).err().expect("too much");
    assert!(error.to_string().starts_with("cache: out of memory: "), "{error}");
}

#[test]
fn batches_that_do_not_fit_are_refused() {
    let case = &tiny_cases()[0];
    let mut session = session(&case.model, 2, 8);
    let valid = Batch {
        tokens: vec![1, 2, 3, 4],
        spans: vec![
            Span { slot: 0, start: 0, rows: 3, pages: vec![0] },
            Span { slot: 1, start: 63, rows: 1, pages: vec![1] },
        ],
        outputs: vec![2, 3],
    };
    let mut logits = Vec::new();
    session.forward(&valid, &mut logits).expect("a valid batch");
    assert_eq!(logits.len(), 2 * session.config().n_vocab);
    let mut refused = |what: &str, change: &dyn Fn(&mut Batch)| {
        let mut batch = valid.clone();
        change(&mut batch);
        let error = session.forward(&batch, &mut logits).expect_err(what).to_string();
        assert!(error.starts_with("batch: ") && error.contains(what), "{error} instead of {what}");
    };
    refused("0 rows; 1 to 8", &|b| *b = Batch::default());
    refused("token 512 of a vocabulary of 512", &|b| b.tokens[3] = 512);
    refused("3 rows in spans, 4 tokens", &|b| b.spans[0].rows = 2);
    refused("4294967298 rows in spans", &|b| b.spans[1].rows = u32::MAX);
    refused("slot 2 of 2", &|b| b.spans[1].slot = 2);
    refused("slot 0 is written twice", &|b| b.spans[1].slot = 0);
    refused("page 0 is written twice", &|b| b.spans[1].pages = vec![0]);
    refused("page 2 of 2", &|b| b.spans[1].pages = vec![2]);
    refused("1 pages for 65 positions", &|b| b.spans[1].start = PAGE_TOKENS);
    refused("positions from", &|b| b.spans[1].start = u32::MAX);
    refused("outputs [3, 2]", &|b| b.outputs = vec![3, 2]);
    refused("outputs [4]", &|b| b.outputs = vec![4]);
    assert!(session.copy_state(0, 2).is_err());
}
