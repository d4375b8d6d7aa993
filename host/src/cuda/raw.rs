//! Driver declarations beside `cust`'s.
//!
//! `cust` 0.3.2 binds CUDA 11.4. What is newer is declared here, and so is every call whose error code
//! matters: `cust_raw` returns a Rust enum of the codes of its day, and a later driver may return
//! others, so these return plain integers. The symbols are the trampolines of [`super::driver`].
//!
//! Source: the CUDA driver API reference, and `cuda.h` for values and layouts.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use cust::sys::{CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUmodule, CUstream};

pub(super) const CUDA_SUCCESS: c_int = 0;
pub(super) const CUDA_ERROR_STUB_LIBRARY: c_int = 34;
pub(super) const CUDA_ERROR_NO_DEVICE: c_int = 100;
pub(super) const CUDA_ERROR_UNSUPPORTED_PTX_VERSION: c_int = 222;

/// `CUjit_option` values.
pub(super) const CU_JIT_INFO_LOG_BUFFER: c_uint = 3;
pub(super) const CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES: c_uint = 4;
pub(super) const CU_JIT_ERROR_LOG_BUFFER: c_uint = 5;
pub(super) const CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: c_uint = 6;

/// `CUfunction_attribute` values.
pub(super) const CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: c_uint = 0;
pub(super) const CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: c_uint = 1;
pub(super) const CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: c_uint = 3;
pub(super) const CU_FUNC_ATTRIBUTE_NUM_REGS: c_uint = 4;
pub(super) const CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: c_uint = 8;

/// `CUdevice_attribute`: shared memory that a block may opt in to. Newer than `cust`'s list.
pub(super) const CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_uint = 97;

/// `CUstreamCaptureMode`: calls of other threads do not disturb a capture.
pub(super) const CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: c_uint = 1;

/// `CUlaunchAttributeID`: the grid may start before the one ahead of it in the stream has ended, and
/// waits for it with `griddepcontrol.wait`.
pub(super) const CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: c_uint = 6;

/// `CUlaunchAttribute`: an id, and a union padded to 64 bytes that holds pointers.
#[repr(C, align(8))]
pub(super) struct LaunchAttribute {
    pub(super) id: c_uint,
    pub(super) pad: [u8; 4],
    /// The flag attributes use the first word.
    pub(super) value: [u32; 16],
}

/// `CUlaunchConfig`.
#[repr(C)]
pub(super) struct LaunchConfig {
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) shared_bytes: c_uint,
    pub(super) stream: CUstream,
    pub(super) attributes: *const LaunchAttribute,
    pub(super) n_attributes: c_uint,
}

const _: () = assert!(size_of::<LaunchAttribute>() == 72 && size_of::<LaunchConfig>() == 56);

#[allow(clashing_extern_declarations, reason = "cust_raw declares the same functions with enums for integers")]
unsafe extern "C" {
    pub(super) fn cuInit(flags: c_uint) -> c_int;
    pub(super) fn cuDriverGetVersion(version: *mut c_int) -> c_int;
    pub(super) fn cuGetErrorName(error: c_int, text: *mut *const c_char) -> c_int;
    pub(super) fn cuGetErrorString(error: c_int, text: *mut *const c_char) -> c_int;

    pub(super) fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: CUdevice) -> c_int;
    pub(super) fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: CUdevice) -> c_int;
    pub(super) fn cuCtxSetCurrent(context: CUcontext) -> c_int;
    pub(super) fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int;

    pub(super) fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        n_options: c_uint,
        options: *mut c_uint,
        values: *mut *mut c_void,
    ) -> c_int;
    pub(super) fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) -> c_int;
    pub(super) fn cuModuleUnload(module: CUmodule) -> c_int;
    pub(super) fn cuFuncGetAttribute(value: *mut c_int, attribute: c_uint, function: CUfunction) -> c_int;
    pub(super) fn cuFuncSetAttribute(function: CUfunction, attribute: c_uint, value: c_int) -> c_int;

    pub(super) fn cuLaunchKernelEx(
        config: *const LaunchConfig,
        function: CUfunction,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> c_int;
    #[allow(clippy::too_many_arguments, reason = "the driver's signature")]
    pub(super) fn cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: CUstream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> c_int;

    pub(super) fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream) -> c_int;
    pub(super) fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) -> c_int;
    pub(super) fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) -> c_int;
    pub(super) fn cuMemsetD8Async(to: CUdeviceptr, value: u8, bytes: usize, stream: CUstream) -> c_int;

    pub(super) fn cuStreamSynchronize(stream: CUstream) -> c_int;
    pub(super) fn cuEventCreate(event: *mut CUevent, flags: c_uint) -> c_int;
    pub(super) fn cuEventDestroy_v2(event: CUevent) -> c_int;
    pub(super) fn cuEventRecord(event: CUevent, stream: CUstream) -> c_int;
    pub(super) fn cuEventQuery(event: CUevent) -> c_int;
    pub(super) fn cuEventSynchronize(event: CUevent) -> c_int;
    pub(super) fn cuEventElapsedTime(ms: *mut f32, start: CUevent, end: CUevent) -> c_int;

    pub(super) fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_uint) -> c_int;
    pub(super) fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) -> c_int;
    pub(super) fn cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong) -> c_int;
    pub(super) fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream) -> c_int;
    pub(super) fn cuGraphExecDestroy(exec: CUgraphExec) -> c_int;
    pub(super) fn cuGraphDestroy(graph: CUgraph) -> c_int;
}
