//! What the engine and its tests ask of a loaded model.

use super::config::Config;
#[cfg(doc)]
use crate::backend::PAGE_TOKENS;
use crate::backend::{Batch, Choose, Error, Measured, Result};

/// How much a session can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// KV pages of [`PAGE_TOKENS`] tokens.
    pub n_pages: u32,
    /// Slots of recurrent state.
    pub n_slots: u32,
    /// Rows of a batch.
    pub n_batch: u32,
    /// Rows of a batch whose logits may be wanted.
    pub n_outputs: u32,
}

/// Stands for the chosen token of a row that has none: a logit is not a number, or nothing can be drawn.
pub const NO_TOKEN: u32 = u32::MAX;

/// Steps that may be submitted and not collected.
pub const MAX_IN_FLIGHT: usize = 2;

/// A loaded model on some device.
pub trait Executor: Send {
    /// The model's shape.
    fn config(&self) -> &Config;
    /// What a batch must stay within.
    fn limits(&self) -> Limits;
    /// Runs a batch and writes the logits of its outputs, `[batch.outputs.len(), n_vocab]`.
    ///
    /// # Errors
    /// If the batch is not valid, which changes nothing; or if the device fails.
    fn forward(&mut self, batch: &Batch, logits: &mut Vec<f32>) -> Result;
    /// Whether the device chooses tokens: whether there are [`Executor::submit`] and [`Executor::collect`].
    fn chooses(&self) -> bool {
        false
    }
    /// Queues a batch whose outputs' tokens the device chooses, and does not wait. At most [`MAX_IN_FLIGHT`] batches
    /// are queued at once. Other calls take effect after it, in the order of the calls.
    ///
    /// # Errors
    /// If batch and choice are not valid, which changes nothing; or if the device fails.
    fn submit(&mut self, batch: &Batch, choose: &Choose) -> Result {
        let _ = (batch, choose);
        Err(Error::Unsupported("choosing a token".to_owned()))
    }
    /// Waits for the oldest submitted batch and writes the token of each of its outputs, or [`NO_TOKEN`].
    ///
    /// # Errors
    /// If none was submitted, or the device fails.
    fn collect(&mut self, ids: &mut Vec<u32>) -> Result {
        let _ = ids;
        Err(Error::Unsupported("choosing a token".to_owned()))
    }
    /// Whether the model guesses further tokens: whether there is [`Executor::draft`].
    fn drafts(&self) -> bool {
        false
    }
    /// After [`Executor::forward`]: guesses `n` tokens below `n_tokens` after the outputs of `batch`, which has the
    /// rows of the batch that was run, each with the token that follows it (any token where that is not known and no
    /// output). Writes `[batch.outputs.len(), n]` ids; a wrong guess may be any number. An output is the only one of
    /// its span, and the span's pages hold the `n` positions after its row.
    ///
    /// # Errors
    /// As [`Executor::forward`].
    fn draft(&mut self, batch: &Batch, n_tokens: u32, n: u32, ids: &mut Vec<u32>) -> Result {
        let _ = (batch, n_tokens, n, ids);
        Err(Error::Unsupported("guessing tokens".to_owned()))
    }
    /// Runs a batch and writes the normed hidden states of all its rows, `[M, n_embd]`.
    ///
    /// # Errors
    /// As [`Executor::forward`].
    fn hidden(&mut self, batch: &Batch, out: &mut Vec<f32>) -> Result;
    /// Copies a sequence's recurrent state from one slot to another.
    ///
    /// # Errors
    /// If there is no such slot, or the device fails.
    fn copy_state(&mut self, from: u32, to: u32) -> Result;
    /// Times every kernel from now on, or no more. Steps are slower meanwhile.
    fn set_profiling(&mut self, on: bool) {
        let _ = on;
    }
    /// What was measured since; `None` where the device has no kernels.
    ///
    /// # Errors
    /// If the device fails.
    fn take_profile(&mut self) -> Result<Option<Measured>> {
        Ok(None)
    }
    /// By how much the logit of an expert that was chosen was above that of one that was not, at least, in all layers and
    /// rows since the last call; `None` where there was none, or the device does not say.
    fn take_narrowest_choice(&mut self) -> Option<f32> {
        None
    }
}
