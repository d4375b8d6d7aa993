//! `host compare`: one device's logits against another's, or against a file.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args as ClapArgs;

use super::error::CliError;
use super::interrupt::Interrupt;
use super::logits::{Sequence, for_each_row};
use super::model_path::default_model;
use super::output;
use crate::engine::{self, DeviceChoice};
use crate::gguf::Gguf;
use crate::model::distance::Distance;
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
    /// The device to judge.
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    device: DeviceChoice,
    /// The device to hold it against.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    against: DeviceChoice,
    /// The logits to hold it against, as `host logits` writes them.
    #[arg(long, value_name = "FILE.f32", conflicts_with = "against")]
    file: Option<PathBuf>,
    /// Tokens in one step.
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
}

pub(super) fn compare(args: Args) -> Result<(), CliError> {
    let interrupt = Interrupt::listen();
    let gguf = Arc::new(Gguf::open(&default_model(args.model.as_deref())?)?);
    let ids = match &args.prompt {
        Some(text) => Tokenizer::from_gguf(&gguf)?.encode(text, Encode { bos: true, special: false }),
        None => args.ids.clone(),
    };
    let sequence = Sequence { ids: &ids, n_batch: args.batch };
    let reference = match &args.file {
        Some(path) => read_floats(path)?,
        None => {
            let mut executor = engine::load(gguf.clone(), &args.against, sequence.limits()?)?;
            let mut all = Vec::new();
            for_each_row(executor.as_mut(), &sequence, &interrupt, |row| {
                all.extend_from_slice(row);
                Ok(())
            })?;
            all
        }
    };
    let mut executor = engine::load(gguf, &args.device, sequence.limits()?)?;
    let n_vocab = executor.config().n_vocab;
    if reference.len() != ids.len() * n_vocab {
        let (found, wanted) = (reference.len(), ids.len() * n_vocab);
        return Err(CliError::Usage(format!("the reference has {found} logits, the sequence has {wanted}")));
    }
    let mut distance = Distance::default();
    let mut rows = reference.chunks_exact(n_vocab);
    for_each_row(executor.as_mut(), &sequence, &interrupt, |row| {
        distance.add(row, rows.next().unwrap_or_default());
        Ok(())
    })?;
    output::write_json(&distance)
}

fn read_floats(path: &std::path::Path) -> Result<Vec<f32>, CliError> {
    let bytes = std::fs::read(path).map_err(|source| CliError::File { path: path.to_owned(), source })?;
    let (floats, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(CliError::Usage(format!("{}: {} bytes are no f32 values", path.display(), bytes.len())));
    }
    Ok(floats.iter().map(|b| f32::from_le_bytes(*b)).collect())
}
