//! `host logits`: the logits of every position of a token sequence.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args as ClapArgs;

use super::args::GpuArgs;
use super::error::CliError;
use super::interrupt::Interrupt;
use super::model_path::default_model;
use crate::backend::{Batch, PAGE_TOKENS, Span};
use crate::engine::{self, DeviceChoice, SubmitError};
use crate::gguf::Gguf;
use crate::model::executor::{Executor, Limits};

#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    /// The GGUF file; without it, the small model of the checkout.
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// The token ids.
    #[arg(long, value_name = "ID,…", value_delimiter = ',', required = true)]
    ids: Vec<u32>,
    /// auto, cpu, cuda, cuda:N, or emulated (slow: for tests).
    #[arg(long, default_value = "auto", value_name = "DEVICE", env = "ZINC_DEVICE")]
    device: DeviceChoice,
    #[command(flatten)]
    gpu: GpuArgs,
    /// Tokens in one step.
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// Where to: f32, little-endian, `[ids, n_vocab]`.
    #[arg(short, long, value_name = "OUT.f32")]
    output: PathBuf,
}

pub(super) fn logits(args: Args) -> Result<(), CliError> {
    let interrupt = Interrupt::listen();
    let gguf = Arc::new(Gguf::open(&default_model(args.model.as_deref())?)?);
    let sequence = Sequence { ids: &args.ids, n_batch: args.batch };
    let mut executor =
        engine::load_with(gguf, &args.device, &args.gpu.kernels(), sequence.limits()?, args.gpu.options())?;
    let io_error = |source| CliError::File { path: args.output.clone(), source };
    let mut out = BufWriter::new(File::create(&args.output).map_err(io_error)?);
    for_each_row(executor.as_mut(), &sequence, &interrupt, |row| {
        row.iter().try_for_each(|x| out.write_all(&x.to_le_bytes())).map_err(io_error)
    })?;
    out.flush().map_err(io_error)
}

/// A token sequence whose logits are wanted.
pub(super) struct Sequence<'a> {
    pub(super) ids: &'a [u32],
    /// Tokens in one step.
    pub(super) n_batch: u32,
}

impl Sequence<'_> {
    /// Room for the ids and for the logits of every row of a step.
    pub(super) fn limits(&self) -> Result<Limits, CliError> {
        let n_pages = self.ids.len().div_ceil(PAGE_TOKENS as usize);
        let n_pages = u32::try_from(n_pages).map_err(|_| CliError::Usage("too many ids".to_owned()))?;
        Ok(Limits { n_pages, n_slots: 1, n_batch: self.n_batch, n_outputs: self.n_batch })
    }
}

/// Hands the logits of every position, `[n_vocab]`, to `take`.
///
/// # Errors
/// An id is no token of the model, the model fails, or `take` does.
pub(super) fn for_each_row(
    executor: &mut dyn Executor,
    sequence: &Sequence<'_>,
    interrupt: &Interrupt,
    mut take: impl FnMut(&[f32]) -> Result<(), CliError>,
) -> Result<(), CliError> {
    let n_vocab = executor.config().n_vocab;
    if let Some(&id) = sequence.ids.iter().find(|&&id| id as usize >= n_vocab) {
        return Err(SubmitError::TokenOutOfRange { id, n_vocab: n_vocab as u32 }.into());
    }
    let (mut logits, mut start) = (Vec::new(), 0);
    for tokens in sequence.ids.chunks(sequence.n_batch as usize) {
        interrupt.check()?;
        let rows = tokens.len() as u32;
        let pages = (0..(start + rows).div_ceil(PAGE_TOKENS)).collect();
        let spans = vec![Span { slot: 0, start, rows, pages }];
        executor.forward(&Batch { tokens: tokens.to_vec(), spans, outputs: (0..rows).collect() }, &mut logits)?;
        logits.chunks_exact(n_vocab).try_for_each(&mut take)?;
        start += rows;
    }
    Ok(())
}
