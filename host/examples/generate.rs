//! Complete a prompt with the most probable tokens: `cargo run --example generate [MODEL [PROMPT]]`.

use std::error::Error;
use std::path::Path;

use host::cli::default_model;
use host::engine::{Engine, EngineOptions, Event, Request};
use host::tokenizer::Encode;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let model = default_model(args.next().as_deref().map(Path::new))?;
    let prompt = args.next().unwrap_or_else(|| "Ge1:1 In the beginning".to_owned());

    let mut engine = Engine::open(&model, &EngineOptions::default())?;
    let tokenizer = engine.tokenizer().ok_or("the model has no vocabulary")?;
    let ids = tokenizer.encode(&prompt, Encode { bos: true, special: false });

    engine.submit(Request { prompt: ids, max_tokens: Some(24), ..Request::default() })?;
    let mut reply = String::new();
    while !engine.is_idle() {
        for event in engine.step() {
            if let Event::Text { text, .. } = event {
                reply.push_str(&text);
            }
        }
    }
    println!("{prompt}{reply}");
    Ok(())
}
