//! [`Device`] on an NVIDIA GPU.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use cuda_std::launch::{Kernel, KernelArgs, Launch};

use super::device::CudaDevice;
use super::error::{Error, Result as CudaResult, check};
use super::event::CudaEvent;
use super::graph::CudaGraph;
use super::memory::{CudaMemory, CudaPinned};
use super::module::Function;
use super::raw::{self, LaunchAttribute, LaunchConfig};
use crate::gpu::device::{
    Device, DeviceError, DeviceId, MemoryInfo, Pinned, Properties, Result, check_copy, check_transfer,
};
use crate::gpu::memory::Slice;
use crate::gpu::profile::Profile;

/// Blocks of a grid in x, y and z, on every device since compute capability 3.0.
const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// Threads of a block in z, on every device.
const MAX_BLOCK_Z: u32 = 64;

impl CudaDevice {
    /// Checks a launch against the kernel's and the device's limits.
    fn check_launch<K: Kernel>(&self, launch: &Launch) -> Result<&Function> {
        let refused =
            |reason: String| DeviceError::Launch { kernel: K::NAME, grid: launch.grid, block: launch.block, reason };
        let function = self.kernels.get(K::NAME).ok_or_else(|| refused("not among the loaded kernels".to_owned()))?;
        let threads = launch.block.iter().map(|&n| u64::from(n)).product::<u64>();
        if launch.grid.contains(&0) || threads == 0 {
            return Err(refused("empty".to_owned()));
        }
        if launch.grid.iter().zip(MAX_GRID).any(|(n, max)| *n > max) || launch.block[2] > MAX_BLOCK_Z {
            return Err(refused(format!("more than the device takes ({MAX_GRID:?} blocks)")));
        }
        if threads > u64::from(function.max_threads_per_block) {
            let (registers, max) = (function.n_registers, function.max_threads_per_block);
            return Err(refused(format!("with {registers} registers a block has at most {max} threads")));
        }
        if launch.shared_bytes > function.max_dynamic_shared_bytes {
            let (wanted, max) = (launch.shared_bytes, function.max_dynamic_shared_bytes);
            return Err(refused(format!("{wanted} bytes of shared memory, at most {max}")));
        }
        Ok(function)
    }

    /// # Safety
    /// `params` are the kernel's parameters in order; the rest as for [`Device::launch`].
    unsafe fn submit(&self, function: &Function, launch: &Launch, params: &[*mut c_void]) -> CudaResult<()> {
        let stream = self.stream.as_inner();
        let params = params.as_ptr().cast_mut();
        let extra = std::ptr::null_mut();
        if launch.pdl && self.overlaps_launches {
            let mut value = [0; 16];
            value[0] = 1;
            let id = raw::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            let attribute = LaunchAttribute { id, pad: [0; 4], value };
            let config = LaunchConfig {
                grid: launch.grid,
                block: launch.block,
                shared_bytes: launch.shared_bytes,
                stream,
                attributes: &attribute,
                n_attributes: 1,
            };
            // SAFETY: config and attribute live through the call; the rest is this function's contract.
            let code = unsafe { raw::cuLaunchKernelEx(&config, function.raw, params, extra) };
            return check("cuLaunchKernelEx", code);
        }
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
        // SAFETY: the handles are live; the rest is this function's contract.
        let code = unsafe {
            raw::cuLaunchKernel(function.raw, gx, gy, gz, bx, by, bz, launch.shared_bytes, stream, params, extra)
        };
        check("cuLaunchKernel", code)
    }

    fn is_capturing(&self) -> bool {
        self.capturing.load(Ordering::Relaxed)
    }

    /// Refuses what a capture cannot hold, before the driver would void the capture.
    fn outside_capture(&self, what: &'static str) -> Result<()> {
        if !self.is_capturing() {
            return Ok(());
        }
        Err(DeviceError::Unsupported { device: self.info.properties.name.clone(), what })
    }
}

/// Names the kernel in a failure of its launch.
fn of_kernel(kernel: &str) -> impl FnOnce(Error) -> Error {
    let kernel = kernel.to_owned();
    move |source| Error::Entry { kernel, source: Box::new(source) }
}

impl Device for CudaDevice {
    type Memory = CudaMemory;
    type Pinned = CudaPinned;
    type Event = CudaEvent;
    type Graph = CudaGraph;

    fn id(&self) -> DeviceId {
        self.id
    }

    fn properties(&self) -> &Properties {
        &self.info.properties
    }

    fn memory(&self) -> Result<MemoryInfo> {
        Ok(self.context.memory()?)
    }

    fn alloc_bytes(&self, bytes: usize) -> Result<CudaMemory> {
        self.outside_capture("allocate while a graph is captured")?;
        self.alloc_device(bytes)
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<CudaPinned> {
        self.outside_capture("allocate while a graph is captured")?;
        self.alloc_host(bytes)
    }

    unsafe fn launch<K: Kernel>(&self, _: K, launch: Launch, args: K::Args) -> Result<()> {
        let function = self.check_launch::<K>(&launch)?;
        self.context.bind()?;
        let timed = self.timers.is_on() && !self.is_capturing();
        let start = if timed { Some(CudaEvent::record(&self.context, &self.stream)?) } else { None };
        // SAFETY: `args` are of the types of the kernel's parameters, since one macro derives both the
        // entry and the tuple from the same signature; the rest is the caller's contract.
        args.with_params(|params| unsafe { self.submit(function, &launch, params) }).map_err(of_kernel(K::NAME))?;
        if let Some(start) = start {
            self.timers.add(K::NAME, start, CudaEvent::record(&self.context, &self.stream)?)?;
        }
        if self.sync_each_launch && !self.is_capturing() {
            // SAFETY: the stream is live.
            let code = unsafe { raw::cuStreamSynchronize(self.stream.as_inner()) };
            check("cuStreamSynchronize", code).map_err(of_kernel(K::NAME))?;
        }
        Ok(())
    }

    fn upload_bytes(&self, to: Slice<'_, u8>, from: &[u8]) -> Result<()> {
        check_transfer(self, to, from.len())?;
        self.outside_capture("upload while a graph is captured")?;
        if from.is_empty() {
            return Ok(());
        }
        self.context.bind()?;
        let stream = self.stream.as_inner();
        // SAFETY: `from` and `to` have the same length. The driver has read pageable memory when it
        // returns (it copies it to its own staging), so `from` need not outlive the call.
        let code = unsafe { raw::cuMemcpyHtoDAsync_v2(to.address(), from.as_ptr().cast(), from.len(), stream) };
        Ok(check("cuMemcpyHtoDAsync", code)?)
    }

    fn download_bytes(&self, from: Slice<'_, u8>, to: &mut [u8]) -> Result<()> {
        check_transfer(self, from, to.len())?;
        self.outside_capture("download while a graph is captured")?;
        if to.is_empty() {
            return Ok(());
        }
        self.context.bind()?;
        let stream = self.stream.as_inner();
        // SAFETY: `from` and `to` have the same length, and the copy ends before this returns.
        let code = unsafe { raw::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.address(), to.len(), stream) };
        // Waits even where queuing failed: nothing may write `to` after the return.
        let waited = self.synchronize();
        check("cuMemcpyDtoHAsync", code)?;
        waited
    }

    unsafe fn upload_async(&self, to: Slice<'_, u8>, from: &CudaPinned) -> Result<CudaEvent> {
        check_transfer(self, to, to.len().min(from.bytes().len()))?;
        self.outside_capture("upload while a graph is captured")?;
        self.context.bind()?;
        if !to.is_empty() {
            let (source, stream) = (from.bytes().as_ptr().cast(), self.stream.as_inner());
            // SAFETY: `from` has at least `to.len()` bytes, is page-locked, and stays unwritten until
            // the event is done, by this function's contract.
            let code = unsafe { raw::cuMemcpyHtoDAsync_v2(to.address(), source, to.len(), stream) };
            check("cuMemcpyHtoDAsync", code)?;
        }
        Ok(CudaEvent::record(&self.context, &self.stream)?)
    }

    unsafe fn download_async(&self, from: Slice<'_, u8>, to: &mut CudaPinned) -> Result<CudaEvent> {
        check_transfer(self, from, from.len().min(to.bytes().len()))?;
        self.outside_capture("download while a graph is captured")?;
        self.context.bind()?;
        if !from.is_empty() {
            let (target, stream) = (to.bytes_mut().as_mut_ptr().cast(), self.stream.as_inner());
            // SAFETY: `to` has at least `from.len()` bytes, is page-locked, and stays untouched until
            // the event is done, by this function's contract.
            let code = unsafe { raw::cuMemcpyDtoHAsync_v2(target, from.address(), from.len(), stream) };
            check("cuMemcpyDtoHAsync", code)?;
        }
        Ok(CudaEvent::record(&self.context, &self.stream)?)
    }

    fn copy_bytes(&self, from: Slice<'_, u8>, to: Slice<'_, u8>) -> Result<()> {
        check_copy(self, from, to)?;
        if from.is_empty() {
            return Ok(());
        }
        self.context.bind()?;
        let stream = self.stream.as_inner();
        // SAFETY: both ranges are live memory of this device, of one length and disjoint.
        let code = unsafe { raw::cuMemcpyDtoDAsync_v2(to.address(), from.address(), from.len(), stream) };
        Ok(check("cuMemcpyDtoDAsync", code)?)
    }

    fn fill_bytes(&self, to: Slice<'_, u8>, value: u8) -> Result<()> {
        self.check_owner(to)?;
        if to.is_empty() {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: the range is live memory of this device.
        let code = unsafe { raw::cuMemsetD8Async(to.address(), value, to.len(), self.stream.as_inner()) };
        Ok(check("cuMemsetD8Async", code)?)
    }

    fn synchronize(&self) -> Result<()> {
        self.outside_capture("wait while a graph is captured")?;
        self.context.bind()?;
        // SAFETY: the stream is live.
        let code = unsafe { raw::cuStreamSynchronize(self.stream.as_inner()) };
        Ok(check("cuStreamSynchronize", code)?)
    }

    fn record(&self) -> Result<CudaEvent> {
        self.outside_capture("record an event while a graph is captured")?;
        self.context.bind()?;
        Ok(CudaEvent::record(&self.context, &self.stream)?)
    }

    fn is_done(&self, event: &CudaEvent) -> Result<bool> {
        Ok(event.is_done()?)
    }

    fn wait(&self, event: &CudaEvent) -> Result<()> {
        Ok(event.wait()?)
    }

    fn elapsed_us(&self, start: &CudaEvent, end: &CudaEvent) -> Result<f64> {
        Ok(start.elapsed_us(end)?)
    }

    fn supports_graphs(&self) -> bool {
        self.has_graphs()
    }

    fn capture(&self, record: &mut dyn FnMut() -> Result<()>) -> Result<CudaGraph> {
        self.outside_capture("capture a graph while one is captured")?;
        self.capture_graph(record)
    }

    unsafe fn replay(&self, graph: &CudaGraph) -> Result<()> {
        self.outside_capture("replay a graph while one is captured")?;
        // SAFETY: the captured buffers are alive, by this function's contract.
        Ok(unsafe { self.launch_graph(graph) }?)
    }

    fn set_profiling(&self, on: bool) {
        self.timers.set(on);
    }

    fn n_profiled(&self) -> usize {
        self.timers.n_launches()
    }

    fn take_profile(&self) -> Result<Profile> {
        Ok(self.timers.take()?)
    }
}
