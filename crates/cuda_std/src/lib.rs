//! What a kernel may ask of the device.
//!
//! Compiled for `nvptx64-nvidia-cuda` this crate is the instructions; compiled for the host it is an
//! emulated device ([`emu`]) that runs the same kernel source lane by lane and reports what a GPU would
//! not: accesses out of bounds, missing barriers, reads of memory that nobody wrote.
//!
//! It stands in for rust-cuda's crate of the same name, which needs a compiler backend of its own, and
//! has the same API wherever both have a thing: `#[kernel]`, [`thread`], [`warp`], math. Beyond
//! upstream: [`mem`] (hinted and ordered loads), [`int8`], [`mma`], [`wgmma`], [`cp_async`],
//! [`pdl`].
//!
//! | module | what | PTX |
//! |---|---|---|
//! | [`thread`], [`block`], [`warp`] | who am I; barriers; shuffles and votes | `%tid`, `bar.sync`, `shfl.sync`, `vote.sync` |
//! | [`mem`], [`atomic`] | global memory | `ld/st.global`, `atom`, `red`, `fence` |
//! | [`shared`], [`cp_async`] | shared memory | `ld/st.shared`, `cp.async` |
//! | [`math`], [`convert`], [`int8`], [`mma`] | arithmetic | `ex2.approx`, `cvt`, `dp4a`, `mma.sync` |
//! | [`wgmma`] | products of four warps, on Hopper | `wgmma.mma_async` |
//! | [`pdl`] | programmatic dependent launch | `griddepcontrol` |
//! | [`launch`] | a kernel as the host sees it | |
//!
//! Each module has its device code in `mod imp` under `cfg(target_arch = "nvptx64")` and its emulated
//! counterpart beside it. Kernels touch memory only through this crate, never by dereferencing: that is
//! what lets the emulator see every access.

#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    allow(internal_features),
    feature(asm_experimental_arch, link_llvm_intrinsics, stdarch_nvptx)
)]

pub mod atomic;
pub mod block;
pub mod convert;
pub mod cp_async;
#[cfg(not(target_arch = "nvptx64"))]
pub mod emu;
pub mod int8;
pub mod launch;
pub mod math;
pub mod mem;
pub mod mma;
pub mod pdl;
pub mod prelude;
pub mod shared;
pub mod thread;
pub mod vector;
pub mod warp;
pub mod wgmma;
mod word;

pub use bytemuck::{Pod, Zeroable};
/// What is refused, at compile time:
///
/// ```compile_fail
/// #[cuda_std::kernel] // a reference
/// unsafe fn refused(x: &'static f32) {}
/// ```
/// ```compile_fail
/// #[cuda_std::kernel] // not an unsafe function
/// fn refused(x: *const f32) {}
/// ```
/// ```compile_fail
/// #[cuda_std::kernel] // a result
/// unsafe fn refused(x: *const f32) -> f32 { 0.0 }
/// ```
/// ```
/// #[cuda_std::kernel]
/// unsafe fn accepted(x: *const f32) {}
/// ```
pub use cuda_std_macros::kernel;
pub use vector::{F32x2, F32x4, I32x2, I32x4, U32x2, U32x4};
pub use word::{Word, opaque, opaque_ptr};

/// There is nobody to tell: stop the grid, which the host sees as a launch error.
#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: `trap` ends the grid.
    unsafe { core::arch::nvptx::trap() }
}
