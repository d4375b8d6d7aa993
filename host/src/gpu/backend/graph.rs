//! Steps as captured graphs: one for each shape of batch that comes more than once.
//!
//! A decode step is hundreds of launches of a few microseconds, and issuing one from the host takes about as
//! long. A graph holds them all; what changes between steps (tokens, positions, pages) is in device memory.

use std::collections::HashMap;

use super::batch::{Batch, BatchShape};
use super::{GpuBackend, Result, device_error};
use crate::gpu::device::Device;

/// The kernels of larger batches run long enough to hide a launch.
const MAX_ROWS: u32 = 64;
/// Longer spans are parts of prompts, whose shapes hardly ever repeat; a step of decoding has one row of a sequence, or
/// a few drafts.
const MAX_SPAN_ROWS: u32 = 8;
/// Graphs kept, each some 500 KB of the host's memory. Shapes are few: sequences by powers of two of the context.
const MAX_GRAPHS: usize = 128;

/// The shape of a step, its kind, and where its batch lies.
type Key = (BatchShape, u32, u64);

/// What is known of a shape.
enum Known<G> {
    /// It came once, and everything that it needs is allocated.
    Once,
    Captured(G),
}

/// The captured steps.
pub(super) struct Graphs<D: Device> {
    by_shape: HashMap<Key, Known<D::Graph>>,
}

impl<D: Device> Default for Graphs<D> {
    fn default() -> Self {
        Graphs { by_shape: HashMap::new() }
    }
}

impl<D: Device> GpuBackend<D> {
    /// Runs a step, or replays it where its shape has been captured.
    pub(super) fn run_or_replay(
        &mut self,
        batch: &Batch<D>,
        kind: u32,
        step: impl FnOnce(&mut Self) -> Result,
    ) -> Result {
        self.large_step = batch.shape.rows > MAX_ROWS;
        let repeats = !self.large_step && batch.shape.span_rows <= MAX_SPAN_ROWS;
        if !self.options.graphs || !repeats || self.marks.is_on() || !self.device.supports_graphs() {
            return step(self);
        }
        let key = (batch.shape, kind, batch.address());
        match self.graphs.by_shape.get(&key) {
            None => {
                if self.graphs.by_shape.len() >= MAX_GRAPHS {
                    self.graphs.by_shape.clear();
                }
                // A step that fails may not have allocated all it needs, so it counts as never seen.
                step(self)?;
                self.graphs.by_shape.insert(key, Known::Once);
                Ok(())
            }
            Some(Known::Once) => {
                let graph = self.capture(step)?;
                let result = self.replay(&graph);
                self.graphs.by_shape.insert(key, Known::Captured(graph));
                result
            }
            Some(Known::Captured(graph)) => self.replay(graph),
        }
    }

    fn capture(&mut self, step: impl FnOnce(&mut Self) -> Result) -> Result<D::Graph> {
        let device = self.device.clone();
        let (mut step, mut outcome) = (Some(step), Ok(()));
        let graph = device.capture(&mut || {
            if let Some(step) = step.take() {
                outcome = step(self);
            }
            Ok(())
        });
        // The step's own error says more than that of the capture which it broke.
        outcome?;
        graph.map_err(device_error)
    }

    #[expect(unsafe_code, reason = "a replay uses the addresses of the capture")]
    fn replay(&self, graph: &D::Graph) -> Result {
        // SAFETY: activations, weights, cache and batch are all from `keep`, which frees nothing before the
        // backend is dropped, and the graphs with it.
        unsafe { self.device.replay(graph) }.map_err(device_error)
    }
}
