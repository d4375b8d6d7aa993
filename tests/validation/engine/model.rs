//! The engine over a real model on the CPU: batching, chunking and reuse change no token.

use std::collections::HashMap;

use host::engine::{DeviceChoice, Engine, EngineOptions, Event, Request, RequestId};
use host::tokenizer::Encode;

use crate::checkout;

fn open(options: EngineOptions) -> Engine {
    let options = EngineOptions { device: DeviceChoice::Cpu, n_ctx: Some(512), ..options };
    Engine::open(&checkout::zinc_tiny(), &options).expect("the model loads")
}

fn encode(engine: &Engine, text: &str) -> Vec<u32> {
    engine.tokenizer().expect("a vocabulary").encode(text, Encode { bos: true, special: false })
}

/// The ids of every reply, and how many prompt tokens were not computed.
fn run(engine: &mut Engine, requests: Vec<(Vec<u32>, u32)>) -> Vec<(Vec<u32>, u32)> {
    let submit = |(prompt, n)| {
        let request = Request { prompt, max_tokens: Some(n), ignore_eos: true, ..Request::default() };
        engine.submit(request).expect("a good request")
    };
    let ids: Vec<RequestId> = requests.into_iter().map(submit).collect();
    let mut replies: HashMap<RequestId, (Vec<u32>, u32)> = HashMap::new();
    while !engine.is_idle() {
        for event in engine.step() {
            let reply = replies.entry(event.id()).or_default();
            match event {
                Event::Started { cached_tokens, .. } => reply.1 = cached_tokens,
                Event::Text { tokens, .. } => reply.0.extend(tokens.iter().map(|t| t.id)),
                Event::Embedding { .. } | Event::Finished { .. } => {}
            }
        }
    }
    ids.into_iter().map(|id| replies.remove(&id).expect("a reply")).collect()
}

/// A passage of about 150 tokens that the model knows the style of.
const PASSAGE: &str = "Ge1:1 In the beginning God created the heaven and the earth.\nGe1:2 And the earth was without \
    form, and void; and darkness was upon the face of the deep. And the Spirit of God moved upon the face of the \
    waters.\nGe1:3 And God said, Let there be light: and there was light.\nGe1:4 And God saw the light, that it was \
    good: and God divided the light from the darkness.\nGe1:5 And God called the light Day, and the darkness he \
    called Night. And the evening and the morning were the first day.";

#[test]
fn neighbours_in_the_batch_change_no_token() {
    let mut batched = open(EngineOptions { n_slots: 4, n_batch: 24, ..EngineOptions::default() });
    let prompts =
        ["Ge1:1 In the beginning", "/// Returns the number of", PASSAGE, "And it came to pass", "fn main() {"];
    let requests: Vec<_> =
        prompts.iter().zip([1, 2, 24, 12, 30]).map(|(text, n)| (encode(&batched, text), n)).collect();
    let together = run(&mut batched, requests.clone());
    for (request, (ids, _)) in requests.into_iter().zip(together) {
        let mut alone = open(EngineOptions { prefix_reuse: false, ..EngineOptions::default() });
        assert_eq!(run(&mut alone, vec![request.clone()])[0].0, ids, "prompt of {} tokens", request.0.len());
    }
}

#[test]
fn a_reused_beginning_changes_no_token() {
    let mut warm = open(EngineOptions::default());
    let mut prompt = encode(&warm, PASSAGE);
    assert!(prompt.len() > 130, "{} tokens", prompt.len());
    for turn in 0..3 {
        let (ids, cached) = run(&mut warm, vec![(prompt.clone(), 40)]).remove(0);
        assert_eq!(cached > 0, turn > 0, "turn {turn}");
        let mut cold = open(EngineOptions { prefix_reuse: false, ..EngineOptions::default() });
        assert_eq!(run(&mut cold, vec![(prompt.clone(), 40)])[0], (ids.clone(), 0), "turn {turn}");
        // The conversation goes on from the reply.
        prompt.extend(ids);
        prompt.extend(encode(&warm, "\nGe1:6"));
    }
    let mut fork = encode(&warm, PASSAGE);
    fork.truncate(100);
    fork.extend(encode(&warm, " and the sea"));
    let forked = run(&mut warm, vec![(fork.clone(), 20)]).remove(0).0;
    let mut cold = open(EngineOptions { prefix_reuse: false, ..EngineOptions::default() });
    assert_eq!(run(&mut cold, vec![(fork, 20)])[0].0, forked);
}

#[test]
fn embeddings_do_not_depend_on_the_batch() {
    let embed = |n_batch: u32| {
        let mut engine = open(EngineOptions { n_batch, ..EngineOptions::default() });
        let prompt = encode(&engine, PASSAGE);
        engine.submit_embedding(prompt).expect("a good request");
        let mut found = None;
        while !engine.is_idle() {
            for event in engine.step() {
                if let Event::Embedding { embedding, .. } = event {
                    found = Some(embedding);
                }
            }
        }
        found.expect("an embedding")
    };
    let (whole, parts) = (embed(512), embed(31));
    let norm: f32 = whole.iter().map(|x| x * x).sum::<f32>().sqrt();
    let difference: f32 = whole.iter().zip(&parts).map(|(a, b)| (a - b).powi(2)).sum::<f32>().sqrt();
    assert!(norm > 0.0 && difference <= 1e-5 * norm, "{difference} of {norm}");
}
