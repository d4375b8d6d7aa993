//! The block's barrier, and reductions over a block.
//!
//! PTX ISA: "Parallel Synchronization and Communication Instructions: bar, barrier".

use crate::shared::Shared;
use crate::warp;

#[cfg(target_arch = "nvptx64")]
mod imp {
    //! LLVM's intrinsics rather than inline PTX: they are convergent, that is, no pass may make copies of
    //! them for different lanes, which would be barriers of their own.

    unsafe extern "C" {
        #[link_name = "llvm.nvvm.barrier.cta.red.popc.aligned.all"]
        safe fn barrier_popc(barrier: i32, predicate: bool) -> i32;
        #[link_name = "llvm.nvvm.barrier.cta.red.and.aligned.all"]
        safe fn barrier_and(barrier: i32, predicate: bool) -> bool;
        #[link_name = "llvm.nvvm.barrier.cta.red.or.aligned.all"]
        safe fn barrier_or(barrier: i32, predicate: bool) -> bool;
    }

    #[inline(always)]
    pub(super) fn sync() {
        // SAFETY: a barrier has no precondition that memory safety depends on.
        unsafe { core::arch::nvptx::_syncthreads() }
    }
    #[inline(always)]
    pub(super) fn count(predicate: bool) -> u32 {
        barrier_popc(0, predicate).cast_unsigned()
    }
    #[inline(always)]
    pub(super) fn and(predicate: bool) -> bool {
        barrier_and(0, predicate)
    }
    #[inline(always)]
    pub(super) fn or(predicate: bool) -> bool {
        barrier_or(0, predicate)
    }
}

#[cfg(not(target_arch = "nvptx64"))]
mod imp {
    use crate::emu::lane;

    #[track_caller]
    pub(super) fn sync() {
        lane::current().barrier(false);
    }
    #[track_caller]
    pub(super) fn count(predicate: bool) -> u32 {
        lane::current().barrier(predicate).0
    }
    #[track_caller]
    pub(super) fn and(predicate: bool) -> bool {
        let (yes, lanes) = lane::current().barrier(predicate);
        yes == lanes
    }
    #[track_caller]
    pub(super) fn or(predicate: bool) -> bool {
        lane::current().barrier(predicate).0 != 0
    }
}

/// Waits until every lane of the block is here, and orders their accesses to shared and global memory.
///
/// Every lane has to reach it: a barrier in a branch that only some lanes take hangs the GPU. The
/// emulator reports it.
#[inline(always)]
#[track_caller]
pub fn sync_threads() {
    imp::sync();
}

/// A barrier that also counts the lanes whose predicate holds.
#[inline(always)]
#[track_caller]
#[must_use]
pub fn sync_threads_count(predicate: bool) -> u32 {
    imp::count(predicate)
}

/// A barrier that also tells whether every lane's predicate holds.
#[inline(always)]
#[track_caller]
#[must_use]
pub fn sync_threads_and(predicate: bool) -> bool {
    imp::and(predicate)
}

/// A barrier that also tells whether any lane's predicate holds.
#[inline(always)]
#[track_caller]
#[must_use]
pub fn sync_threads_or(predicate: bool) -> bool {
    imp::or(predicate)
}

/// `Σ value` over the lanes of the block, in every lane.
///
/// `scratch` holds one word for each warp. Two barriers: one before the scratch is read, and one after,
/// so that the next use of it may overwrite it at once.
///
/// # Safety
/// Every lane of the block calls it; the block is one-dimensional and its size a multiple of 32, at
/// most 1024; `scratch` has room for `block_dim_x / 32` words that nobody else uses meanwhile.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn reduce_sum(scratch: Shared<f32>, value: f32) -> f32 {
    // SAFETY: the caller's promise; addition with 0 as neutral element.
    unsafe { reduce(scratch, value, 0.0, |a, b| a + b) }
}

/// `max value` over the lanes of the block, in every lane. Otherwise as [`reduce_sum`].
///
/// # Safety
/// As [`reduce_sum`].
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn reduce_max(scratch: Shared<f32>, value: f32) -> f32 {
    // SAFETY: the caller's promise.
    unsafe { reduce(scratch, value, f32::NEG_INFINITY, f32::max) }
}

/// Warps reduce by butterfly and leave a word each; then every warp reduces those words, in the same
/// order, so that all lanes hold the same bits.
///
/// # Safety
/// As [`reduce_sum`].
#[inline(always)]
#[track_caller]
unsafe fn reduce(scratch: Shared<f32>, value: f32, neutral: f32, op: impl Fn(f32, f32) -> f32) -> f32 {
    let lane = warp::lane_id();
    let thread = crate::thread::thread_idx_x();
    let warps = crate::thread::block_dim_x() / warp::WARP_SIZE;
    // SAFETY: whole warps are here, and the scratch has a word for each of them.
    unsafe {
        let value = warp::reduce(value, &op);
        if lane == 0 {
            scratch.set(thread / warp::WARP_SIZE, value);
        }
        sync_threads(); // every warp's word is written before it is read
        let value = if lane < warps { scratch.get(lane) } else { neutral };
        let value = warp::reduce(value, &op);
        sync_threads(); // every word is read before the next caller writes
        value
    }
}
