//! The engine over a model without weights: scheduling, memory, cancellation, prefix reuse.

mod ahead;
mod draft;
mod model;
mod random;
mod text;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use host::engine::mock::{Log, Mock, Script};
use host::engine::{
    Engine, EngineOptions, Event, FinishReason, Request, RequestId, Sampling, StopCause, SubmitError, Usage,
};
use host::gguf::Gguf;
use host::model::config::Config;
use host::model::executor::Limits;

use crate::checkout;

/// The shape of a model with delta-net layers, or of one without.
fn config(recurrent: bool) -> Config {
    let file = if recurrent { "qwen35moe-tiny" } else { "llama-tiny" };
    let path = checkout::path(&format!("tests/data/logits/{file}.gguf"));
    let config = Config::from_gguf(&Gguf::open(&path).expect("a model")).expect("its shape");
    assert_eq!(config.state_elems_per_sequence() > 0, recurrent);
    config
}

/// Sizes of an engine under test.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    recurrent: bool,
    n_ctx: u32,
    n_slots: u32,
    n_batch: u32,
    n_pages: u32,
    n_checkpoints: u32,
    n_queue: usize,
    reuse: bool,
    /// Whether the mock chooses tokens, and so may be a step ahead.
    chooses: bool,
    /// Tokens that the mock guesses.
    n_draft: u32,
}

const SIZES: Sizes = Sizes {
    recurrent: true,
    n_ctx: 512,
    n_slots: 4,
    n_batch: 96,
    n_pages: 64,
    n_checkpoints: 4,
    n_queue: 100,
    reuse: true,
    chooses: false,
    n_draft: 0,
};

fn engine(sizes: Sizes, script: Script) -> (Engine, Arc<Mutex<Log>>) {
    let limits = Limits {
        n_pages: sizes.n_pages,
        n_slots: if sizes.n_draft > 0 { 2 * sizes.n_slots } else { sizes.n_slots } + sizes.n_checkpoints,
        n_batch: sizes.n_batch,
        n_outputs: sizes.n_slots * (1 + sizes.n_draft),
    };
    let script = Script { chooses: sizes.chooses, ..script };
    let mock = Mock::new(config(sizes.recurrent), limits, script);
    let log = mock.log();
    let options = EngineOptions {
        n_ctx: Some(sizes.n_ctx),
        n_slots: sizes.n_slots,
        n_batch: sizes.n_batch,
        n_queue: sizes.n_queue,
        n_draft: sizes.n_draft,
        prefix_reuse: sizes.reuse,
        ..EngineOptions::default()
    };
    (Engine::new(Box::new(mock), None, None, &options).expect("an engine"), log)
}

/// `n` token ids that differ with `salt`.
fn prompt(n: usize, salt: u32) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 7 + salt * 31) % 200).collect()
}

fn request(prompt: Vec<u32>, max_tokens: u32) -> Request {
    Request { prompt, max_tokens: Some(max_tokens), ..Request::default() }
}

/// What became of a request.
#[derive(Debug, Default, Clone, PartialEq)]
struct Reply {
    ids: Vec<u32>,
    reason: Option<FinishReason>,
    usage: Usage,
    cached: u32,
    embedding: Option<Vec<f32>>,
}

/// Steps until the engine is idle, with a bound on the number of steps.
fn drain(engine: &mut Engine, replies: &mut HashMap<RequestId, Reply>) {
    for _ in 0..10_000 {
        if engine.is_idle() {
            return;
        }
        collect(engine.step(), replies);
    }
    panic!("the engine does not come to rest");
}

fn collect(events: Vec<Event>, replies: &mut HashMap<RequestId, Reply>) {
    for event in events {
        let reply = replies.entry(event.id()).or_default();
        assert_eq!(reply.reason, None, "an event after the last one");
        match event {
            Event::Started { cached_tokens, .. } => reply.cached = cached_tokens,
            Event::Text { tokens, .. } => reply.ids.extend(tokens.iter().map(|t| t.id)),
            Event::Embedding { embedding, .. } => reply.embedding = Some(embedding),
            Event::Finished { reason, usage, .. } => (reply.reason, reply.usage) = (Some(reason), usage),
        }
    }
}

fn complete(engine: &mut Engine, request: Request) -> Reply {
    let id = engine.submit(request).expect("a good request");
    let mut replies = HashMap::new();
    drain(engine, &mut replies);
    replies.remove(&id).expect("a reply")
}

fn solo(sizes: Sizes, prompt: &[u32], n: usize) -> Vec<u32> {
    Mock::solo(&config(sizes.recurrent), &Script::default(), prompt, n)
}

/// Nothing is held: all pages are free or only kept for reuse.
fn assert_released(engine: &Engine) {
    let stats = engine.stats();
    assert_eq!((stats.queued, stats.running, stats.pages_used), (0, 0, 0), "{stats:?}");
}

#[test]
fn concurrent_replies_equal_solo_replies() {
    for (recurrent, chooses) in [(false, false), (false, true), (true, false), (true, true)] {
        for reuse in [false, true] {
            let sizes = Sizes { recurrent, reuse, chooses, n_slots: 8, n_pages: 128, ..SIZES };
            let (mut engine, _) = engine(sizes, Script::default());
            let lengths = [1, 2, 3, 5, 8, 40, 80, 160];
            let mut replies = HashMap::new();
            let mut want = Vec::new();
            for round in 0..3u32 {
                for (i, n) in lengths.into_iter().enumerate() {
                    let prompt = prompt(1 + 37 * i, i as u32 + round);
                    let id = engine.submit(request(prompt.clone(), n)).expect("a good request");
                    want.push((id, solo(sizes, &prompt, n as usize)));
                    // Arrivals at any time, bad ones among them.
                    let bad = engine.submit(request(vec![u32::MAX], 5));
                    assert!(matches!(bad, Err(SubmitError::TokenOutOfRange { id: u32::MAX, .. })));
                    collect(engine.step(), &mut replies);
                }
            }
            drain(&mut engine, &mut replies);
            for (id, ids) in want {
                assert_eq!(replies[&id].ids, ids, "{sizes:?}, {id:?}");
                assert_eq!(replies[&id].reason, Some(FinishReason::Length));
            }
            assert_released(&engine);
        }
    }
}

#[test]
fn four_times_as_many_as_slots_finish_in_order_of_arrival() {
    let (mut engine, _) = engine(SIZES, Script::default());
    let ids: Vec<_> = (0..16).map(|i| engine.submit(request(prompt(20, i), 6)).expect("queued")).collect();
    let mut order = Vec::new();
    while !engine.is_idle() {
        let finished = |e: Event| matches!(e, Event::Finished { .. }).then(|| e.id());
        order.extend(engine.step().into_iter().filter_map(finished));
    }
    assert_eq!(order, ids);
}

#[test]
fn the_queue_is_bounded() {
    let (mut engine, _) = engine(Sizes { n_slots: 2, n_queue: 3, ..SIZES }, Script::default());
    for i in 0..5 {
        engine.submit(request(prompt(5, i), 2)).expect("two slots and three places to wait");
    }
    assert_eq!(engine.submit(request(prompt(5, 9), 2)), Err(SubmitError::QueueFull { waiting: 5 }));
    drain(&mut engine, &mut HashMap::new());
    engine.submit(request(prompt(5, 9), 2)).expect("the queue is empty again");
}

#[test]
fn the_last_place_of_the_context_is_usable() {
    for (n_prompt, n_reply) in [(62, 2), (63, 1), (64, 0)] {
        let (mut engine, _) = engine(Sizes { n_ctx: 64, n_pages: 4, ..SIZES }, Script::default());
        let prompt = prompt(n_prompt, 0);
        let reply = complete(&mut engine, Request { prompt: prompt.clone(), ..Request::default() });
        assert_eq!(reply.ids, solo(SIZES, &prompt, n_reply), "prompt of {n_prompt}");
        assert_eq!(reply.reason, Some(FinishReason::Length));
        assert_released(&engine);
    }
}

#[test]
fn prompts_that_cannot_run_are_refused_and_harm_nobody() {
    let (mut engine, _) = engine(Sizes { n_ctx: 64, ..SIZES }, Script::default());
    let n_vocab = engine.config().n_vocab as u32;
    assert_eq!(engine.submit(request(vec![], 1)), Err(SubmitError::EmptyPrompt));
    let out = Err(SubmitError::TokenOutOfRange { id: n_vocab, n_vocab });
    assert_eq!(engine.submit(request(vec![n_vocab], 1)), out);
    let long = engine.submit(request(prompt(65, 0), 1)).expect_err("too long");
    assert_eq!(long, SubmitError::ContextLengthExceeded { prompt: 65, n_ctx: 64 });
    assert!(long.to_string().contains("65") && long.to_string().contains("64"), "{long}");
    let hot = Sampling { temperature: f32::NAN, ..Sampling::default() };
    assert!(matches!(engine.submit(Request { sampling: hot, ..request(vec![1], 1) }), Err(SubmitError::Sampling(_))));
    assert!(engine.is_idle());
    assert_eq!(complete(&mut engine, request(vec![n_vocab - 1], 3)).ids.len(), 3);
}

#[test]
fn token_limits_are_kept() {
    let (mut engine, _) = engine(SIZES, Script::default());
    for n in [0, 1, 3] {
        let reply = complete(&mut engine, request(prompt(10, 1), n));
        assert_eq!((reply.ids.len(), reply.reason), (n as usize, Some(FinishReason::Length)));
        let usage = Usage { prompt_tokens: 10, completion_tokens: n, cached_tokens: 0 };
        assert_eq!(reply.usage, usage);
    }
    let endless = complete(&mut engine, Request { prompt: prompt(10, 1), ..Request::default() });
    assert_eq!((endless.ids.len(), endless.reason), (502, Some(FinishReason::Length)));
}

#[test]
fn a_cancelled_request_is_gone_within_a_step_in_every_phase() {
    // One slot, so that whatever the first request holds keeps the second one out.
    let sizes = Sizes { n_slots: 1, n_pages: 8, n_batch: 32, ..SIZES };
    for (phase, chooses) in ["queued", "prefill", "decode"].into_iter().flat_map(|p| [(p, false), (p, true)]) {
        let sizes = Sizes { chooses, ..sizes };
        let (mut engine, _) = engine(sizes, Script::default());
        let running = engine.submit(request(prompt(200, 0), 300)).expect("a good request");
        let mut replies = HashMap::new();
        let victim = match phase {
            "queued" => engine.submit(request(prompt(100, 1), 300)).expect("queued"),
            _ => running,
        };
        let steps = if phase == "decode" { 20 } else { 2 };
        (0..steps).for_each(|_| collect(engine.step(), &mut replies));
        let so_far = replies.get(&victim).map_or(0, |r| r.ids.len());
        assert_eq!(so_far > 0, phase == "decode", "{phase}");

        engine.cancel(victim);
        engine.cancel(RequestId(999));
        if phase == "queued" {
            engine.cancel(running);
        }
        assert_released(&engine);
        let next = engine.submit(request(prompt(10, 2), 3)).expect("a good request");
        collect(engine.step(), &mut replies);
        assert_eq!(replies[&victim].reason, Some(FinishReason::Cancelled), "{phase}");
        assert_eq!(replies[&victim].ids.len(), so_far);
        assert_eq!(replies[&next].ids.len(), 1, "{phase}: the next request runs at once");
        drain(&mut engine, &mut replies);
        assert_eq!(replies[&next].ids, solo(sizes, &prompt(10, 2), 3));
        assert_released(&engine);
    }
}

#[test]
fn a_long_prompt_delays_running_replies_by_one_batch_only() {
    let sizes = Sizes { n_batch: 32, ..SIZES };
    let (mut engine, log) = engine(sizes, Script::default());
    let talker = engine.submit(request(prompt(4, 0), 50)).expect("a good request");
    engine.step();
    engine.submit(request(prompt(400, 1), 1)).expect("a good request");
    for _ in 0..12 {
        let said = engine.step().iter().filter(|e| matches!(e, Event::Text { id, .. } if *id == talker)).count();
        assert_eq!(said, 1, "a token every step");
    }
    let batches = &log.lock().expect("the log").batches;
    assert!(batches[1..].iter().all(|b| b[0] == 1 && b.iter().sum::<u32>() <= 32), "{batches:?}");
    assert_eq!(batches[1..12].iter().map(|b| b.iter().sum::<u32>()).max(), Some(32), "batches are filled");
}

#[test]
fn a_failing_step_ends_its_requests_and_no_others() {
    let (mut engine, _) = engine(SIZES, Script { fail_on: Some(201), nan_after: Some(202), ..Script::default() });
    let mut replies = HashMap::new();
    let doomed = [engine.submit(request(vec![1, 201], 5)), engine.submit(request(vec![5, 6], 5))];
    collect(engine.step(), &mut replies);
    for id in doomed {
        let reason = &replies[&id.expect("a good request")].reason;
        assert!(matches!(reason, Some(FinishReason::Error(why)) if why.contains("out of memory")), "{reason:?}");
    }
    let nan = engine.submit(request(vec![1, 202], 5)).expect("a good request");
    let neighbour = engine.submit(request(vec![1, 203], 5)).expect("a good request");
    drain(&mut engine, &mut replies);
    assert!(matches!(&replies[&nan].reason, Some(FinishReason::Error(why)) if why.contains("NaN")));
    assert_eq!(replies[&neighbour].ids.len(), 5);
    assert_released(&engine);
    assert_eq!((engine.stats().failed, engine.stats().finished), (3, 4));
}

#[test]
fn a_running_request_never_lacks_a_page() {
    // Eight pages; each request may come to need three, so two run and the others wait.
    let sizes = Sizes { n_pages: 8, n_slots: 4, n_ctx: 192, chooses: true, ..SIZES };
    let (mut engine, _) = engine(sizes, Script::default());
    let mut replies = HashMap::new();
    let want: Vec<_> = (0..9u32)
        .map(|i| {
            let prompt = prompt(40 + 10 * i as usize, i);
            let id = engine.submit(Request { prompt: prompt.clone(), ..Request::default() }).expect("queued");
            (id, prompt)
        })
        .collect();
    while !engine.is_idle() {
        collect(engine.step(), &mut replies);
        assert!(engine.stats().running <= 2);
    }
    for (id, prompt) in want {
        assert_eq!(replies[&id].ids, solo(sizes, &prompt, 192 - prompt.len()));
    }
    assert_released(&engine);
}

#[test]
fn a_known_beginning_is_not_computed_again() {
    for (recurrent, chooses) in [(false, false), (false, true), (true, false), (true, true)] {
        let sizes = Sizes { recurrent, chooses, ..SIZES };
        let (mut engine, log) = engine(sizes, Script::default());
        let first = prompt(150, 3);
        let reply = complete(&mut engine, request(first.clone(), 90));
        assert_eq!(reply.cached, 0);

        // The same prompt; a chat that goes on; a prompt that differs late.
        let again = complete(&mut engine, request(first.clone(), 20));
        assert_eq!((again.cached, &again.ids[..]), (128, &reply.ids[..20]), "recurrent {recurrent}");
        let mut chat = first.clone();
        chat.extend(&reply.ids);
        chat.extend(prompt(30, 4));
        let more = complete(&mut engine, request(chat.clone(), 20));
        assert_eq!((more.cached, more.ids), (192, solo(sizes, &chat, 20)), "recurrent {recurrent}");
        assert_eq!(more.usage.cached_tokens, 192);
        let mut other = first.clone();
        other[100] = 199;
        let forked = complete(&mut engine, request(other.clone(), 20));
        // Without a state at the fork there is nothing to go on from; the second fork finds one.
        assert_eq!((forked.cached, forked.ids), (if recurrent { 0 } else { 64 }, solo(sizes, &other, 20)));
        other[101] = 198;
        let forked = complete(&mut engine, request(other.clone(), 20));
        assert_eq!((forked.cached, forked.ids), (64, solo(sizes, &other, 20)), "recurrent {recurrent}");
        assert_eq!(log.lock().expect("the log").copies > 0, recurrent);
        assert_released(&engine);
    }
}

#[test]
fn kept_pages_make_room_for_running_requests() {
    let sizes = Sizes { n_pages: 8, n_slots: 2, n_checkpoints: 2, chooses: true, ..SIZES };
    let (mut engine, _) = engine(sizes, Script::default());
    for i in 0..40u32 {
        let prompt = prompt(1 + (i as usize * 53) % 400, i % 7);
        let reply = complete(&mut engine, request(prompt.clone(), 60));
        assert_eq!(reply.ids, solo(sizes, &prompt, 60), "request {i}");
    }
    assert_released(&engine);
    assert!(engine.stats().pages_cached > 0);
}

#[test]
fn equal_prompts_share_pages_while_they_run() {
    let sizes = Sizes { n_slots: 4, n_pages: 14, n_ctx: 512, ..SIZES };
    let (mut engine, _) = engine(sizes, Script::default());
    let prompt = prompt(300, 1);
    let mut replies = HashMap::new();
    let first = engine.submit(request(prompt.clone(), 40)).expect("a good request");
    (0..4).for_each(|_| collect(engine.step(), &mut replies));
    let second = engine.submit(request(prompt.clone(), 40)).expect("a good request");
    drain(&mut engine, &mut replies);
    assert_eq!(replies[&first].ids, replies[&second].ids);
    assert_eq!(replies[&second].cached, 256);
}

#[test]
fn embeddings_are_means_over_chunks_and_run_beside_replies() {
    let (mut engine, _) = engine(Sizes { n_batch: 32, ..SIZES }, Script::default());
    let tokens = prompt(100, 2);
    let talker = engine.submit(request(prompt(10, 0), 12)).expect("a good request");
    let id = engine.submit_embedding(tokens.clone()).expect("a good request");
    let mut replies = HashMap::new();
    drain(&mut engine, &mut replies);
    let mean = tokens.iter().sum::<u32>() as f32 / 100.0;
    let got = replies[&id].embedding.as_ref().expect("an embedding");
    assert_eq!(got.len(), engine.config().n_embd);
    assert!(got.iter().all(|x| (x - mean).abs() < 1e-3));
    assert_eq!(replies[&id].reason, Some(FinishReason::Stop(StopCause::NoReply)));
    assert_eq!(replies[&talker].ids, solo(SIZES, &prompt(10, 0), 12));
    assert_released(&engine);
}
