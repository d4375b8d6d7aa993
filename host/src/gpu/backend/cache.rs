//! Pages of keys and values, and recurrent state.

use std::sync::Arc;

use gpu_kernels::kernels::ssm_conv1d::RING;

use super::{GpuBackend, KvType, Result, device_error};
use crate::backend::{CacheShape, Error, LayerCache, MAX_CONV_INPUTS, PAGE_TOKENS};
use crate::gpu::device::Device;
use crate::gpu::memory::{Buffer, Slice};
use crate::gpu::ops::KvSlice;

// What a plan of the memory goes by.
const _: () = assert!(RING == MAX_CONV_INPUTS);

/// What all layers keep between steps.
pub struct Cache<D: Device> {
    layers: Vec<LayerMemory<D>>,
    pub(super) n_pages: u32,
    pub(super) n_slots: u32,
}

enum LayerMemory<D: Device> {
    Kv {
        k: Pages<D>,
        v: Pages<D>,
    },
    /// The ring of the convolution's inputs, `[n_slots, RING, conv_dim]`, and the states.
    Recurrent {
        conv: Arc<Buffer<D, f32>>,
        state: Arc<Buffer<D, f32>>,
    },
}

/// `[n_pages, PAGE_TOKENS, kv_dim]`.
enum Pages<D: Device> {
    F32(Arc<Buffer<D, f32>>),
    F16(Arc<Buffer<D, u16>>),
}

impl<D: Device> Pages<D> {
    fn new(backend: &mut GpuBackend<D>, len: usize) -> Result<Self> {
        Ok(match backend.options.kv {
            KvType::F32 => Pages::F32(backend.keep_zeroed("the KV cache", len)?),
            KvType::F16 => Pages::F16(backend.keep_zeroed("the KV cache", len)?),
        })
    }

    fn slice(&self) -> KvSlice<'_> {
        match self {
            Pages::F32(pages) => KvSlice::F32(pages.slice()),
            Pages::F16(pages) => KvSlice::F16(pages.slice()),
        }
    }
}

impl<D: Device> Cache<D> {
    pub(super) fn new(backend: &mut GpuBackend<D>, shape: &CacheShape) -> Result<Self> {
        let too_large = || Error::Unsupported("a cache that no address reaches".to_owned());
        let product = |a: u32, b: u32, c: u32| {
            (a as usize).checked_mul(b as usize).and_then(|n| n.checked_mul(c as usize)).ok_or_else(too_large)
        };
        let mut layer = |layer: &LayerCache| match *layer {
            LayerCache::Kv { kv_dim } => {
                let len = product(shape.n_pages, PAGE_TOKENS, kv_dim)?;
                Ok(LayerMemory::Kv { k: Pages::new(backend, len)?, v: Pages::new(backend, len)? })
            }
            // The kernels have four taps, whatever there are: `check_config` refuses other numbers.
            LayerCache::Recurrent { conv_dim, d_conv: _, state } => {
                let (conv, state) = (product(shape.n_slots, RING, conv_dim)?, product(shape.n_slots, state, 1)?);
                let what = "recurrent state";
                let (conv, state) = (backend.keep_zeroed(what, conv)?, backend.keep_zeroed(what, state)?);
                Ok(LayerMemory::Recurrent { conv, state })
            }
        };
        let layers = shape.layers.iter().map(&mut layer).collect::<Result<_>>()?;
        Ok(Cache { layers, n_pages: shape.n_pages, n_slots: shape.n_slots })
    }

    /// Keys and values of a layer.
    pub(super) fn kv(&self, layer: u32) -> Result<(KvSlice<'_>, KvSlice<'_>)> {
        match self.layers.get(layer as usize) {
            Some(LayerMemory::Kv { k, v }) => Ok((k.slice(), v.slice())),
            _ => Err(Error::Unsupported(format!("layer {layer} has no keys and values"))),
        }
    }

    /// The convolution's inputs and the state of a layer.
    pub(super) fn recurrent(&self, layer: u32) -> Result<(Slice<'_, f32>, Slice<'_, f32>)> {
        match self.layers.get(layer as usize) {
            Some(LayerMemory::Recurrent { conv, state }) => Ok((conv.slice(), state.slice())),
            _ => Err(Error::Unsupported(format!("layer {layer} has no recurrent state"))),
        }
    }

    /// Copies one slot of all layers to another.
    pub(super) fn copy_state(&self, device: &D, from: u32, to: u32) -> Result {
        if from.max(to) >= self.n_slots {
            return Err(Error::Batch(format!("state slots {from} and {to} of {}", self.n_slots)));
        }
        if from == to {
            return Ok(());
        }
        for layer in &self.layers {
            let LayerMemory::Recurrent { conv, state } = layer else { continue };
            for memory in [conv, state] {
                let each = memory.len() / self.n_slots as usize;
                let slot = |slot: u32| memory.part(slot as usize * each..(slot as usize + 1) * each);
                slot(from).and_then(|from| device.copy(from, slot(to)?)).map_err(device_error)?;
            }
        }
        Ok(())
    }
}
