//! Captured sequences of launches.
//!
//! A graph node starts about 2 us after the one it waits for, where a launch from the host takes longer
//! to issue than most kernels of a decode step run. (Measured on an H200.)

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cust::sys::{CUgraph, CUgraphExec};

use super::device::{CudaDevice, SharedContext};
use super::error::{Error, Result, check};
use super::raw;
use crate::gpu::device;

/// An instantiated graph.
pub struct CudaGraph {
    exec: CUgraphExec,
    context: Arc<SharedContext>,
}

// SAFETY: the handle may be used from any thread, one at a time, which `&mut`-free replay through a
// device's one stream keeps to: the driver orders launches of one graph.
unsafe impl Send for CudaGraph {}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: destroyed only here. A replay under way is finished by the driver first.
        let _ = unsafe { raw::cuGraphExecDestroy(self.exec) };
    }
}

/// A graph before it is instantiated; destroyed in any case.
struct Template(CUgraph);

impl Drop for Template {
    fn drop(&mut self) {
        // A capture that failed leaves no graph.
        if !self.0.is_null() {
            // SAFETY: destroyed only here.
            let _ = unsafe { raw::cuGraphDestroy(self.0) };
        }
    }
}

/// A capture under way. It ends when this is dropped, so that the stream is usable again in any case.
struct Capture<'a>(&'a CudaDevice);

impl<'a> Capture<'a> {
    fn begin(device: &'a CudaDevice) -> Result<Self> {
        let (stream, mode) = (device.stream.as_inner(), raw::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        // SAFETY: the stream is live. A capture of it that is under way is an error, and no more.
        check("cuStreamBeginCapture", unsafe { raw::cuStreamBeginCapture_v2(stream, mode) })?;
        device.capturing.store(true, Ordering::Relaxed);
        Ok(Capture(device))
    }

    fn end(self) -> Result<Template> {
        let mut template = Template(std::ptr::null_mut());
        let result = self.finish(&mut template);
        std::mem::forget(self);
        result.map(|()| template)
    }

    fn finish(&self, template: &mut Template) -> Result<()> {
        self.0.capturing.store(false, Ordering::Relaxed);
        // SAFETY: the stream is live; writes one handle, null where the capture broke.
        check("cuStreamEndCapture", unsafe { raw::cuStreamEndCapture(self.0.stream.as_inner(), &mut template.0) })
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        // What was captured so far is not wanted.
        let _ = self.finish(&mut Template(std::ptr::null_mut()));
    }
}

impl CudaDevice {
    /// Whether the driver has every function that a capture needs (CUDA 11.4).
    pub(super) fn has_graphs(&self) -> bool {
        ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuGraphLaunch"]
            .iter()
            .all(|function| self.driver.has(function))
    }

    pub(super) fn capture_graph(&self, record: &mut dyn FnMut() -> device::Result<()>) -> device::Result<CudaGraph> {
        if !self.has_graphs() {
            let (function, version) = ("cuGraphInstantiateWithFlags", self.driver.version());
            return Err(Error::NoFunction { function, version }.into());
        }
        self.context.bind()?;
        let capture = Capture::begin(self)?;
        // What `record` says names the kernel; the capture's own error would only say that it broke.
        record()?;
        Ok(self.instantiate(&capture.end()?)?)
    }

    fn instantiate(&self, template: &Template) -> Result<CudaGraph> {
        let mut exec = std::ptr::null_mut();
        // SAFETY: the template is the graph of a successful capture; writes one handle.
        let code = unsafe { raw::cuGraphInstantiateWithFlags(&mut exec, template.0, 0) };
        check("cuGraphInstantiate", code)?;
        Ok(CudaGraph { exec, context: Arc::clone(&self.context) })
    }

    /// # Safety
    /// As for [`device::Device::replay`].
    pub(super) unsafe fn launch_graph(&self, graph: &CudaGraph) -> Result<()> {
        self.context.bind()?;
        // SAFETY: both handles are live; the captured addresses are, by this function's contract.
        check("cuGraphLaunch", unsafe { raw::cuGraphLaunch(graph.exec, self.stream.as_inner()) })
    }
}
