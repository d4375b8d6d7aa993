//! Transfers through page-locked memory: weights up in bulk, results down without stopping the stream.
//!
//! A copy from pageable memory makes the driver stage it and blocks the caller. Here the host fills one
//! pinned chunk while the device copies from another, so a file in the page cache streams at the rate
//! of the slower of the two, and no second copy of the file is ever held.

use std::collections::VecDeque;

use bytemuck::Pod;
use rayon::prelude::*;

use super::device::{Device, DeviceError, Pinned, Result};
use super::memory::Slice;

/// The part of a chunk that one thread copies: below this, starting threads costs more than it gains.
const COPY_PART_BYTES: usize = 1 << 20;

/// A few pinned chunks that uploads pass through, in turn.
pub struct Staging<D: Device> {
    chunk_bytes: usize,
    free: Vec<D::Pinned>,
    /// Chunks that the device still reads, oldest first.
    in_flight: VecDeque<(D::Pinned, D::Event)>,
}

impl<D: Device> Staging<D> {
    /// `n_chunks` chunks of `chunk_bytes`, at least one of at least one byte.
    ///
    /// # Errors
    /// Where the host has too little memory to pin.
    pub fn new(device: &D, chunk_bytes: usize, n_chunks: usize) -> Result<Self> {
        let chunk_bytes = chunk_bytes.max(1);
        let free = (0..n_chunks.max(1)).map(|_| device.alloc_pinned(chunk_bytes)).collect::<Result<Vec<_>>>()?;
        Ok(Staging { chunk_bytes, free, in_flight: VecDeque::new() })
    }

    /// Bytes of a chunk.
    pub fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    /// Queues copying `from` to `to`, in chunks; the device is always the one that the chunks were made for.
    ///
    /// # Errors
    /// [`DeviceError::Range`] where the lengths differ, else the device's.
    pub fn upload(&mut self, device: &D, to: Slice<'_, u8>, from: &[u8]) -> Result<()> {
        to.check_len("the upload", from.len())?;
        for (i, part) in from.chunks(self.chunk_bytes).enumerate() {
            let start = i * self.chunk_bytes;
            self.upload_with(device, to.part(start..start + part.len())?, |chunk| copy_parallel(part, chunk))?;
        }
        Ok(())
    }

    /// Lets `fill` write at most one chunk's worth of bytes, and queues copying them to `to`.
    ///
    /// # Errors
    /// [`DeviceError::Range`] where `to` is longer than a chunk, else the device's.
    pub fn upload_with(&mut self, device: &D, to: Slice<'_, u8>, fill: impl FnOnce(&mut [u8])) -> Result<()> {
        if to.len() > self.chunk_bytes {
            return Err(DeviceError::Range(format!("{} bytes through chunks of {}", to.len(), self.chunk_bytes)));
        }
        let mut chunk = self.next_chunk(device)?;
        fill(&mut chunk.bytes_mut()[..to.len()]);
        // SAFETY: the chunk moves to `in_flight`, where nothing touches it until its event is done.
        #[expect(unsafe_code, reason = "a transfer that outlives the call")]
        let event = unsafe { device.upload_async(to, &chunk) }?;
        self.in_flight.push_back((chunk, event));
        Ok(())
    }

    /// Waits for all uploads, so that their failure is seen here.
    ///
    /// # Errors
    /// The device's.
    pub fn finish(&mut self, device: &D) -> Result<()> {
        while let Some((chunk, event)) = self.in_flight.pop_front() {
            device.wait(&event)?;
            self.free.push(chunk);
        }
        Ok(())
    }

    fn next_chunk(&mut self, device: &D) -> Result<D::Pinned> {
        if let Some(chunk) = self.free.pop() {
            return Ok(chunk);
        }
        let (chunk, event) = self.in_flight.pop_front().expect("a chunk is free or in flight: there is at least one");
        device.wait(&event)?;
        Ok(chunk)
    }
}

fn copy_parallel(from: &[u8], to: &mut [u8]) {
    to.par_chunks_mut(COPY_PART_BYTES)
        .zip(from.par_chunks(COPY_PART_BYTES))
        .for_each(|(to, from)| to.copy_from_slice(from));
}

/// Pinned slots that results come down through, in order, while the device runs on.
pub struct Readback<D: Device, T> {
    free: Vec<D::Pinned>,
    /// Slots under way: the memory, the end of its copy, and the number of elements.
    in_flight: VecDeque<(D::Pinned, D::Event, usize)>,
    slot_elems: usize,
    element: std::marker::PhantomData<T>,
}

impl<D: Device, T: Pod> Readback<D, T> {
    /// `n_slots` slots of `slot_elems` elements.
    ///
    /// # Errors
    /// Where the host has too little memory to pin.
    pub fn new(device: &D, slot_elems: usize, n_slots: usize) -> Result<Self> {
        let bytes =
            slot_elems.checked_mul(size_of::<T>()).ok_or_else(|| DeviceError::Range("a slot's size".to_owned()))?;
        let free = (0..n_slots.max(1)).map(|_| device.alloc_pinned(bytes)).collect::<Result<Vec<_>>>()?;
        Ok(Readback { free, in_flight: VecDeque::new(), slot_elems, element: std::marker::PhantomData })
    }

    /// Queues a copy of `from` into the next slot.
    ///
    /// # Errors
    /// [`DeviceError::Range`] where it is longer than a slot or every slot is in use, else the device's.
    pub fn push(&mut self, device: &D, from: Slice<'_, T>) -> Result<()> {
        if from.len() > self.slot_elems {
            return Err(DeviceError::Range(format!("{} elements into a slot of {}", from.len(), self.slot_elems)));
        }
        let mut slot = self.free.pop().ok_or_else(|| DeviceError::Range("no slot is free: pop first".to_owned()))?;
        // SAFETY: the slot moves to `in_flight`, where nothing touches it until its event is done.
        #[expect(unsafe_code, reason = "a transfer that outlives the call")]
        let event = unsafe { device.download_async(from.as_bytes(), &mut slot) }?;
        self.in_flight.push_back((slot, event, from.len()));
        Ok(())
    }

    /// Waits for the oldest push and puts its elements into `out`, in place of what was there. Returns
    /// `false`, and leaves `out` alone, where there is none.
    ///
    /// # Errors
    /// The device's.
    pub fn pop(&mut self, device: &D, out: &mut Vec<T>) -> Result<bool> {
        let Some((slot, event, len)) = self.in_flight.pop_front() else { return Ok(false) };
        device.wait(&event)?;
        out.clear();
        out.resize(len, T::zeroed());
        let bytes = bytemuck::cast_slice_mut::<T, u8>(out);
        bytes.copy_from_slice(&slot.bytes()[..bytes.len()]);
        self.free.push(slot);
        Ok(true)
    }

    /// How many pushes were not popped.
    pub fn n_in_flight(&self) -> usize {
        self.in_flight.len()
    }
}
