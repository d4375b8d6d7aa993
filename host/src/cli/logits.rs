//! `host logits`: the logits of every position of a token sequence.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args as ClapArgs;

use super::error::CliError;
use super::interrupt::Interrupt;
use super::model_path::default_model;
use crate::backend::{Batch, PAGE_TOKENS, Span};
use crate::engine::{self, DeviceChoice, SubmitError};
use crate::gguf::Gguf;
use crate::model::session::{Executor, Limits};

#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    /// The GGUF file; without it, the small model of the checkout.
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// The token ids.
    #[arg(long, value_name = "ID,…", value_delimiter = ',', required = true)]
    ids: Vec<u32>,
    /// auto, cpu, cuda or cuda:N.
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    device: DeviceChoice,
    /// Tokens in one step.
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// Where to: f32, little-endian, `[ids, n_vocab]`.
    #[arg(short, long, value_name = "OUT.f32")]
    output: PathBuf,
}

pub(super) fn logits(args: Args) -> Result<(), CliError> {
    let interrupt = Interrupt::listen();
    let mut executor = open(&args)?;
    let io_error = |source| CliError::File { path: args.output.clone(), source };
    let mut out = BufWriter::new(File::create(&args.output).map_err(io_error)?);
    let pages: Vec<u32> = (0..executor.limits().n_pages).collect();
    let (mut logits, mut start) = (Vec::new(), 0);
    for tokens in args.ids.chunks(args.batch as usize) {
        interrupt.check()?;
        let rows = tokens.len() as u32;
        let end = start + rows;
        let pages = pages[..end.div_ceil(PAGE_TOKENS) as usize].to_vec();
        let spans = vec![Span { slot: 0, start, rows, pages }];
        executor.forward(&Batch { tokens: tokens.to_vec(), spans, outputs: (0..rows).collect() }, &mut logits)?;
        for x in &logits {
            out.write_all(&x.to_le_bytes()).map_err(io_error)?;
        }
        start = end;
    }
    out.flush().map_err(io_error)
}

/// A session with room for the ids and for the logits of every row.
fn open(args: &Args) -> Result<Box<dyn Executor>, CliError> {
    let gguf = Arc::new(Gguf::open(&default_model(args.model.as_deref())?)?);
    let n_pages = args.ids.len().div_ceil(PAGE_TOKENS as usize);
    let n_pages = u32::try_from(n_pages).map_err(|_| CliError::Usage("too many ids".to_owned()))?;
    let limits = Limits { n_pages, n_slots: 1, n_batch: args.batch, n_outputs: args.batch };
    let executor = engine::load(gguf, &args.device, limits)?;
    let n_vocab = executor.config().n_vocab as u32;
    match args.ids.iter().find(|&&id| id >= n_vocab) {
        Some(&id) => Err(SubmitError::TokenOutOfRange { id, n_vocab }.into()),
        None => Ok(executor),
    }
}
