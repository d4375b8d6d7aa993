//! Guessed tokens: the same replies, in fewer steps.

use std::collections::HashMap;

use host::engine::mock::Script;
use host::engine::{DeviceChoice, Engine, EngineError, EngineOptions, Request, RequestId, Sampling};
use host::tokenizer::Encode;

use super::{Reply, SIZES, Sizes, assert_released, complete, drain, engine, prompt, request, solo};
use crate::checkout;

#[test]
fn guesses_change_no_token_and_save_steps() {
    for (recurrent, reuse) in [(true, true), (true, false)] {
        for n_draft in 1..4 {
            let sizes = Sizes { recurrent, reuse, n_draft, ..SIZES };
            let (mut engine, log) = engine(sizes, Script::default());
            let reply = complete(&mut engine, request(prompt(100, 3), 150));
            assert_eq!(reply.ids, solo(sizes, &prompt(100, 3), 150), "{sizes:?}");
            let n_steps = log.lock().expect("the log").batches.len();
            let stats = engine.stats();
            assert!(n_steps < 130, "{n_steps} steps for 150 tokens with {n_draft} guesses");
            assert!(0 < stats.accepted_tokens && stats.accepted_tokens < stats.drafted_tokens, "{stats:?}");
            // What is kept for reuse is right: pages, and the states at their borders.
            let mut chat = prompt(100, 3);
            chat.extend(&reply.ids);
            chat.push(9);
            let more = complete(&mut engine, request(chat.clone(), 30));
            assert_eq!(more.cached, if reuse { 192 } else { 0 }, "{sizes:?}");
            assert_eq!(more.ids, solo(sizes, &chat, 30), "{sizes:?}");
            assert_released(&engine);
        }
    }
}

#[test]
fn guesses_never_pass_the_limits() {
    for n_draft in [1, 3] {
        for n in 1..12 {
            let sizes = Sizes { n_draft, n_ctx: 64, n_pages: 2, n_slots: 2, ..SIZES };
            let (mut engine, _) = engine(sizes, Script::default());
            let mut replies = HashMap::new();
            let ids: Vec<RequestId> = [(53, Some(n)), (64 - n as usize, None)]
                .into_iter()
                .map(|(n_prompt, max_tokens)| {
                    let request = Request { prompt: prompt(n_prompt, 1), max_tokens, ..Request::default() };
                    engine.submit(request).expect("a good request")
                })
                .collect();
            drain(&mut engine, &mut replies);
            assert_eq!(replies[&ids[0]].ids, solo(sizes, &prompt(53, 1), n as usize));
            assert_eq!(replies[&ids[1]].ids, solo(sizes, &prompt(64 - n as usize, 1), n as usize));
            assert_released(&engine);
        }
    }
}

/// A passage in the style of what the model was trained on.
const VERSES: &str = "Ge1:1 In the beginning God created the heaven and the earth.\nGe1:2 And the earth was";
const RUST: &str = "/// Returns the number of elements in the";

fn open(device: DeviceChoice, n_draft: u32) -> Engine {
    let path = checkout::zinc_tiny();
    let options = EngineOptions { device, n_draft, n_ctx: Some(256), n_slots: 2, ..EngineOptions::default() };
    Engine::open(&path, &options).expect("the model loads")
}

fn replies(engine: &mut Engine, n: u32) -> Vec<Reply> {
    let hot = Sampling { temperature: 0.6, top_k: 20, seed: Some(3), ..Sampling::default() };
    let tokenizer = engine.tokenizer().expect("a vocabulary").clone();
    let ids = [(VERSES, Sampling::default()), (RUST, Sampling::default()), (VERSES, hot)].map(|(text, sampling)| {
        let prompt = tokenizer.encode(text, Encode { bos: true, special: false });
        let request = Request { prompt, max_tokens: Some(n), ignore_eos: true, sampling, ..Request::default() };
        engine.submit(request).expect("a good request")
    });
    let mut replies = HashMap::new();
    drain(engine, &mut replies);
    assert_released(engine);
    ids.map(|id| replies.remove(&id).expect("a reply")).into()
}

/// The share of guesses that were right, after a look at the replies. On the CPU a row's bits do not depend on how many
/// rows there are, and so neither do the tokens; a GPU's products of one row and of several round differently.
fn acceptance(device: &DeviceChoice, n_draft: u32, n: u32) -> f64 {
    let mut drafting = open(device.clone(), n_draft);
    let with = replies(&mut drafting, n);
    let without = replies(&mut open(device.clone(), 0), n);
    for (with, without) in with.iter().zip(&without) {
        assert_eq!((with.ids.len(), without.ids.len()), (n as usize, n as usize), "{n_draft} guesses");
        assert!(*device != DeviceChoice::Cpu || with.ids == without.ids, "{n_draft} guesses");
    }
    let stats = drafting.stats();
    let share = stats.accepted_tokens as f64 / stats.drafted_tokens as f64;
    println!("{device}, {n_draft} guesses: {} of {} right", stats.accepted_tokens, stats.drafted_tokens);
    share
}

#[test]
fn the_trained_block_guesses_well_on_the_cpu() {
    let share = acceptance(&DeviceChoice::Cpu, 1, 120);
    assert!(share > 0.6, "{share} of the guesses are right");
    // The block learnt to guess one token; further guesses are from guesses, and worse.
    let share = acceptance(&DeviceChoice::Cpu, 3, 60);
    assert!(share > 0.25, "{share} of the guesses are right");
}

/// The same block, kernel by kernel: a few tokens, and the guesses of the CPU.
#[test]
fn the_emulated_gpu_guesses_what_the_cpu_guesses() {
    let run = |device| {
        let mut engine = open(device, 2);
        let tokenizer = engine.tokenizer().expect("a vocabulary").clone();
        let prompt = tokenizer.encode("Ge1:1 In the", Encode { bos: true, special: false });
        let reply = complete(&mut engine, Request { ignore_eos: true, ..request(prompt, 6) });
        let stats = engine.stats();
        (reply.ids, stats.drafted_tokens, stats.accepted_tokens)
    };
    let on_cpu = run(DeviceChoice::Cpu);
    assert!(on_cpu.1 > 0 && on_cpu.2 > 0, "{on_cpu:?}");
    assert_eq!(run(DeviceChoice::Emulated), on_cpu);
}

#[test]
fn the_trained_block_guesses_well_on_the_gpu() {
    if std::env::var_os("ZINC_GPU").is_some_and(|value| value == "1") {
        let share = acceptance(&DeviceChoice::Cuda(None), 1, 120);
        assert!(share > 0.6, "{share} of the guesses are right");
    } else {
        println!("skipped: ZINC_GPU is not 1");
    }
}

#[test]
fn a_model_without_the_block_says_so() {
    let path = checkout::path("tests/data/logits/llama-tiny.gguf");
    let options = EngineOptions { device: DeviceChoice::Cpu, n_draft: 1, ..EngineOptions::default() };
    let refused = Engine::open(&path, &options).err().expect("it cannot guess");
    assert!(matches!(refused, EngineError::Option { option: "draft", .. }), "{refused}");
    let many = EngineOptions { n_draft: u32::MAX, ..options };
    assert!(matches!(Engine::open(&path, &many), Err(EngineError::Option { option: "draft", .. })));
}
