//! `host bench`: how fast the engine is, sampling and scheduling included.

use std::time::Instant;

use clap::Args as ClapArgs;
use serde::Serialize;

use super::args::{Format, ModelArgs};
use super::error::CliError;
use super::interrupt::Interrupt;
use super::report::peak_memory_bytes;
use super::{load, output};
use crate::engine::{Engine, EngineOptions, Event, FinishReason, Request};

#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Tokens of each prompt.
    #[arg(short = 'p', long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    n_prompt: u32,
    /// Tokens to generate after each prompt.
    #[arg(short, long, default_value_t = 128, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    n_gen: u32,
    /// Sequences at once.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    slots: u32,
    /// Runs, each reported; the first one also warms up.
    #[arg(short, long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// A table, or one JSON object.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

#[derive(Serialize)]
struct Output {
    device: String,
    n_prompt: u32,
    n_gen: u32,
    slots: u32,
    load_s: f64,
    peak_memory_bytes: Option<u64>,
    runs: Vec<Run>,
}

/// Tokens a second over all sequences.
#[derive(Clone, Copy, Serialize)]
struct Run {
    prefill_tok_s: f64,
    decode_tok_s: f64,
}

pub(super) fn bench(args: Args) -> Result<(), CliError> {
    let interrupt = Interrupt::listen();
    let n_ctx = args.n_prompt.checked_add(args.n_gen + 1);
    let n_ctx = n_ctx.ok_or_else(|| CliError::Usage("the sequence is too long".to_owned()))?;
    let options = EngineOptions {
        n_ctx: Some(args.model.ctx.unwrap_or(n_ctx)),
        n_slots: args.slots,
        // Every run computes its prompts.
        prefix_reuse: false,
        ..args.model.options()
    };
    let load::Loaded { mut engine, load_s } = load::engine_with(&args.model, &options)?;
    let mut runs = Vec::new();
    for i in 0..args.repeat {
        let run = run(&mut engine, &args, i, &interrupt)?;
        if args.format == Format::Text {
            let Run { prefill_tok_s, decode_tok_s } = run;
            output::write(&format!(
                "{} × {} prompt tokens: {prefill_tok_s:.1} tok/s; {} generated: {decode_tok_s:.1} tok/s\n",
                args.slots, args.n_prompt, args.n_gen
            ))?;
        }
        runs.push(run);
    }
    if args.format == Format::Text {
        return Ok(());
    }
    output::write_json(&Output {
        device: args.model.device.to_string(),
        n_prompt: args.n_prompt,
        n_gen: args.n_gen,
        slots: args.slots,
        load_s,
        peak_memory_bytes: peak_memory_bytes(),
        runs,
    })
}

/// Prefill is over when every sequence has its first token, decode when every one is complete.
fn run(engine: &mut Engine, args: &Args, salt: u32, interrupt: &Interrupt) -> Result<Run, CliError> {
    let n_vocab = engine.config().n_vocab as u32;
    for slot in 0..args.slots {
        // Any ids will do, but each sequence has its own, so that experts are chosen as in real use.
        let id = |i: u32| i.wrapping_mul(2_654_435_761).wrapping_add(slot * 7919 + salt * 104_729) % n_vocab;
        engine.submit(Request {
            prompt: (0..args.n_prompt).map(id).collect(),
            max_tokens: Some(args.n_gen + 1),
            ignore_eos: true,
            ..Request::default()
        })?;
    }
    let start = Instant::now();
    let (mut waiting, mut prefilled) = (args.slots, None);
    let mut seen = std::collections::HashSet::new();
    while !engine.is_idle() {
        interrupt.check()?;
        for event in engine.step() {
            match event {
                Event::Text { id, .. } if seen.insert(id) => waiting -= 1,
                Event::Finished { reason: FinishReason::Error(why), .. } => return Err(CliError::Generation(why)),
                _ => {}
            }
        }
        if waiting == 0 {
            prefilled.get_or_insert_with(Instant::now);
        }
    }
    let end = Instant::now();
    let prefilled = prefilled.unwrap_or(end);
    let rate = |n: u32, seconds: f64| f64::from(args.slots) * f64::from(n) / seconds;
    Ok(Run {
        prefill_tok_s: rate(args.n_prompt, (prefilled - start).as_secs_f64()),
        decode_tok_s: rate(args.n_gen, (end - prefilled).as_secs_f64()),
    })
}
