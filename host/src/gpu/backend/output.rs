//! What comes back from a step: logits, or the tokens that the device chose.

use std::sync::Arc;

use bytemuck::Pod;

use super::tensor::Tensor;
use super::{GpuBackend, Result, allocating, device_error};
use crate::backend::Error;
use crate::gpu::device::{Device, Pinned};
use crate::gpu::memory::{Buffer, Slice};
use crate::gpu::ops::{self, Parts};

/// The chosen token of every output, and the room that choosing takes.
pub(super) struct Chosen<D: Device> {
    ids: Arc<Buffer<D, u32>>,
    part_value: Arc<Buffer<D, f32>>,
    part_index: Arc<Buffer<D, u32>>,
}

impl<D: Device> GpuBackend<D> {
    /// Notes the largest of the first `n_tokens` logits of `n` rows.
    pub(super) fn choose(&mut self, logits: &Tensor<D>, n_tokens: u32, n: u32) -> Result {
        // For all rows that there can ever be: a captured step keeps its addresses.
        let (rows, parts) = (logits.capacity() as usize, ops::n_part(n_tokens) as usize);
        let fits = |c: &Chosen<D>| c.ids.len() >= rows && c.part_value.len() >= rows * parts;
        if !self.chosen.as_ref().is_some_and(fits) {
            self.chosen = Some(Chosen {
                ids: self.keep("the chosen tokens", rows)?,
                part_value: self.keep("the chosen tokens", rows * parts)?,
                part_index: self.keep("the chosen tokens", rows * parts)?,
            });
        }
        let chosen = self.chosen.as_ref().expect("made above");
        let room = Parts { value: chosen.part_value.slice(), index: chosen.part_index.slice() };
        let ids = chosen.ids.part(..n as usize).map_err(device_error)?;
        let launched = ops::argmax(&*self.device, logits.rows(n)?, room, ids, n_tokens);
        self.done(launched)
    }

    pub(super) fn read_chosen(&mut self, n: u32, ids: &mut Vec<u32>) -> Result {
        if n == 0 {
            ids.clear();
            return self.device.synchronize().map_err(device_error);
        }
        let chosen = self.chosen.as_ref().map(|chosen| chosen.ids.clone());
        let chosen = chosen.ok_or_else(|| Error::Batch("no tokens were chosen".to_owned()))?;
        self.land(chosen.part(..n as usize).map_err(device_error)?, ids)
    }

    /// Waits for all work and copies `from` to `out`, through page-locked memory: a copy to any other is staged by
    /// the driver, at a fraction of the speed.
    pub(super) fn land<T: Pod>(&mut self, from: Slice<'_, T>, out: &mut Vec<T>) -> Result {
        out.resize(from.len(), T::zeroed());
        let n_bytes = size_of_val(out.as_slice());
        if n_bytes == 0 {
            return self.device.synchronize().map_err(device_error);
        }
        if self.landing.as_ref().is_none_or(|landing| landing.bytes().len() < n_bytes) {
            let landing = self.device.alloc_pinned(n_bytes.next_power_of_two());
            self.landing = Some(landing.map_err(|e| allocating("results", e))?);
        }
        let landing = self.landing.as_mut().expect("made above");
        // SAFETY: the wait below ends the copy before anything touches the memory; where it fails, the device is
        // beyond use, and dropping the memory waits for it.
        #[expect(unsafe_code, reason = "a transfer that outlives its call")]
        let event = unsafe { self.device.download_async(from.as_bytes(), landing) }.map_err(device_error)?;
        self.device.wait(&event).map_err(device_error)?;
        bytemuck::cast_slice_mut(out).copy_from_slice(&landing.bytes()[..n_bytes]);
        Ok(())
    }
}
