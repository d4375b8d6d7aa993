//! The CPU backend: the oracle.
//!
//! Written from the definitions, one operation after the other: f32 with f64 sums where many terms meet.
//! `rayon` spreads rows over threads, `pulp` picks the vector instructions. Weights are read from the mapped
//! file, never copied.

mod attention;
mod backend;
mod delta_net;
pub mod dequant;
mod elementwise;
mod matmul;
mod moe;

use std::ops::{Deref, Range};
use std::sync::Arc;

use rayon::prelude::*;

use crate::backend::{self as api, Span};
use crate::gguf::Gguf;
use attention::Kv;
use delta_net::Recurrent;
pub use matmul::Matrix;
pub use moe::Routes;

/// Runs models on the CPU.
pub struct CpuBackend {
    file: Arc<Gguf>,
    /// Intermediate results of operations whose tasks write in another order than their output has.
    scratch: Vec<f32>,
}

impl CpuBackend {
    /// A backend for the model in `file`.
    pub fn new(file: Arc<Gguf>) -> CpuBackend {
        CpuBackend { file, scratch: Vec::new() }
    }
}

/// f32 values `[rows, cols]`.
pub struct Tensor {
    data: Vec<f32>,
    cols: usize,
}

impl Tensor {
    fn row(&self, m: usize) -> &[f32] {
        &self.data[m * self.cols..][..self.cols]
    }

    fn row_mut(&mut self, m: usize) -> &mut [f32] {
        &mut self.data[m * self.cols..][..self.cols]
    }

    /// The first `n` rows as one slice.
    fn rows(&self, n: usize) -> &[f32] {
        &self.data[..n * self.cols]
    }

    fn rows_mut(&mut self, n: usize) -> &mut [f32] {
        &mut self.data[..n * self.cols]
    }

    fn par_rows_mut(&mut self, n: usize) -> impl IndexedParallelIterator<Item = &mut [f32]> {
        let cols = self.cols;
        self.rows_mut(n).par_chunks_mut(cols)
    }
}

/// What every layer keeps between steps.
pub struct Cache {
    layers: Vec<LayerState>,
}

enum LayerState {
    Kv(Kv),
    Recurrent(Recurrent),
}

impl Cache {
    fn kv(&self, layer: u32) -> &Kv {
        match &self.layers[layer as usize] {
            LayerState::Kv(kv) => kv,
            LayerState::Recurrent(_) => panic!("layer {layer} has no attention"),
        }
    }

    fn kv_mut(&mut self, layer: u32) -> &mut Kv {
        match &mut self.layers[layer as usize] {
            LayerState::Kv(kv) => kv,
            LayerState::Recurrent(_) => panic!("layer {layer} has no attention"),
        }
    }

    fn recurrent_mut(&mut self, layer: u32) -> &mut Recurrent {
        match &mut self.layers[layer as usize] {
            LayerState::Recurrent(state) => state,
            LayerState::Kv(_) => panic!("layer {layer} has no recurrent state"),
        }
    }
}

/// A batch, and what its rows are.
pub struct Batch {
    batch: api::Batch,
    rows: Vec<Row>,
}

/// The sequence and position of one row.
#[derive(Clone, Copy)]
struct Row {
    /// Index in `spans`.
    span: usize,
    position: u32,
}

impl Batch {
    fn new(batch: &api::Batch) -> Batch {
        let spans = batch.spans.iter().enumerate();
        let rows = spans.flat_map(|(i, s)| (0..s.rows).map(move |r| Row { span: i, position: s.start + r })).collect();
        Batch { batch: batch.clone(), rows }
    }

    /// Every span with its range of rows.
    fn spans_with_rows(&self) -> impl Iterator<Item = (&Span, Range<usize>)> {
        self.batch.spans.iter().scan(0, |next, span| {
            let rows = *next..*next + span.rows as usize;
            *next = rows.end;
            Some((span, rows))
        })
    }
}

impl Deref for Batch {
    type Target = api::Batch;

    fn deref(&self) -> &api::Batch {
        &self.batch
    }
}
