//! Golden files: token sequences with the logits that another engine gave, to hold an [`Executor`] against.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::distance::{argmax, relative_l2};
use super::executor::Executor;
use crate::backend::{self, Batch, PAGE_TOKENS, Span};

/// Why golden files could not be read or run.
#[derive(Debug, thiserror::Error)]
pub enum GoldenError {
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// A file does not have the expected form.
    #[error("{}: {problem}", path.display())]
    Form {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The executor failed.
    #[error(transparent)]
    Run(#[from] backend::Error),
}

/// A token sequence and what an engine should say after its tokens.
#[derive(Clone, Debug)]
pub struct Case {
    /// The prompt's text, or the architecture.
    pub name: String,
    /// The model's file.
    pub model: PathBuf,
    /// The prompt, then all greedy tokens but the last.
    pub tokens: Vec<u32>,
    /// The greedy continuation; its first token follows `tokens[n_prompt − 1]`.
    pub greedy: Vec<u32>,
    /// Tokens of the prompt.
    pub n_prompt: usize,
    /// The logits.
    pub expected: Expected,
}

/// Expected logits.
#[derive(Clone, Debug)]
pub enum Expected {
    /// Of every position and token, `[tokens.len(), n_vocab]`.
    All(Vec<f32>),
    /// Of the ten likeliest tokens, for each greedy token.
    Top(Vec<Vec<(u32, f32)>>),
}

/// How far an executor was from a [`Case`].
#[derive(Clone, Debug)]
pub struct Report {
    /// Positions compared.
    pub n_positions: usize,
    /// The largest error of a position: for [`Expected::All`] relative in the L2 norm, `‖a − b‖ / ‖b‖`, for
    /// [`Expected::Top`] the largest absolute difference of a logit.
    pub worst_error: f64,
    /// Where it was.
    pub worst_position: usize,
    /// Greedy tokens that differ, as indices into [`Case::greedy`].
    pub wrong_greedy: Vec<usize>,
}

#[derive(Deserialize)]
struct ManifestEntry {
    model: String,
    logits: String,
    rows: usize,
    vocab: usize,
    prompt: Vec<u32>,
    greedy: Vec<u32>,
}

#[derive(Deserialize)]
struct TopEntry {
    prompt: String,
    ids: Vec<u32>,
    greedy: Vec<u32>,
    top10: Vec<Vec<(u32, f32)>>,
}

fn read(path: &Path) -> Result<Vec<u8>, GoldenError> {
    fs::read(path).map_err(|source| GoldenError::Io { path: path.to_owned(), source })
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, GoldenError> {
    serde_json::from_slice(&read(path)?)
        .map_err(|error| GoldenError::Form { path: path.to_owned(), problem: error.to_string() })
}

/// The tokens that are fed: all that have a successor in the golden file.
fn fed(prompt: &[u32], greedy: &[u32]) -> Vec<u32> {
    [prompt, &greedy[..greedy.len().saturating_sub(1)]].concat()
}

/// Reads `manifest.json` of a folder with models and full logits.
///
/// # Errors
/// If a file cannot be read or its parts do not fit together.
pub fn read_manifest(folder: &Path) -> Result<Vec<Case>, GoldenError> {
    let manifest: BTreeMap<String, ManifestEntry> = read_json(&folder.join("manifest.json"))?;
    let case = |(name, entry): (String, ManifestEntry)| {
        let path = folder.join(&entry.logits);
        let bytes = read(&path)?;
        let logits: Vec<f32> = bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
        let tokens = fed(&entry.prompt, &entry.greedy);
        if tokens.len() != entry.rows || entry.vocab.checked_mul(entry.rows) != Some(logits.len()) {
            let problem = format!("{} values for {} tokens", logits.len(), tokens.len());
            return Err(GoldenError::Form { path, problem });
        }
        Ok(Case {
            name,
            model: folder.join(&entry.model),
            tokens,
            n_prompt: entry.prompt.len(),
            greedy: entry.greedy,
            expected: Expected::All(logits),
        })
    };
    manifest.into_iter().map(case).collect()
}

/// Reads a file of prompts with the ten likeliest tokens of each step, made with `model`.
///
/// # Errors
/// As [`read_manifest`].
pub fn read_top(path: &Path, model: &Path) -> Result<Vec<Case>, GoldenError> {
    let entries: Vec<TopEntry> = read_json(path)?;
    let case = |entry: TopEntry| {
        if entry.ids.is_empty() || entry.top10.len() != entry.greedy.len() {
            let problem = format!("prompt {:?}: {} steps", entry.prompt, entry.top10.len());
            return Err(GoldenError::Form { path: path.to_owned(), problem });
        }
        Ok(Case {
            name: entry.prompt,
            model: model.to_owned(),
            tokens: fed(&entry.ids, &entry.greedy),
            n_prompt: entry.ids.len(),
            greedy: entry.greedy,
            expected: Expected::Top(entry.top10),
        })
    };
    entries.into_iter().map(case).collect()
}

impl Case {
    /// KV pages that the case needs.
    pub fn n_pages(&self) -> u32 {
        (self.tokens.len() as u32).div_ceil(PAGE_TOKENS)
    }

    /// The case up to its first `n` expected positions: of full logits from the first token on, otherwise from the
    /// first greedy token on.
    pub fn beginning(&self, n: usize) -> Case {
        let mut case = self.clone();
        match &mut case.expected {
            Expected::All(logits) => {
                let n_vocab = logits.len() / self.tokens.len().max(1);
                logits.truncate(n.saturating_mul(n_vocab));
                case.tokens.truncate(n);
                case.greedy.truncate(n.saturating_sub(self.n_prompt.saturating_sub(1)));
            }
            Expected::Top(steps) => {
                steps.truncate(n);
                case.greedy.truncate(n);
                case.tokens.truncate(self.n_prompt.saturating_sub(1).saturating_add(n));
            }
        }
        case
    }

    /// Runs the case on `executor`, up to `chunk` tokens at a time, in slot 0 and the first pages.
    ///
    /// # Errors
    /// If the executor fails, or its vocabulary is another one than the file's.
    pub fn run(&self, executor: &mut dyn Executor, chunk: usize) -> Result<Report, GoldenError> {
        let logits = self.logits(executor, chunk)?;
        let n_vocab = executor.config().n_vocab;
        if let Expected::All(expected) = &self.expected
            && expected.len() != logits.len()
        {
            let problem = format!("the model has {n_vocab} tokens, the golden logits do not");
            return Err(GoldenError::Form { path: self.model.clone(), problem });
        }
        Ok(self.compare(&logits, n_vocab))
    }

    /// The logits of every position, `[tokens.len(), n_vocab]`.
    ///
    /// # Errors
    /// If the executor fails.
    pub fn logits(&self, executor: &mut dyn Executor, chunk: usize) -> Result<Vec<f32>, GoldenError> {
        let limits = executor.limits();
        let chunk = chunk.min(limits.n_batch as usize).min(limits.n_outputs as usize);
        let (mut all, mut logits) = (Vec::new(), Vec::new());
        for (i, tokens) in self.tokens.chunks(chunk).enumerate() {
            self.forward(executor, tokens, i * chunk, &mut logits)?;
            all.extend_from_slice(&logits);
        }
        Ok(all)
    }

    /// Runs the token at `position` alone, after those before it, as [`run`](Case::run) with chunks of one does.
    ///
    /// # Errors
    /// If the executor fails.
    pub fn step(&self, executor: &mut dyn Executor, position: usize) -> Result<(), GoldenError> {
        self.forward(executor, &self.tokens[position..][..1], position, &mut Vec::new())
    }

    fn forward(
        &self,
        executor: &mut dyn Executor,
        tokens: &[u32],
        start: usize,
        logits: &mut Vec<f32>,
    ) -> Result<(), GoldenError> {
        let (rows, pages) = (tokens.len() as u32, (0..self.n_pages()).collect());
        let span = Span { slot: 0, start: start as u32, rows, pages };
        let batch = Batch { tokens: tokens.to_vec(), spans: vec![span], outputs: (0..rows).collect() };
        Ok(executor.forward(&batch, logits)?)
    }

    /// Compares logits of every position with the expected ones.
    pub fn compare(&self, logits: &[f32], n_vocab: usize) -> Report {
        let row = |position: usize| &logits[position * n_vocab..][..n_vocab];
        let after_greedy = |i: usize| row(self.n_prompt - 1 + i);
        let errors: Vec<f64> = match &self.expected {
            Expected::All(expected) => {
                let rows = expected.chunks_exact(n_vocab).enumerate();
                rows.map(|(position, expected)| relative_l2(row(position), expected)).collect()
            }
            Expected::Top(steps) => {
                let step = |(i, top): (usize, &Vec<(u32, f32)>)| {
                    let difference = |(id, expected): &(u32, f32)| {
                        after_greedy(i)
                            .get(*id as usize)
                            .map_or(f64::INFINITY, |ours| f64::from((ours - expected).abs()))
                    };
                    top.iter().map(difference).fold(0.0, largest)
                };
                steps.iter().enumerate().map(step).collect()
            }
        };
        let worst_error = errors.iter().copied().fold(0.0, largest);
        let is_wrong = |i: &usize| argmax(after_greedy(*i)) != Some(self.greedy[*i] as usize);
        Report {
            n_positions: errors.len(),
            worst_error,
            worst_position: errors.iter().position(|error| error.to_bits() == worst_error.to_bits()).unwrap_or(0),
            wrong_greedy: (0..self.greedy.len()).filter(is_wrong).collect(),
        }
    }
}

/// The larger of two errors, NaN being the largest.
fn largest(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}
