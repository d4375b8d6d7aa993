//! What comes back from a step: logits, or the tokens that the device chose.

use std::sync::Arc;

use bytemuck::Pod;

use super::batch::Batch;
use super::tensor::Tensor;
use super::{GpuBackend, Result, allocating, device_error};
use crate::backend::Error;
use crate::gpu::device::{Device, Pinned};
use crate::gpu::memory::{Buffer, Slice};
use crate::gpu::ops::{self, Parts, SampleRoom};
use crate::gpu::staging::Readback;
use crate::model::executor::MAX_IN_FLIGHT;

/// What allocations are for, in errors.
const WHAT: &str = "the chosen tokens";

/// The chosen token of every output, and their way to the host.
pub(super) struct Chosen<D: Device> {
    ids: Arc<Buffer<D, u32>>,
    ways_back: Readback<D, u32>,
    /// The room that choosing takes. It may be replaced by a larger one; what was captured keeps its own.
    argmax: Option<Arc<ArgmaxRoom<D>>>,
    sample: Option<Arc<SampleRoom<D>>>,
}

/// Room between the phases of argmax.
struct ArgmaxRoom<D: Device> {
    value: Buffer<D, f32>,
    index: Buffer<D, u32>,
}

impl<D: Device> GpuBackend<D> {
    /// Notes the chosen token of every output.
    pub(super) fn choose_tokens(&mut self, logits: &Tensor<D>, n_tokens: u32, batch: &Batch<D>) -> Result {
        // For all rows that there can ever be: a captured step keeps its addresses.
        let rows = logits.capacity() as usize;
        if self.chosen.is_none() {
            let ids = self.keep(WHAT, rows)?;
            let ways_back = Readback::new(&*self.device, rows, MAX_IN_FLIGHT).map_err(|e| allocating(WHAT, e))?;
            self.chosen = Some(Chosen { ids, ways_back, argmax: None, sample: None });
        }
        let n = batch.shape.outputs;
        let logits = logits.rows(n)?;
        let launched = if let Some(draws) = batch.draws()? {
            let room = self.sample_room(rows, n_tokens)?;
            ops::sample(&*self.device, logits, draws, &room, self.chosen_ids(n)?, n_tokens)
        } else {
            let room = self.argmax_room(rows * ops::n_part(n_tokens) as usize)?;
            let parts = Parts { value: room.value.slice(), index: room.index.slice() };
            ops::argmax(&*self.device, logits, parts, self.chosen_ids(n)?, n_tokens)
        };
        self.done(launched)
    }

    fn chosen(&mut self) -> Result<&mut Chosen<D>> {
        self.chosen.as_mut().ok_or_else(|| Error::Batch("no tokens were chosen".to_owned()))
    }

    fn chosen_ids(&self, n: u32) -> Result<Slice<'_, u32>> {
        let chosen = self.chosen.as_ref().ok_or_else(|| Error::Batch("no tokens were chosen".to_owned()))?;
        chosen.ids.part(..n as usize).map_err(device_error)
    }

    fn argmax_room(&mut self, n_parts: usize) -> Result<Arc<ArgmaxRoom<D>>> {
        if let Some(room) = self.chosen()?.argmax.as_ref().filter(|room| room.value.len() >= n_parts) {
            return Ok(room.clone());
        }
        let room = self.device.alloc(n_parts).and_then(|value| {
            let index = self.device.alloc(n_parts)?;
            Ok(Arc::new(ArgmaxRoom { value, index }))
        });
        let room = room.map_err(|e| allocating(WHAT, e))?;
        self.kept.push(room.clone());
        self.chosen()?.argmax = Some(room.clone());
        Ok(room)
    }

    fn sample_room(&mut self, rows: usize, n_tokens: u32) -> Result<Arc<SampleRoom<D>>> {
        if let Some(room) = self.chosen()?.sample.as_ref().filter(|room| room.fits(rows, n_tokens)) {
            return Ok(room.clone());
        }
        let room = Arc::new(SampleRoom::new(&*self.device, rows, n_tokens).map_err(|e| allocating(WHAT, e))?);
        self.kept.push(room.clone());
        self.chosen()?.sample = Some(room.clone());
        Ok(room)
    }

    /// Gives the rows of a batch that are fed the tokens which the last step chose.
    pub(super) fn feed_chosen(&mut self, batch: &Batch<D>) -> Result {
        let Some((fed, chosen)) = batch.fed()? else { return Ok(()) };
        // SAFETY: no row of the batch is fed from beyond these chosen tokens: that was checked when it was made.
        #[expect(unsafe_code, reason = "indices in device memory")]
        let launched = unsafe { ops::feed(&*self.device, &fed, chosen) };
        self.done(launched)
    }

    /// The tokens that the last step chose, of which there are at least `n`.
    pub(super) fn chosen_before(&mut self, n: u32) -> Result<Arc<Buffer<D, u32>>> {
        let ids = &self.chosen()?.ids;
        if n as usize > ids.len() {
            return Err(Error::Batch(format!("output {} of {} of the step before", n - 1, ids.len())));
        }
        Ok(ids.clone())
    }

    /// Queues the way back of the first `n` chosen tokens.
    pub(super) fn push_chosen(&mut self, n: u32) -> Result {
        let device = self.device.clone();
        let chosen = self.chosen()?;
        let ids = chosen.ids.part(..n as usize).map_err(device_error)?;
        chosen.ways_back.push(&device, ids).map_err(device_error)
    }

    /// Waits for the oldest step on its way back.
    pub(super) fn pop_chosen(&mut self, ids: &mut Vec<u32>) -> Result {
        let device = self.device.clone();
        match self.chosen()?.ways_back.pop(&device, ids) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::Batch("no tokens are on their way".to_owned())),
            Err(e) => Err(device_error(e)),
        }
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
