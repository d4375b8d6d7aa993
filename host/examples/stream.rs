//! Several prompts at once, each with its own settings, printed as their tokens come; one of them is cancelled:
//! `cargo run --example stream [MODEL]`.

use std::error::Error;
use std::path::Path;

use host::cli::default_model;
use host::engine::{Engine, EngineOptions, Event, Request, Sampling};
use host::tokenizer::Encode;

fn main() -> Result<(), Box<dyn Error>> {
    let model = default_model(std::env::args().nth(1).as_deref().map(Path::new))?;
    let options = EngineOptions { n_slots: 3, n_ctx: Some(512), ..EngineOptions::default() };
    let mut engine = Engine::open(&model, &options)?;
    let tokenizer = engine.tokenizer().ok_or("the model has no vocabulary")?.clone();

    let hot = Sampling { temperature: 0.8, top_p: 0.95, seed: Some(7), ..Sampling::default() };
    let requests = [
        ("Ge1:1 In the beginning", Sampling::default()),
        ("/// Returns the number of elements in the", Sampling::default()),
        ("And it came to pass", hot),
    ];
    let mut ids = Vec::new();
    for (prompt, sampling) in requests {
        let prompt = tokenizer.encode(prompt, Encode { bos: true, special: false });
        ids.push(engine.submit(Request { prompt, max_tokens: Some(16), sampling, ..Request::default() })?);
    }

    let mut steps = 0;
    while !engine.is_idle() {
        for event in engine.step() {
            match event {
                Event::Text { id, text, .. } => println!("{} says {text:?}", id.0),
                Event::Finished { id, reason, usage, .. } => {
                    println!("{} ends: {reason:?} after {} tokens", id.0, usage.completion_tokens);
                }
                Event::Started { .. } | Event::Embedding { .. } => {}
            }
        }
        steps += 1;
        if steps == 5 {
            engine.cancel(ids[2]);
        }
    }
    Ok(())
}
