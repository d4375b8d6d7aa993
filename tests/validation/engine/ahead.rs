//! A step ahead of the host: the same replies as without, and nothing left over.

use std::collections::HashMap;

use host::engine::mock::Script;
use host::engine::{DeviceChoice, Engine, EngineOptions, Event, FinishReason, Request, RequestId, Sampling, StopCause};

use super::{Reply, SIZES, Sizes, assert_released, collect, complete, drain, engine, prompt, request, solo, text};
use crate::checkout;

const AHEAD: Sizes = Sizes { chooses: true, ..SIZES };

fn hot(seed: u64) -> Sampling {
    Sampling { temperature: 0.7, top_k: 40, top_p: 0.9, min_p: 0.01, seed: Some(seed), ..Sampling::default() }
}

/// A request of every kind: greedy, drawn, and some that need the host between their tokens.
fn any_request(i: u32) -> Request {
    let base = request(prompt(1 + 23 * (i as usize % 7), i), 1 + 13 * (i % 6));
    match i % 5 {
        0 | 1 => base,
        2 | 3 => Request { sampling: hot(u64::from(i)), ..base },
        _ if i.is_multiple_of(2) => Request { logprobs: Some(1), sampling: hot(u64::from(i)), ..base },
        _ => Request { sampling: Sampling { frequency_penalty: 0.5, ..Sampling::default() }, ..base },
    }
}

#[test]
fn replies_are_those_of_a_host_that_waits() {
    for recurrent in [false, true] {
        let (mut ahead, log) = engine(Sizes { recurrent, ..AHEAD }, Script::default());
        let mut replies = HashMap::new();
        let ids: Vec<RequestId> = (0..30)
            .map(|i| {
                let id = ahead.submit(any_request(i)).expect("a good request");
                (0..i % 4).for_each(|_| collect(ahead.step(), &mut replies));
                id
            })
            .collect();
        drain(&mut ahead, &mut replies);
        assert_released(&ahead);
        assert!(log.lock().expect("the log").fed > 20, "it was ahead");
        for (i, id) in (0..).zip(ids) {
            let (mut waiting, _) = engine(Sizes { recurrent, reuse: false, ..SIZES }, Script::default());
            let want = complete(&mut waiting, any_request(i));
            assert_eq!((&replies[&id].ids, &replies[&id].reason), (&want.ids, &want.reason), "request {i}");
        }
    }
}

/// The rows of all batches, and how many of the batches were fed.
fn rows(sizes: Sizes, n_prompt: usize, n_reply: u32) -> (u32, usize) {
    let (mut engine, log) = engine(sizes, Script::default());
    let reply = complete(&mut engine, request(prompt(n_prompt, 1), n_reply));
    assert_eq!(reply.ids, solo(sizes, &prompt(n_prompt, 1), n_reply as usize));
    let log = log.lock().expect("the log");
    (log.batches.iter().flatten().sum(), log.fed)
}

#[test]
fn a_step_ahead_is_taken_where_it_can_be_and_never_past_the_last_token() {
    for n_reply in [1, 2, 3, 40] {
        // The last token is not computed, and every step but the first is fed.
        let attention = Sizes { recurrent: false, ..AHEAD };
        assert_eq!(rows(attention, 60, n_reply), (60 + n_reply - 1, n_reply as usize - 1));
        // Nobody is ahead of a page border whose state may be kept: the step after position 63 waits.
        let borders = usize::from(n_reply > 4);
        assert_eq!(rows(AHEAD, 60, n_reply), (60 + n_reply - 1, n_reply as usize - 1 - borders));
        assert_eq!(rows(Sizes { reuse: false, ..AHEAD }, 60, n_reply).1, n_reply as usize - 1);
        assert_eq!(rows(SIZES, 60, n_reply).1, 0);
    }
}

#[test]
fn an_end_seen_late_is_an_end_at_every_position() {
    let mut model = text::model();
    let eos = model.tokenizer.eos().expect("an EOS token");
    let words = model.ids(&["one two three four five six seven eight nine ten"]);
    for n in 0..90 {
        let mut ids: Vec<u32> = words.iter().copied().cycle().take(n).collect();
        ids.push(eos);
        ids.extend(&words);
        let mut run = |chooses, stop: &str| {
            model.chooses = chooses;
            let stop = vec![stop.to_owned()];
            model.reply(&ids, Request { stop, max_tokens: Some(120), ..Request::default() })
        };
        let (text, reason, usage) = run(true, "");
        assert_eq!(reason, FinishReason::Stop(StopCause::EndOfGeneration(eos)), "after {n}");
        assert_eq!(usage.completion_tokens, n as u32 + 1);
        assert_eq!((text, reason, usage), run(false, ""), "after {n}");
        assert_eq!(run(true, "two thr"), run(false, "two thr"), "after {n}");
    }
}

/// Ends replies of one slot at every position, by the limit and by cancelling, with a neighbour that goes on, and
/// begins others with the same beginning in its place: the mock notices a wrong page or state.
#[test]
fn whoever_comes_next_finds_pages_and_state_in_order() {
    for (recurrent, reuse) in [(false, true), (true, true), (true, false)] {
        let sizes = Sizes { recurrent, reuse, n_slots: 2, n_pages: 12, n_ctx: 256, ..AHEAD };
        let (mut engine, _) = engine(sizes, Script::default());
        let mut replies: HashMap<RequestId, Reply> = HashMap::new();
        let mut neighbour = engine.submit(request(prompt(3, 9), 200)).expect("a good request");
        for n in 1..90 {
            let prompt = prompt(50, n % 3);
            let victim = engine.submit(request(prompt.clone(), 150)).expect("a good request");
            for _ in 0..n {
                collect(engine.step(), &mut replies);
            }
            engine.cancel(victim);
            collect(engine.step(), &mut replies);
            let got = &replies[&victim].ids;
            assert_eq!(*got, solo(sizes, &prompt, got.len()), "cancelled after {n} steps, {sizes:?}");
            let mut again = prompt;
            again.extend(got);
            again.push(7);
            let id = engine.submit(request(again.clone(), n % 5 + 1)).expect("a good request");
            while replies.get(&id).is_none_or(|r| r.reason.is_none()) {
                collect(engine.step(), &mut replies);
            }
            assert_eq!(replies[&id].ids, solo(sizes, &again, n as usize % 5 + 1), "after {n}, {sizes:?}");
            if replies[&neighbour].reason.is_some() {
                neighbour = engine.submit(request(self::prompt(3, 9), 200)).expect("a good request");
            }
        }
        drain(&mut engine, &mut replies);
        assert_eq!(replies[&neighbour].ids, solo(sizes, &self::prompt(3, 9), 200));
        assert_released(&engine);
    }
}

/// The replies to a prompt whose reply has a token that makes the batch fail, and to its neighbour.
fn failing(chooses: bool, script: &Script) -> Vec<Reply> {
    let replies_to = (vec![1, 2], vec![5, 6, 201, 8, 9]);
    let script = Script { replies: vec![replies_to], never: Some(201), ..script.clone() };
    let (mut engine, _) = engine(Sizes { chooses, ..SIZES }, script);
    let ids = [engine.submit(request(vec![1, 2], 9)), engine.submit(request(vec![3], 9))];
    let mut replies = HashMap::new();
    drain(&mut engine, &mut replies);
    assert_released(&engine);
    let after = complete(&mut engine, request(vec![4, 4], 6));
    let mut all: Vec<Reply> = ids.map(|id| replies.remove(&id.expect("a good request")).expect("a reply")).into();
    all.push(after);
    all
}

#[test]
fn failures_reach_the_same_requests_after_the_same_tokens() {
    let memory = Script { fail_on: Some(201), ..Script::default() };
    let broken = Script { nan_after: Some(201), ..Script::default() };
    let late = Script { fail_late_on: Some(201), ..Script::default() };
    for (script, fails) in [(memory, [true, true]), (broken, [true, false]), (late, [true, true])] {
        let ahead = failing(true, &script);
        for (reply, fails) in ahead.iter().zip(fails) {
            assert_eq!(matches!(reply.reason, Some(FinishReason::Error(_))), fails, "{reply:?}");
            assert_eq!(reply.ids.len(), if fails { 3 } else { 9 }, "{reply:?}");
        }
        assert_eq!(ahead[0].ids, [5, 6, 201]);
        if script.fail_late_on.is_none() {
            let waiting = failing(false, &script);
            for (ahead, waiting) in ahead.iter().zip(&waiting) {
                assert_eq!((&ahead.ids, ahead.usage), (&waiting.ids, waiting.usage));
            }
        }
        assert_eq!((ahead[2].ids.len(), &ahead[2].reason), (6, &Some(FinishReason::Length)));
    }
}

#[test]
fn a_newcomer_waits_for_no_more_than_the_step_under_way() {
    let (mut engine, log) = engine(AHEAD, Script::default());
    engine.submit(request(prompt(10, 0), 100)).expect("a good request");
    (0..9).for_each(|_| drop(engine.step()));
    let before = log.lock().expect("the log").batches.len();
    let newcomer = engine.submit(request(prompt(10, 1), 5)).expect("a good request");
    let said = |events: Vec<Event>| events.iter().any(|e| matches!(e, Event::Text { id, .. } if *id == newcomer));
    assert!(!said(engine.step()), "the step under way is without it");
    assert!(said(engine.step()), "the next is not");
    let batches = &log.lock().expect("the log").batches;
    // The step that was ahead is in `before`; then one with both, and the next ahead of that.
    assert_eq!(batches[before..], [vec![1, 10], vec![1, 1]]);
}

/// Greedy and drawn replies of a small model: chosen on the device, and by the host from its logits.
fn device_and_host_agree(device: &DeviceChoice, file: &str, n: u32) {
    let path = checkout::path("tests/data/logits").join(file);
    let options =
        EngineOptions { device: device.clone(), n_ctx: Some(128), n_slots: 2, n_batch: 8, ..EngineOptions::default() };
    let run = |logprobs: Option<u8>| {
        let mut engine = Engine::open(&path, &options).expect("the model loads");
        let request = |salt, sampling| Request { logprobs, sampling, ignore_eos: true, ..request(prompt(4, salt), n) };
        let ids = [Sampling::default(), hot(5)].map(|s| engine.submit(request(2, s)).expect("a good request"));
        let mut replies = HashMap::new();
        drain(&mut engine, &mut replies);
        assert_released(&engine);
        ids.map(|id| replies[&id].ids.clone())
    };
    let on_device = run(None);
    assert!(on_device.iter().all(|ids| ids.len() == n as usize));
    assert_eq!(on_device, run(Some(0)), "{file} on {device}");
}

#[test]
fn the_emulated_gpu_a_step_ahead_says_what_its_logits_say() {
    device_and_host_agree(&DeviceChoice::Emulated, "qwen35moe-tiny.gguf", 4);
    device_and_host_agree(&DeviceChoice::Emulated, "llama-tiny.gguf", 4);
}

#[test]
fn the_cpu_says_the_same_whether_logits_are_asked_for_or_not() {
    device_and_host_agree(&DeviceChoice::Cpu, "qwen35moe-tiny.gguf", 70);
}

#[test]
fn the_gpu_a_step_ahead_says_what_its_logits_say() {
    if std::env::var_os("ZINC_GPU").is_some_and(|value| value == "1") {
        for file in ["qwen35moe-tiny.gguf", "llama-tiny.gguf"] {
            device_and_host_agree(&DeviceChoice::Cuda(None), file, 70);
        }
    } else {
        println!("skipped: ZINC_GPU is not 1");
    }
}
