//! The GPU backend: [`Backend`](crate::backend::Backend) over the launchers in [`super::ops`].
//!
//! Each operation is one launch or two on the device's stream; nothing waits before
//! [`read`](crate::backend::Backend::read). What a step needs is allocated when the session is made or the
//! first time a shape of batch comes, and never moves, so that a step can be captured as a graph:
//! positions, pages and experts are read from device memory.

mod batch;
mod cache;
mod fused;
mod graph;
mod measure;
mod operations;
mod output;
mod products;
mod support;
mod tensor;
mod weights;

use std::any::Any;
use std::sync::Arc;

use bytemuck::Pod;
use gpu_kernels::kernels::rope::RopeParams;

use super::device::{Device, DeviceError};
use super::memory::Buffer;
use super::ops::OpError;
use crate::backend::{Error, Pairing, Result, Rope};

pub use batch::{Batch, BatchShape};
pub use cache::Cache;
pub use support::check_config;
pub use tensor::{Routes, Tensor};
pub use weights::{Matrix, Vector};

/// What the products take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// f32: as exact as the weights.
    F32,
    /// Blocks of 16 int8 values with a scale, where the weights are quantised: dp4a instead of conversions.
    #[default]
    Int8,
}

/// How keys and values are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvType {
    /// 4 bytes a value, for comparisons.
    F32,
    /// 2 bytes a value.
    #[default]
    F16,
}

impl KvType {
    /// Bytes of one value.
    pub fn bytes(self) -> u64 {
        match self {
            KvType::F32 => 4,
            KvType::F16 => 2,
        }
    }
}

/// How a backend works.
#[derive(Clone, Copy, Debug)]
pub struct BackendOptions {
    /// What the products take.
    pub activations: Activations,
    /// How keys and values are kept.
    pub kv: KvType,
    /// Capture a step as a graph when its shape comes again.
    pub graphs: bool,
    /// Let one kernel do what several operations ask for, where there is such a kernel.
    pub fuse: bool,
    /// Routes that fall on an expert on average, up to which its weights are multiplied with one after the other: of more
    /// the tiles of the tensor cores are worth their detour. Only with `fuse`.
    pub routes_per_expert: u32,
    /// Columns from which on the norm of a single row is part of the products that read it: the norm of a narrower one is
    /// over before their blocks, which fill the device, have begun. Only with `fuse`.
    pub norm_cols: u32,
    /// Let a product load its first weights while the kernel before it ends (sm_90a and later).
    pub overlap: bool,
    /// Rows from which on a step's products by quantised weights take bf16 activations in place of int8, where the GPU
    /// has products for these ([`Properties::wgmma`](super::device::Properties)).
    pub wide_rows: u32,
    /// Bytes of each of the two pinned buffers that weights go through.
    pub staging_bytes: usize,
}

impl Default for BackendOptions {
    fn default() -> Self {
        BackendOptions {
            activations: Activations::default(),
            kv: KvType::default(),
            graphs: true,
            fuse: true,
            // 64 tokens of 8 among 256: those experts that have any have 2.3.
            routes_per_expert: 2,
            // Measured on an H200: docs/performance.md.
            norm_cols: 4096,
            overlap: true,
            // With fewer, most of a tile would be empty.
            wide_rows: 96,
            // A copy of 64 MiB takes 1.2 ms at 55 GB/s, a thousand times what it takes to start one.
            staging_bytes: 64 << 20,
        }
    }
}

impl BackendOptions {
    /// The most exact forms: f32 activations and f32 keys and values.
    pub fn exact() -> Self {
        BackendOptions { activations: Activations::F32, kv: KvType::F32, ..Self::default() }
    }
}

/// A rotation's frequencies in radians a position, and the same in turns on the device.
type RopeTurns<D> = (Vec<f64>, Arc<Buffer<D, u64>>);

/// Runs models on a device.
pub struct GpuBackend<D: Device> {
    device: Arc<D>,
    options: BackendOptions,
    /// The way of the weights, while they are loaded.
    loader: Option<weights::Loader<D>>,
    /// The rotations in use, by their frequencies.
    ropes: Vec<RopeTurns<D>>,
    batches: batch::Pool<D>,
    partials: Option<tensor::Partials<D>>,
    /// What a delta net makes of its tokens ahead of the recurrence. It grows to the largest shape that was seen.
    chunks: Option<Arc<Buffer<D, f32>>>,
    chosen: Option<output::Chosen<D>>,
    /// Where results land on the host.
    landing: Option<D::Pinned>,
    marks: measure::Marks,
    /// Whether weights may still be under way to the device.
    loading: bool,
    /// Whether the step has so many rows that its kernels fill the device.
    large_step: bool,
    graphs: graph::Graphs<D>,
    /// Everything that was allocated for steps. A captured graph holds addresses; this keeps them valid
    /// as long as it can be replayed.
    kept: Vec<Arc<dyn Any + Send + Sync>>,
}

impl<D: Device> GpuBackend<D> {
    /// A backend on `device`.
    pub fn new(device: Arc<D>, options: BackendOptions) -> Self {
        GpuBackend {
            device,
            options,
            loader: None,
            ropes: Vec::new(),
            batches: batch::Pool::default(),
            partials: None,
            chunks: None,
            chosen: None,
            landing: None,
            marks: measure::Marks::default(),
            loading: true,
            large_step: false,
            graphs: graph::Graphs::default(),
            kept: Vec::new(),
        }
    }

    /// The device.
    pub fn device(&self) -> &Arc<D> {
        &self.device
    }

    /// Memory that lives as long as the backend, contents unspecified.
    fn keep<T: Pod + Send + Sync>(&mut self, what: &str, len: usize) -> Result<Arc<Buffer<D, T>>> {
        let buffer = Arc::new(self.device.alloc::<T>(len).map_err(|e| allocating(what, e))?);
        self.kept.push(buffer.clone());
        Ok(buffer)
    }

    /// The same of zeros.
    fn keep_zeroed<T: Pod + Send + Sync>(&mut self, what: &str, len: usize) -> Result<Arc<Buffer<D, T>>> {
        let buffer = self.keep(what, len)?;
        self.device.fill_bytes(buffer.slice().as_bytes(), 0).map_err(device_error)?;
        Ok(buffer)
    }

    /// The device's form of a rotation, uploaded when it is first used.
    fn rope_turns(&mut self, rope: &Rope) -> Result<Arc<Buffer<D, u64>>> {
        if let Some((_, turns)) = self.ropes.iter().find(|(inv_freq, _)| *inv_freq == rope.inv_freq) {
            return Ok(Arc::clone(turns));
        }
        let turns = super::ops::turns(rope.inv_freq.iter().copied());
        let on_device = self.keep("rope frequencies", turns.len())?;
        self.device.upload(on_device.slice(), &turns).map_err(device_error)?;
        self.ropes.push((rope.inv_freq.clone(), Arc::clone(&on_device)));
        Ok(on_device)
    }

    /// Whether a kernel may be launched while the one ahead of it still runs, and load its weights before that has
    /// ended: not while weights may still be under way to the device, nor in a large step, where blocks that wait take
    /// room from those that work.
    fn dependent(&self) -> bool {
        self.options.overlap && !self.loading && !self.large_step
    }

    /// Counts an operation's traffic.
    fn done(&mut self, launched: super::ops::Result<u64>) -> Result {
        self.mark_moved(launched.map_err(op_error)?);
        Ok(())
    }
}

/// A rotation of `n_head` heads, as the kernels take it.
fn rope_params(rope: &Rope, n_head: u32, head_dim: u32) -> RopeParams {
    let adjacent = u32::from(rope.pairing == Pairing::Adjacent);
    RopeParams { n_head, head_dim, n_rot: rope.n_rot, adjacent, magnitude: rope.magnitude }
}

/// A device's error, where `what` was to be allocated.
fn allocating(what: &str, error: DeviceError) -> Error {
    match error {
        DeviceError::OutOfMemory { wanted_bytes, free_bytes } => {
            Error::OutOfMemory { what: what.to_owned(), needed: wanted_bytes, free: free_bytes }
        }
        error => device_error(error),
    }
}

fn device_error(error: DeviceError) -> Error {
    match error {
        DeviceError::OutOfMemory { .. } => allocating("an operation", error),
        DeviceError::Unsupported { .. } => Error::Unsupported(error.to_string()),
        error => Error::Device(error.to_string()),
    }
}

fn op_error(error: OpError) -> Error {
    match error {
        OpError::Device(error) => device_error(error),
        OpError::Type { .. } => Error::Unsupported(error.to_string()),
        OpError::Operand { .. } => Error::Device(error.to_string()),
    }
}
