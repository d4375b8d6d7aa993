//! Device memory and page-locked host memory, over `cust`'s buffers.

use std::sync::Arc;

use cust::error::CudaError;
use cust::memory::{DeviceBuffer, LockedBuffer};
use cust::stream::Stream;

use super::device::{CudaDevice, SharedContext};
use super::error::check_cust;
use super::raw;
use crate::gpu::device::{DeviceError, Memory, Pinned, Result};

/// One allocation. Freeing it waits for the device, which is why steps allocate nothing.
pub struct CudaMemory {
    /// `None` of no bytes: the driver refuses empty allocations.
    buffer: Option<DeviceBuffer<u8>>,
    context: Arc<SharedContext>,
}

// SAFETY: a device address may be used and freed from any thread that binds its context, as drop does.
unsafe impl Send for CudaMemory {}
// SAFETY: shared use only reads the address and the length.
unsafe impl Sync for CudaMemory {}

impl Memory for CudaMemory {
    fn address(&self) -> u64 {
        // An empty slice's address is never read through; it only has to be aligned.
        self.buffer.as_ref().map_or(EMPTY_ADDRESS, |buffer| buffer.as_device_ptr().as_raw())
    }

    fn len_bytes(&self) -> usize {
        self.buffer.as_ref().map_or(0, |buffer| buffer.len())
    }
}

/// The address of an empty allocation: aligned, not null, and never mapped.
const EMPTY_ADDRESS: u64 = 256;

impl Drop for CudaMemory {
    fn drop(&mut self) {
        // Where binding fails the context is gone, and its memory with it; the free fails then too.
        let _ = self.context.bind();
        drop(self.buffer.take());
    }
}

/// Page-locked host memory. Dropping it waits for its device's stream first: a transfer may still use it.
/// (Not for the whole context, which would break a capture of another device object there.)
pub struct CudaPinned {
    buffer: Option<LockedBuffer<u8>>,
    stream: Arc<Stream>,
    context: Arc<SharedContext>,
}

// SAFETY: it is ordinary host memory, owned by this value alone; a stream's handle may be used from any thread.
unsafe impl Send for CudaPinned {}
// SAFETY: shared use only reads bytes.
unsafe impl Sync for CudaPinned {}

impl Pinned for CudaPinned {
    fn bytes(&self) -> &[u8] {
        self.buffer.as_deref().unwrap_or_default()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.buffer.as_deref_mut().unwrap_or_default()
    }
}

impl Drop for CudaPinned {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // A fault here is a kernel's, and is reported by the next call on the device.
            // SAFETY: the stream is live: this value shares it.
            let _ = unsafe { raw::cuStreamSynchronize(self.stream.as_inner()) };
        }
        drop(self.buffer.take());
    }
}

impl CudaDevice {
    pub(super) fn alloc_device(&self, bytes: usize) -> Result<CudaMemory> {
        self.context.bind()?;
        let context = Arc::clone(&self.context);
        if bytes == 0 {
            return Ok(CudaMemory { buffer: None, context });
        }
        // SAFETY: bytes have no invalid values, and the contents are documented as unspecified.
        match unsafe { DeviceBuffer::<u8>::uninitialized(bytes) } {
            Ok(buffer) => Ok(CudaMemory { buffer: Some(buffer), context }),
            Err(CudaError::OutOfMemory) => Err(DeviceError::OutOfMemory {
                wanted_bytes: bytes as u64,
                free_bytes: self.context.memory().map_or(0, |memory| memory.free_bytes),
            }),
            Err(error) => Err(check_cust::<()>("cuMemAlloc", Err(error)).expect_err("an error stays one").into()),
        }
    }

    pub(super) fn alloc_host(&self, bytes: usize) -> Result<CudaPinned> {
        self.context.bind()?;
        let (stream, context) = (Arc::clone(&self.stream), Arc::clone(&self.context));
        if bytes == 0 {
            return Ok(CudaPinned { buffer: None, stream, context });
        }
        let buffer = check_cust("cuMemAllocHost", LockedBuffer::new(&0u8, bytes))?;
        Ok(CudaPinned { buffer: Some(buffer), stream, context })
    }
}
