//! Programmatic dependent launch: a grid starts while the one ahead of it in the stream still runs.
//!
//! A kernel launched that way may read what the grid ahead wrote only after [`grid_dependency_wait`];
//! before it, it fetches what no kernel writes: weights. Every kernel of a chain waits, for a chain is only
//! as safe as its links. And it waits before it calls [`launch_dependents`]: then only the one grid ahead can still
//! be running, and what was written by those before it may be read at once, such as a state that is written once a
//! step. Loads ahead of the wait are not [`ld_nc`](crate::mem::ld_nc): ptxas moves those.
//!
//! Below sm_90a both are nothing, as on the host: grids of a stream then run one after another.
//!
//! PTX ISA: "griddepcontrol".

/// Waits until the grids this one depends on have ended and their writes are visible.
#[inline(always)]
pub fn grid_dependency_wait() {
    #[cfg(target_arch = "nvptx64")]
    if is_sm_90() {
        // SAFETY: no precondition. It clobbers memory, so the compiler leaves accesses on their side.
        unsafe { core::arch::asm!("griddepcontrol.wait;", options(nostack)) };
    }
}

/// Tells that the next grid may start once every block of this one has said so or ended. It flushes nothing:
/// the next grid still waits for this one's end before it may read what this one writes.
#[inline(always)]
pub fn launch_dependents() {
    #[cfg(target_arch = "nvptx64")]
    if is_sm_90() {
        // SAFETY: no precondition.
        unsafe { core::arch::asm!("griddepcontrol.launch_dependents;", options(nostack)) };
    }
}

/// Whether the PTX is for sm_90a or later.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
fn is_sm_90() -> bool {
    cuda_arch() >= 900
}

/// The PTX's target, ten times its number. One compilation serves all targets, so this is no `cfg`: LLVM makes
/// the call a constant once it knows the target, and drops the branch that is not taken.
///
/// Source: LLVM, "User Guide for NVPTX Back-end", "NVVM Reflect".
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
pub(crate) fn cuda_arch() -> i32 {
    unsafe extern "C" {
        fn __nvvm_reflect(name: *const core::ffi::c_char) -> i32;
    }
    // SAFETY: the argument is a constant C string, as the pass asks.
    unsafe { __nvvm_reflect(c"__CUDA_ARCH".as_ptr()) }
}
