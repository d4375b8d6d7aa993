//! Copies from global to shared memory that run on while the lane goes on.
//!
//! A lane starts copies, closes a group with [`commit`], and waits for its groups with [`wait`]. The copied
//! bytes are the lane's own to read after the wait, and everybody's after a barrier that follows it.
//! In the emulator the bytes arrive at the wait, so a missing one is found.
//!
//! PTX ISA: "Data Movement and Conversion Instructions: Non-bulk copy" (sm_80).

use crate::shared::Shared;
use bytemuck::Pod;

#[cfg(target_arch = "nvptx64")]
mod imp {
    use core::arch::asm;

    #[inline(always)]
    pub(super) unsafe fn copy_16(to: u32, from: *const u8) {
        // SAFETY: the caller's promise about both addresses. `.cg`: past L1.
        unsafe { asm!("cp.async.cg.shared.global [{}], [{}], 16;", in(reg32) to, in(reg64) from, options(nostack)) }
    }
    #[inline(always)]
    pub(super) unsafe fn copy_16_or_zero(to: u32, from: *const u8, bytes: u32) {
        // SAFETY: the caller's promise about both addresses; only `bytes` bytes are read.
        unsafe {
            asm!("cp.async.cg.shared.global [{}], [{}], 16, {};", in(reg32) to, in(reg64) from, in(reg32) bytes,
                options(nostack));
        }
    }
    #[inline(always)]
    pub(super) unsafe fn copy_4_or_zero(to: u32, from: *const u8, bytes: u32) {
        // SAFETY: as above. `.ca`: by L1, the only way for so few bytes.
        unsafe {
            asm!("cp.async.ca.shared.global [{}], [{}], 4, {};", in(reg32) to, in(reg64) from, in(reg32) bytes,
                options(nostack));
        }
    }
    #[inline(always)]
    pub(super) unsafe fn stream_16_or_zero(to: u32, from: *const u8, bytes: u32) {
        // SAFETY: as above; the hint reads nothing for the program.
        unsafe {
            asm!("cp.async.cg.shared.global.L2::128B [{}], [{}], 16, {};", in(reg32) to, in(reg64) from,
                in(reg32) bytes, options(nostack));
        }
    }
    #[inline(always)]
    pub(super) fn commit() {
        // SAFETY: no precondition.
        unsafe { asm!("cp.async.commit_group;", options(nostack)) }
    }
    #[inline(always)]
    pub(super) fn wait<const PENDING: u32>() {
        // SAFETY: no precondition; it clobbers memory, so reads of the copied bytes stay behind it.
        unsafe { asm!("cp.async.wait_group {};", const PENDING, options(nostack)) }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
mod imp {
    use crate::emu::lane;
    use crate::vector::U32x4;

    #[track_caller]
    pub(super) unsafe fn copy_16(to: u32, from: *const u8) {
        lane::current().copy_async::<U32x4>(to, from, 16);
    }
    #[track_caller]
    pub(super) unsafe fn copy_16_or_zero(to: u32, from: *const u8, bytes: u32) {
        lane::current().copy_async::<U32x4>(to, from, bytes.min(16));
    }
    #[track_caller]
    pub(super) unsafe fn copy_4_or_zero(to: u32, from: *const u8, bytes: u32) {
        lane::current().copy_async::<u32>(to, from, bytes.min(4));
    }
    #[track_caller]
    pub(super) unsafe fn stream_16_or_zero(to: u32, from: *const u8, bytes: u32) {
        // SAFETY: the caller's promise.
        unsafe { copy_16_or_zero(to, from, bytes) }
    }
    pub(super) fn commit() {
        lane::current().commit_copies();
    }
    #[track_caller]
    pub(super) fn wait<const PENDING: u32>() {
        lane::current().wait_copies(PENDING);
    }
}

/// Starts to copy the 16 bytes at `from` to element `i` of `to`.
///
/// # Safety
/// Both are 16-byte aligned, `from` as for [`ld`](crate::mem::ld), element `i` as for
/// [`Shared::set`]; neither is written, nor the element read, until the group's [`wait`].
#[inline(always)]
#[track_caller]
pub unsafe fn copy_16<T: Pod>(to: Shared<T>, i: u32, from: *const T) {
    const { assert!(size_of::<T>() == 16) };
    // SAFETY: the caller's promise.
    unsafe { imp::copy_16(to.address_of(i), from.cast()) }
}

/// As [`copy_16`] if `inside`, else fills the element with zeros and reads nothing: tiles past an edge.
///
/// # Safety
/// As [`copy_16`]; `from` only has to be valid if `inside`.
#[inline(always)]
#[track_caller]
pub unsafe fn copy_16_or_zero<T: Pod>(to: Shared<T>, i: u32, from: *const T, inside: bool) {
    const { assert!(size_of::<T>() == 16) };
    // SAFETY: the caller's promise.
    unsafe { imp::copy_16_or_zero(to.address_of(i), from.cast(), if inside { 16 } else { 0 }) }
}

/// As [`copy_16_or_zero`] for 4 bytes, aligned to as many.
///
/// # Safety
/// As [`copy_16_or_zero`].
#[inline(always)]
#[track_caller]
pub unsafe fn copy_4_or_zero<T: Pod>(to: Shared<T>, i: u32, from: *const T, inside: bool) {
    const { assert!(size_of::<T>() == 4) };
    // SAFETY: the caller's promise.
    unsafe { imp::copy_4_or_zero(to.address_of(i), from.cast(), if inside { 4 } else { 0 }) }
}

/// As [`copy_16_or_zero`], and starts to bring the line of 128 bytes around it into L2: the rest is wanted soon.
///
/// # Safety
/// As [`copy_16_or_zero`].
#[inline(always)]
#[track_caller]
pub unsafe fn stream_16_or_zero<T: Pod>(to: Shared<T>, i: u32, from: *const T, inside: bool) {
    const { assert!(size_of::<T>() == 16) };
    // SAFETY: the caller's promise.
    unsafe { imp::stream_16_or_zero(to.address_of(i), from.cast(), if inside { 16 } else { 0 }) }
}

/// Closes the group of the copies that this lane has started since the last one.
#[inline(always)]
pub fn commit() {
    imp::commit();
}

/// Waits until at most `PENDING` of this lane's latest groups are still on their way.
#[inline(always)]
#[track_caller]
pub fn wait<const PENDING: u32>() {
    imp::wait::<PENDING>();
}
