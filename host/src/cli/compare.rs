//! `host compare`: one device's logits against another's, or against a file, token for token.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args as ClapArgs;

use super::args::GpuArgs;
use super::error::CliError;
use super::interrupt::Interrupt;
use super::logits::{Sequence, for_each_row};
use super::model_path::default_model;
use super::output;
use crate::backend::{Batch, PAGE_TOKENS, Span};
use crate::engine::{self, DeviceChoice, sampler};
use crate::gguf::Gguf;
use crate::model::distance::Distance;
use crate::model::executor::{Executor, Limits};
use crate::tokenizer::{Encode, Tokenizer};

#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    /// The GGUF file; without it, the small model of the checkout.
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// The tokens, as ids.
    #[arg(
        long,
        value_name = "ID,…",
        value_delimiter = ',',
        required_unless_present = "prompt",
        conflicts_with = "prompt"
    )]
    ids: Vec<u32>,
    /// The tokens, as text.
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// Go on with this many of the reference's most probable tokens, which both devices are given.
    #[arg(short, long, default_value_t = 0, value_name = "N", conflicts_with = "file")]
    n_gen: u32,
    /// The reference and the device to judge, such as cpu,cuda.
    #[arg(long, value_name = "A,B", value_delimiter = ',', num_args = 1..=2, conflicts_with_all = ["device", "against"])]
    devices: Vec<DeviceChoice>,
    /// The device to judge.
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    device: DeviceChoice,
    /// The device to hold it against.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    against: DeviceChoice,
    #[command(flatten)]
    gpu: GpuArgs,
    /// The logits to hold it against, as `host logits` writes them.
    #[arg(long, value_name = "FILE.f32", conflicts_with = "against")]
    file: Option<PathBuf>,
    /// Tokens in one step.
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// Also print a line for every position.
    #[arg(long)]
    each: bool,
}

pub(super) fn compare(mut args: Args) -> Result<(), CliError> {
    let interrupt = Interrupt::listen();
    if let [against, device] = args.devices.as_slice() {
        (args.against, args.device) = (against.clone(), device.clone());
    } else if !args.devices.is_empty() {
        return Err(CliError::Usage("--devices takes two, such as cpu,cuda".to_owned()));
    }
    let gguf = Arc::new(Gguf::open(&default_model(args.model.as_deref())?)?);
    let mut ids = match &args.prompt {
        Some(text) => Tokenizer::from_gguf(&gguf)?.encode(text, Encode { bos: true, special: false }),
        None => args.ids.clone(),
    };
    let reference = match &args.file {
        Some(path) => read_floats(path)?,
        None => reference(gguf.clone(), &args, &mut ids, &interrupt)?,
    };
    let sequence = Sequence { ids: &ids, n_batch: args.batch };
    let mut executor =
        engine::load_with(gguf, &args.device, &args.gpu.kernels(), sequence.limits()?, args.gpu.options())?;
    let n_vocab = executor.config().n_vocab;
    if reference.len() != ids.len() * n_vocab {
        let (found, wanted) = (reference.len(), ids.len() * n_vocab);
        return Err(CliError::Usage(format!("the reference has {found} logits, the sequence has {wanted}")));
    }
    let mut distance = Distance::default();
    let mut rows = reference.chunks_exact(n_vocab);
    for_each_row(executor.as_mut(), &sequence, &interrupt, |row| {
        let difference = distance.add(row, rows.next().unwrap_or_default());
        if args.each { output::write_json(&difference) } else { Ok(()) }
    })?;
    output::write_json(&distance)
}

/// The logits of the device to hold the other against; its continuation is added to `ids`.
fn reference(gguf: Arc<Gguf>, args: &Args, ids: &mut Vec<u32>, interrupt: &Interrupt) -> Result<Vec<f32>, CliError> {
    let n_tokens = ids.len().saturating_add(args.n_gen as usize);
    let n_pages = u32::try_from(n_tokens.div_ceil(PAGE_TOKENS as usize))
        .map_err(|_| CliError::Usage("the sequence is too long".to_owned()))?;
    let limits = Limits { n_pages, n_slots: 1, n_batch: args.batch, n_outputs: args.batch };
    let mut executor = engine::load_with(gguf, &args.against, &args.gpu.kernels(), limits, args.gpu.options())?;
    let mut all = Vec::new();
    for_each_row(executor.as_mut(), &Sequence { ids, n_batch: args.batch }, interrupt, |row| {
        all.extend_from_slice(row);
        Ok(())
    })?;
    let n_vocab = executor.config().n_vocab;
    let mut logits = Vec::new();
    for _ in 0..args.n_gen {
        interrupt.check()?;
        let last = &all[all.len().saturating_sub(n_vocab)..];
        let Some(next) = sampler::argmax(last) else { break };
        one_more(executor.as_mut(), next, ids.len() as u32, &mut logits)?;
        ids.push(next);
        all.extend_from_slice(&logits);
    }
    Ok(all)
}

/// The logits after one more token of the only sequence.
fn one_more(executor: &mut dyn Executor, token: u32, start: u32, logits: &mut Vec<f32>) -> Result<(), CliError> {
    let pages = (0..(start + 1).div_ceil(PAGE_TOKENS)).collect();
    let spans = vec![Span { slot: 0, start, rows: 1, pages }];
    Ok(executor.forward(&Batch { tokens: vec![token], spans, outputs: vec![0] }, logits)?)
}

fn read_floats(path: &std::path::Path) -> Result<Vec<f32>, CliError> {
    let bytes = std::fs::read(path).map_err(|source| CliError::File { path: path.to_owned(), source })?;
    let (floats, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(CliError::Usage(format!("{}: {} bytes are no f32 values", path.display(), bytes.len())));
    }
    Ok(floats.iter().map(|b| f32::from_le_bytes(*b)).collect())
}
