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
    /// Of [`Backend::take_narrowest_choice`](api::Backend::take_narrowest_choice).
    narrowest_choice: Option<f32>,
}

impl CpuBackend {
    /// A backend for the model in `file`.
    pub fn new(file: Arc<Gguf>) -> CpuBackend {
        CpuBackend { file, scratch: Vec::new(), narrowest_choice: None }
    }
}

/// Zeros that take memory only when they are first written.
///
/// # Errors
/// If the machine cannot have that much.
fn zeros(what: &str, rows: usize, cols: usize) -> api::Result<Vec<f32>> {
    let elems = rows.saturating_mul(cols);
    // `vec!` asks the system for zero pages, but ends the process where it gets none: ask first.
    match Vec::<f32>::new().try_reserve_exact(elems) {
        Ok(()) => Ok(vec![0.0; elems]),
        Err(_) => {
            let needed = (elems as u64).saturating_mul(4);
            Err(api::Error::OutOfMemory { what: what.to_owned(), needed, free: available_bytes() })
        }
    }
}

/// Memory that the system could still give, for error messages; 0 where it does not say.
fn available_bytes() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
    kib.map_or(0, |kib: u64| kib.saturating_mul(1024))
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
