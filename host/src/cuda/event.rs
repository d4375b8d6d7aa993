//! Points in a stream.
//!
//! `cust`'s event is not used: a kernel's fault surfaces where an event is waited for, with a code that
//! `cust`'s enum may not know, and its stream-wait consumes the event.

use std::ffi::c_uint;
use std::sync::Arc;

use cust::stream::Stream;
use cust::sys::CUevent;

use super::device::SharedContext;
use super::error::{Result, check};
use super::raw;

/// `CU_EVENT_DEFAULT`: with a time stamp, and waited for by spinning.
const EVENT_DEFAULT: c_uint = 0;

/// `CUDA_ERROR_NOT_READY`, which is an answer and no error.
const NOT_READY: i32 = 600;

/// An event recorded in a stream.
pub struct CudaEvent {
    event: CUevent,
    context: Arc<SharedContext>,
}

// SAFETY: an event handle may be used from any thread; the driver locks.
unsafe impl Send for CudaEvent {}

impl CudaEvent {
    /// Records the stream's present end. The context is current.
    pub(super) fn record(context: &Arc<SharedContext>, stream: &Stream) -> Result<Self> {
        let mut event = std::ptr::null_mut();
        // SAFETY: writes one handle.
        check("cuEventCreate", unsafe { raw::cuEventCreate(&mut event, EVENT_DEFAULT) })?;
        let event = CudaEvent { event, context: Arc::clone(context) };
        // SAFETY: both handles are live.
        check("cuEventRecord", unsafe { raw::cuEventRecord(event.event, stream.as_inner()) })?;
        Ok(event)
    }

    pub(super) fn is_done(&self) -> Result<bool> {
        self.context.bind()?;
        // SAFETY: the handle is live.
        match unsafe { raw::cuEventQuery(self.event) } {
            NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }

    pub(super) fn wait(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the handle is live.
        check("cuEventSynchronize", unsafe { raw::cuEventSynchronize(self.event) })
    }

    /// Microseconds from `self` to `end`; both are done.
    pub(super) fn elapsed_us(&self, end: &CudaEvent) -> Result<f64> {
        self.context.bind()?;
        let mut ms = 0.0;
        // SAFETY: both handles are live, and one float is written.
        check("cuEventElapsedTime", unsafe { raw::cuEventElapsedTime(&mut ms, self.event, end.event) })?;
        Ok(f64::from(ms) * 1e3)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: destroyed only here. The driver allows it before the event is done.
        let _ = unsafe { raw::cuEventDestroy_v2(self.event) };
    }
}
