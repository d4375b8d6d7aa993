//! A driver that does in host memory what `libcuda.so.1` does on a GPU, as far as `host check` goes.
//!
//! `tests/validation/fake_driver.rs` compiles it and puts it where the loader looks first, so that the
//! path from `dlopen` to graph replay runs on machines without a GPU: symbol table, argument
//! marshalling, handles, contexts, error texts. It is strict where the real one is: no current context,
//! a wrong struct layout, or a copy inside a capture are errors. It knows one kernel, `read_sweep`.
//!
//! `FAKE_DRIVER` asks for a fault: `no-device`, `cuda-11`, `bad-kernel`, `bad-ptx`, `launch-fault`.

#![allow(non_snake_case, reason = "the names are the driver's")]
#![allow(clippy::missing_safety_doc, unused_unsafe, reason = "one macro makes every function an unsafe one")]

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

type Handle = *mut c_void;

const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const NO_DEVICE: c_int = 100;
const INVALID_CONTEXT: c_int = 201;
const INVALID_PTX: c_int = 218;
const NOT_FOUND: c_int = 500;
const ILLEGAL_ADDRESS: c_int = 700;
const CAPTURE_UNSUPPORTED: c_int = 900;

const TOTAL_BYTES: usize = 128 << 20;
const CONTEXT: Handle = 0x1000 as Handle;
const OTHER: Handle = 0x2000 as Handle;

thread_local!(static CURRENT: Cell<bool> = const { Cell::new(false) });
/// The operations of the capture under way.
static CAPTURE: Mutex<Option<Vec<Op>>> = Mutex::new(None);
static LAUNCHES: AtomicUsize = AtomicUsize::new(0);

#[derive(Clone, Copy)]
enum Op {
    Fill { to: usize, value: u8, bytes: usize },
    Copy { to: usize, from: usize, bytes: usize },
    ReadSweep { blocks: usize, threads: usize, x: usize, sums: usize, n: usize },
}

impl Op {
    fn submit(self) -> c_int {
        match &mut *CAPTURE.lock().unwrap() {
            Some(ops) => ops.push(self),
            None => unsafe { self.run() },
        }
        0
    }

    unsafe fn run(self) {
        match self {
            Op::Fill { to, value, bytes } => unsafe { (to as *mut u8).write_bytes(value, bytes) },
            Op::Copy { to, from, bytes } => unsafe { (from as *const u8).copy_to(to as *mut u8, bytes) },
            Op::ReadSweep { blocks, threads, x, sums, n } => {
                let x = unsafe { std::slice::from_raw_parts(x as *const [u32; 4], n) };
                let sums = unsafe { std::slice::from_raw_parts_mut(sums as *mut u32, blocks * threads / 32) };
                sums.fill(0);
                for lane in 0..blocks * threads {
                    let first = lane / threads * threads * 8 + lane % threads;
                    for load in 0..8 {
                        let word = x[(first + load * threads).min(n - 1)];
                        sums[lane / 32] ^= word.iter().fold(0, |sum, part| sum ^ part);
                    }
                }
            }
        }
    }
}

fn asked(fault: &str) -> bool {
    std::env::var("FAKE_DRIVER").is_ok_and(|asked| asked == fault)
}

/// Defines driver functions. Those of the second kind fail where the thread has no current context.
macro_rules! driver {
    ($($name:ident($($arg:ident: $type:ty),*) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int { unsafe { $body } }
    )*};
}
macro_rules! driver_in_context {
    ($($name:ident($($arg:ident: $type:ty),*) $body:block)*) => {driver! {$(
        $name($($arg: $type),*) {
            if !CURRENT.get() {
                return INVALID_CONTEXT;
            }
            $body
        }
    )*}};
}

driver! {
    cuInit(flags: c_uint) {
        if asked("no-device") { NO_DEVICE } else if flags == 0 { 0 } else { INVALID_VALUE }
    }
    cuDriverGetVersion(version: *mut c_int) {
        *version = if asked("cuda-11") { 11_080 } else { 13_000 };
        0
    }
    cuGetErrorName(code: c_int, text: *mut *const c_char) {
        *text = match code {
            INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
            INVALID_PTX => c"CUDA_ERROR_INVALID_PTX",
            NOT_FOUND => c"CUDA_ERROR_NOT_FOUND",
            ILLEGAL_ADDRESS => c"CUDA_ERROR_ILLEGAL_ADDRESS",
            _ => return INVALID_VALUE,
        }.as_ptr();
        0
    }
    cuGetErrorString(code: c_int, text: *mut *const c_char) {
        let known = [INVALID_CONTEXT, INVALID_PTX, NOT_FOUND, ILLEGAL_ADDRESS].contains(&code);
        *text = c"the fake driver's words".as_ptr();
        if known { 0 } else { INVALID_VALUE }
    }
    cuDeviceGetCount(n: *mut c_int) { *n = 1; 0 }
    cuDeviceGet(device: *mut c_int, index: c_int) { *device = index; if index == 0 { 0 } else { INVALID_VALUE } }
    cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) {
        let text = c"Fake GPU".to_bytes_with_nul();
        if device != 0 || (len as usize) < text.len() { return INVALID_VALUE; }
        text.as_ptr().copy_to(name.cast(), text.len());
        0
    }
    cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) { *bytes = TOTAL_BYTES; 0 }
    cuDeviceGetUuid_v2(uuid: *mut [u8; 16], _device: c_int) { *uuid = std::array::from_fn(|i| i as u8 * 17); 0 }
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, _device: c_int) {
        // Threads a block, processors, cache, capability, and shared memory by choice.
        let known = [(1, 1024), (16, 4), (38, 50 << 20), (75, 9), (76, 0), (97, 227 << 10)];
        let Some((_, known)) = known.iter().find(|(known, _)| *known == attribute) else { return INVALID_VALUE };
        *value = *known;
        0
    }
    cuDevicePrimaryCtxRetain(context: *mut Handle, _device: c_int) { *context = CONTEXT; 0 }
    cuDevicePrimaryCtxRelease_v2(_device: c_int) { 0 }
    cuCtxSetCurrent(context: Handle) {
        CURRENT.set(context == CONTEXT);
        if context == CONTEXT { 0 } else { INVALID_CONTEXT }
    }
    cuGraphDestroy(graph: Handle) { drop(Box::from_raw(graph.cast::<Vec<Op>>())); 0 }
}

fn layout(bytes: usize) -> std::alloc::Layout {
    std::alloc::Layout::from_size_align(bytes, 256).expect("a size that was allocated")
}

static SIZES: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

unsafe fn allocate(bytes: usize) -> Result<usize, c_int> {
    let mut sizes = SIZES.lock().unwrap();
    let used: usize = sizes.iter().map(|(_, bytes)| bytes).sum();
    if bytes == 0 || bytes > TOTAL_BYTES - used {
        return Err(if bytes == 0 { INVALID_VALUE } else { OUT_OF_MEMORY });
    }
    let address = unsafe { std::alloc::alloc(layout(bytes)) } as usize;
    sizes.push((address, bytes));
    Ok(address)
}

unsafe fn release(address: usize) -> c_int {
    let mut sizes = SIZES.lock().unwrap();
    let Some(i) = sizes.iter().position(|(other, _)| *other == address) else { return INVALID_VALUE };
    let (address, bytes) = sizes.swap_remove(i);
    unsafe { std::alloc::dealloc(address as *mut u8, layout(bytes)) };
    0
}

fn outside_capture() -> c_int {
    if CAPTURE.lock().unwrap().is_some() { CAPTURE_UNSUPPORTED } else { 0 }
}

/// What waiting finds: the fault of a launch, where one was asked for.
fn settle() -> c_int {
    if asked("launch-fault") && LAUNCHES.load(Relaxed) > 0 { ILLEGAL_ADDRESS } else { outside_capture() }
}

unsafe fn launch(function: Handle, grid: [c_uint; 3], block: [c_uint; 3], shared: c_uint, params: *mut Handle) -> c_int {
    if function != OTHER || grid[1..] != [1, 1] || block[1..] != [1, 1] || shared != 0 {
        return INVALID_VALUE;
    }
    LAUNCHES.fetch_add(1, Relaxed);
    let (x, sums) = unsafe { ((*params).cast::<usize>().read(), (*params.add(1)).cast::<usize>().read()) };
    let n = unsafe { (*params.add(2)).cast::<u32>().read() } as usize;
    Op::ReadSweep { blocks: grid[0] as usize, threads: block[0] as usize, x, sums, n }.submit()
}

#[repr(C)]
pub struct Attribute {
    id: c_uint,
    pad: [u8; 4],
    value: [u64; 8],
}

#[repr(C)]
pub struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: Handle,
    attributes: *const Attribute,
    n_attributes: c_uint,
}

driver_in_context! {
    cuCtxSynchronize() { settle() }
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        *free = TOTAL_BYTES - SIZES.lock().unwrap().iter().map(|(_, bytes)| bytes).sum::<usize>();
        *total = TOTAL_BYTES;
        0
    }
    cuMemAlloc_v2(address: *mut usize, bytes: usize) {
        allocate(bytes).map_or_else(|code| code, |new| { *address = new; 0 })
    }
    cuMemFree_v2(address: usize) { release(address) }
    cuMemAllocHost_v2(address: *mut usize, bytes: usize) {
        allocate(bytes).map_or_else(|code| code, |new| { *address = new; 0 })
    }
    cuMemFreeHost(address: usize) { release(address) }
    cuModuleLoadDataEx(module: *mut Handle, image: *const c_char, n: c_uint, options: *const c_uint, values: *const Handle) {
        // The error log and its size, the other log and its size.
        if n != 4 || std::slice::from_raw_parts(options, 4) != [5, 6, 3, 4] { return INVALID_VALUE; }
        if CStr::from_ptr(image).to_str().is_err() { return INVALID_PTX; }
        if asked("bad-ptx") {
            let log = c"ptxas fatal: no such instruction".to_bytes_with_nul();
            if (*values.add(1) as usize) < log.len() { return INVALID_VALUE; }
            log.as_ptr().copy_to((*values).cast(), log.len());
            return INVALID_PTX;
        }
        *module = OTHER;
        0
    }
    cuModuleUnload(_module: Handle) { 0 }
    cuModuleGetFunction(function: *mut Handle, _module: Handle, name: *const c_char) {
        *function = if CStr::from_ptr(name) == c"read_sweep" { OTHER } else { CONTEXT };
        if asked("bad-kernel") && CStr::from_ptr(name) == c"read_sweep" { NOT_FOUND } else { 0 }
    }
    cuFuncGetAttribute(value: *mut c_int, attribute: c_uint, _function: Handle) {
        // Threads a block and registers; no static shared memory, no local memory.
        *value = [256, 0, 0, 0, 40].get(attribute as usize).copied().unwrap_or(0);
        0
    }
    cuFuncSetAttribute(_function: Handle, attribute: c_uint, value: c_int) {
        if attribute == 8 && value == 227 << 10 { 0 } else { INVALID_VALUE }
    }
    cuStreamCreateWithPriority(stream: *mut Handle, _flags: c_uint, _priority: c_int) { *stream = OTHER; 0 }
    cuStreamDestroy_v2(_stream: Handle) { 0 }
    cuStreamSynchronize(_stream: Handle) { settle() }
    cuMemcpyHtoDAsync_v2(to: usize, from: usize, bytes: usize, _stream: Handle) {
        Op::Copy { to, from, bytes }.run();
        outside_capture()
    }
    cuMemcpyDtoHAsync_v2(to: usize, from: usize, bytes: usize, _stream: Handle) {
        Op::Copy { to, from, bytes }.run();
        outside_capture()
    }
    cuMemcpyDtoDAsync_v2(to: usize, from: usize, bytes: usize, _stream: Handle) { Op::Copy { to, from, bytes }.submit() }
    cuMemsetD8Async(to: usize, value: u8, bytes: usize, _stream: Handle) { Op::Fill { to, value, bytes }.submit() }
    cuEventCreate(event: *mut Handle, _flags: c_uint) { *event = OTHER; 0 }
    cuEventDestroy_v2(_event: Handle) { 0 }
    cuEventRecord(_event: Handle, _stream: Handle) { outside_capture() }
    cuEventQuery(_event: Handle) { settle() }
    cuEventSynchronize(_event: Handle) { settle() }
    cuEventElapsedTime(ms: *mut f32, _start: Handle, _end: Handle) { *ms = 0.5; 0 }
    cuLaunchKernel(function: Handle, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint,
                   shared: c_uint, _stream: Handle, params: *mut Handle, _extra: Handle) {
        launch(function, [gx, gy, gz], [bx, by, bz], shared, params)
    }
    cuLaunchKernelEx(config: *const Config, function: Handle, params: *mut Handle, _extra: Handle) {
        let config = &*config;
        // Programmatic stream serialisation, allowed.
        if config.n_attributes != 1 || (*config.attributes).id != 6 || (*config.attributes).value[0] != 1 {
            return INVALID_VALUE;
        }
        launch(function, config.grid, config.block, config.shared, params)
    }
    cuStreamBeginCapture_v2(_stream: Handle, mode: c_uint) {
        let mut capture = CAPTURE.lock().unwrap();
        if mode != 1 || capture.is_some() { return CAPTURE_UNSUPPORTED; }
        *capture = Some(Vec::new());
        0
    }
    cuStreamEndCapture(_stream: Handle, graph: *mut Handle) {
        let Some(ops) = CAPTURE.lock().unwrap().take() else { return CAPTURE_UNSUPPORTED };
        *graph = Box::into_raw(Box::new(ops)).cast();
        0
    }
    cuGraphInstantiateWithFlags(exec: *mut Handle, graph: Handle, flags: u64) {
        if flags != 0 { return INVALID_VALUE; }
        *exec = Box::into_raw(Box::new((*graph.cast::<Vec<Op>>()).clone())).cast();
        0
    }
    cuGraphExecDestroy(exec: Handle) { drop(Box::from_raw(exec.cast::<Vec<Op>>())); 0 }
    cuGraphLaunch(exec: Handle, _stream: Handle) {
        let ops = (*exec.cast::<Vec<Op>>()).clone();
        ops.into_iter().for_each(|op| op.run());
        outside_capture()
    }
}
