//! Stand-in until the CPU backend is merged.

use crate::backend;
use crate::model::config::Config;

/// What an executor was allocated for.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Physical KV pages.
    pub n_pages: u32,
    /// Recurrent-state slots, checkpoints included.
    pub n_slots: u32,
    /// Rows of a batch.
    pub n_batch: u32,
    /// Output rows of a batch.
    pub n_outputs: u32,
}

/// A loaded model on some device.
pub trait Executor: Send {
    /// Hyperparameters.
    fn config(&self) -> &Config;
    /// What was allocated.
    fn limits(&self) -> Limits;
    /// Runs a batch; `logits` is `[batch.outputs.len(), n_vocab]`.
    fn forward(&mut self, batch: &backend::Batch, logits: &mut Vec<f32>) -> backend::Result;
    /// Final-norm hidden states of all rows.
    fn hidden(&mut self, batch: &backend::Batch, out: &mut Vec<f32>) -> backend::Result;
    /// Copies recurrent state between slots.
    fn copy_state(&mut self, from: u32, to: u32) -> backend::Result;
}
