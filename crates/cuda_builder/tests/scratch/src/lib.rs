//! Two kernels: one with launch bounds and a target-dependent instruction, one that needs nothing.

#![no_std]
#![feature(abi_ptx, asm_experimental_arch, stdarch_nvptx)]

use core::arch::{asm, global_asm, nvptx};

global_asm!("// cuda_std.bounds axpy 256 2");

unsafe extern "C" {
    fn __nvvm_reflect(name: *const u8) -> i32;
}

/// `y = a·x + y`, after the kernel before it where the GPU can start kernels early.
///
/// # Safety
/// `x` and `y` have `n` elements; `y` is not written by anyone else.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn axpy(x: *const f32, y: *mut f32, a: f32, n: u32) {
    // SAFETY: the name is a C string; LLVM replaces the call with a constant.
    if unsafe { __nvvm_reflect(c"__CUDA_ARCH".as_ptr().cast()) } >= 900 {
        // SAFETY: waits for the grid before this one; touches no register.
        unsafe { asm!("griddepcontrol.wait;", options(nostack)) };
    }
    // SAFETY: reads a special register.
    let i = unsafe { nvptx::_thread_idx_x() } as u32;
    if i < n {
        // SAFETY: `i < n`, the extent of both.
        unsafe { *y.add(i as usize) += a * *x.add(i as usize) };
    }
}

/// `y[0] = 1`.
///
/// # Safety
/// `y` has an element.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn one(y: *mut f32) {
    // SAFETY: the caller's.
    unsafe { *y = 1.0 };
}

/// Is no kernel, so it must not be in the PTX.
#[unsafe(no_mangle)]
pub extern "C" fn not_a_kernel() {}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
