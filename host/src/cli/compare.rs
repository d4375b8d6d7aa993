//! `host compare`: one device's logits against another's, or against a file.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args as ClapArgs;
use serde::Serialize;

use super::error::CliError;
use super::interrupt::Interrupt;
use super::logits::{Sequence, for_each_row};
use super::model_path::default_model;
use super::output;
use crate::engine::{self, DeviceChoice};
use crate::gguf::Gguf;
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

/// How far two sets of logits are apart, over all positions.
#[derive(Debug, Default, Serialize, PartialEq)]
struct Distance {
    positions: usize,
    /// Largest relative L2 difference of a position: `|a − b| / |b|`.
    worst_relative_l2: f64,
    /// Where that is.
    worst_position: usize,
    /// Mean of `Σ q·(ln q − ln p)`, `q` the reference's distribution, in nats.
    mean_kl: f64,
    /// Fraction of positions with the same most probable token.
    top1_agreement: f64,
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
    output::write_json(&distance.mean())
}

impl Distance {
    fn add(&mut self, a: &[f32], reference: &[f32]) {
        let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
        let difference = squares(&mut a.iter().zip(reference).map(|(a, b)| f64::from(*a) - f64::from(*b)));
        let norm = squares(&mut reference.iter().map(|b| f64::from(*b)));
        let relative = (difference / norm.max(f64::MIN_POSITIVE)).sqrt();
        // A NaN is the worst of all.
        if !(relative <= self.worst_relative_l2) || self.positions == 0 {
            (self.worst_relative_l2, self.worst_position) = (relative, self.positions);
        }
        self.mean_kl += kl(a, reference);
        let top = |logits| engine::sampler::argmax(logits);
        self.top1_agreement += f64::from(u8::from(top(a) == top(reference)));
        self.positions += 1;
    }

    fn mean(mut self) -> Self {
        let n = self.positions.max(1) as f64;
        self.mean_kl /= n;
        self.top1_agreement /= n;
        self
    }
}

/// `Σ q·(ln q − ln p)` with `p`, `q` the softmax of `a`, `reference`.
fn kl(a: &[f32], reference: &[f32]) -> f64 {
    let log_sum = |logits: &[f32]| {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        f64::from(max) + logits.iter().map(|l| f64::from(l - max).exp()).sum::<f64>().ln()
    };
    let (sum_a, sum_b) = (log_sum(a), log_sum(reference));
    let term = |(a, b): (&f32, &f32)| {
        let (ln_p, ln_q) = (f64::from(*a) - sum_a, f64::from(*b) - sum_b);
        ln_q.exp() * (ln_q - ln_p)
    };
    a.iter().zip(reference).map(term).sum()
}

fn read_floats(path: &std::path::Path) -> Result<Vec<f32>, CliError> {
    let bytes = std::fs::read(path).map_err(|source| CliError::File { path: path.to_owned(), source })?;
    let (floats, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(CliError::Usage(format!("{}: {} bytes are no f32 values", path.display(), bytes.len())));
    }
    Ok(floats.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_those_of_the_definitions() {
        let mut d = Distance::default();
        d.add(&[1.0, 0.0], &[1.0, 0.0]);
        d.add(&[0.0, 4.0], &[3.0, 4.0]);
        let d = d.mean();
        assert_eq!((d.positions, d.worst_position, d.worst_relative_l2, d.top1_agreement), (2, 1, 0.6, 1.0));
        // By hand: softmax(3, 4) = (0.26894, 0.73106), softmax(0, 4) = (0.01799, 0.98201).
        let kl = 0.26894 * (0.26894f64 / 0.01799).ln() + 0.73106 * (0.73106f64 / 0.98201).ln();
        assert!((d.mean_kl - kl / 2.0).abs() < 1e-4, "{}", d.mean_kl);
    }

    #[test]
    fn nan_is_the_worst() {
        let mut d = Distance::default();
        d.add(&[1.0], &[2.0]);
        d.add(&[f32::NAN], &[2.0]);
        assert!(d.worst_relative_l2.is_nan() && d.worst_position == 1);
    }
}
