//! Ordered loads and stores, atomics and fences on global memory, at the scope of the GPU.
//!
//! In inline PTX, because `core::sync::atomic` loses its ordering on this target: `fetch_add(Release)`
//! becomes a bare `atom.global.add` (rust-lang/rust#136480).
//!
//! PTX ISA: "Memory Consistency Model", "atom", "red", "fence".

use crate::Word;

#[cfg(target_arch = "nvptx64")]
mod imp {
    use core::arch::asm;

    /// Not `pure` and not `nomem`: each is an event of its own, and no access crosses it.
    macro_rules! load {
        ($name:ident, $op:literal) => {
            #[inline(always)]
            pub(super) unsafe fn $name(p: *const u32) -> u32 {
                let value;
                // SAFETY: the caller's promise about `p`.
                unsafe { asm!(concat!($op, " {}, [{}];"), out(reg32) value, in(reg64) p, options(nostack)) }
                value
            }
        };
    }
    macro_rules! store {
        ($name:ident, $op:literal) => {
            #[inline(always)]
            pub(super) unsafe fn $name(p: *mut u32, value: u32) {
                // SAFETY: the caller's promise about `p`.
                unsafe { asm!(concat!($op, " [{}], {};"), in(reg64) p, in(reg32) value, options(nostack)) }
            }
        };
    }
    macro_rules! fetch {
        ($name:ident, $ty:ty, $op:literal) => {
            #[inline(always)]
            pub(super) unsafe fn $name(p: *mut $ty, value: $ty) -> $ty {
                let old;
                // SAFETY: the caller's promise about `p`.
                unsafe {
                    asm!(concat!($op, " {}, [{}], {};"), out(reg32) old, in(reg64) p, in(reg32) value, options(nostack));
                }
                old
            }
        };
    }
    macro_rules! reduce {
        ($name:ident, $ty:ty, $op:literal) => {
            #[inline(always)]
            pub(super) unsafe fn $name(p: *mut $ty, value: $ty) {
                // SAFETY: the caller's promise about `p`.
                unsafe { asm!(concat!($op, " [{}], {};"), in(reg64) p, in(reg32) value, options(nostack)) }
            }
        };
    }
    macro_rules! fence {
        ($name:ident, $op:literal) => {
            #[inline(always)]
            pub(super) fn $name() {
                // SAFETY: a fence has no precondition.
                unsafe { asm!($op, options(nostack)) }
            }
        };
    }

    load!(ld_volatile, "ld.volatile.global.b32");
    load!(ld_relaxed, "ld.relaxed.gpu.global.b32");
    load!(ld_acquire, "ld.acquire.gpu.global.b32");
    store!(st_volatile, "st.volatile.global.b32");
    store!(st_relaxed, "st.relaxed.gpu.global.b32");
    store!(st_release, "st.release.gpu.global.b32");
    fetch!(add_u32, u32, "atom.relaxed.gpu.global.add.u32");
    fetch!(add_f32, f32, "atom.relaxed.gpu.global.add.f32");
    fetch!(add_acq_rel, u32, "atom.acq_rel.gpu.global.add.u32");
    fetch!(max_u32, u32, "atom.relaxed.gpu.global.max.u32");
    fetch!(exchange, u32, "atom.relaxed.gpu.global.exch.b32");
    reduce!(red_u32, u32, "red.relaxed.gpu.global.add.u32");
    reduce!(red_f32, f32, "red.relaxed.gpu.global.add.f32");
    reduce!(red_release, u32, "red.release.gpu.global.add.u32");
    fence!(block_fence, "fence.acq_rel.cta;");
    fence!(device_fence, "fence.acq_rel.gpu;");
    fence!(system_fence, "fence.acq_rel.sys;");

    #[inline(always)]
    pub(super) unsafe fn red_u64(p: *mut u64, value: u64) {
        // SAFETY: the caller's promise about `p`.
        unsafe { asm!("red.relaxed.gpu.global.add.u64 [{}], {};", in(reg64) p, in(reg64) value, options(nostack)) }
    }

    #[inline(always)]
    pub(super) unsafe fn compare_exchange(p: *mut u32, expected: u32, value: u32) -> u32 {
        let old;
        // SAFETY: the caller's promise about `p`.
        unsafe {
            asm!("atom.acq_rel.gpu.global.cas.b32 {}, [{}], {}, {};", out(reg32) old, in(reg64) p,
                in(reg32) expected, in(reg32) value, options(nostack));
        }
        old
    }
}

#[cfg(not(target_arch = "nvptx64"))]
mod imp {
    //! The emulator's accesses are sequentially consistent between switches, so orders need no care.
    //! A load that may be polled lets the other lanes run first, or a spin would never end.
    use crate::emu::lane;

    macro_rules! load {
        ($($name:ident)*) => {$(
            #[track_caller]
            pub(super) unsafe fn $name(p: *const u32) -> u32 {
                lane::current().spin();
                lane::current().load(p)
            }
        )*};
    }
    macro_rules! store {
        ($($name:ident)*) => {$(
            #[track_caller]
            pub(super) unsafe fn $name(p: *mut u32, value: u32) {
                lane::current().store(p, value);
            }
        )*};
    }
    macro_rules! update {
        ($($name:ident: $ty:ty = $op:expr;)*) => {$(
            #[track_caller]
            pub(super) unsafe fn $name(p: *mut $ty, value: $ty) -> $ty {
                let op: fn($ty, $ty) -> $ty = $op;
                lane::current().atomic(p, |old| op(old, value))
            }
        )*};
    }

    load!(ld_volatile ld_relaxed ld_acquire);
    store!(st_volatile st_relaxed st_release);
    update! {
        add_u32: u32 = u32::wrapping_add;
        add_acq_rel: u32 = u32::wrapping_add;
        add_f32: f32 = |a, b| a + b;
        max_u32: u32 = u32::max;
        exchange: u32 = |_, new| new;
    }
    #[track_caller]
    pub(super) unsafe fn red_u32(p: *mut u32, value: u32) {
        lane::current().atomic(p, |old| old.wrapping_add(value));
    }
    #[track_caller]
    pub(super) unsafe fn red_f32(p: *mut f32, value: f32) {
        lane::current().atomic(p, |old| old + value);
    }
    pub(super) use red_u32 as red_release;
    #[track_caller]
    pub(super) unsafe fn red_u64(p: *mut u64, value: u64) {
        lane::current().atomic_u64(p, |old| old.wrapping_add(value));
    }

    #[track_caller]
    pub(super) unsafe fn compare_exchange(p: *mut u32, expected: u32, value: u32) -> u32 {
        lane::current().spin();
        lane::current().atomic(p, |old| if old == expected { value } else { old })
    }
    pub(super) fn block_fence() {}
    pub(super) fn device_fence() {}
    pub(super) fn system_fence() {}
}

macro_rules! loads {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// `p` is a 4-byte aligned global address of an initialised word.
        #[inline(always)]
        #[track_caller]
        #[must_use]
        pub unsafe fn $name<T: Word>(p: *const T) -> T {
            // SAFETY: the caller's promise.
            T::from_bits(unsafe { imp::$name(p.cast()) })
        }
    )*};
}

macro_rules! stores {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// `p` is a 4-byte aligned global address of a word.
        #[inline(always)]
        #[track_caller]
        pub unsafe fn $name<T: Word>(p: *mut T, value: T) {
            // SAFETY: the caller's promise.
            unsafe { imp::$name(p.cast(), value.to_bits()) }
        }
    )*};
}

macro_rules! updates {
    ($($(#[$doc:meta])* $name:ident = $imp:ident($ty:ty) $(-> $result:ty)?;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// `p` is a 4-byte aligned global address of an initialised word that other lanes access only
        /// through this module, or on the other side of a barrier.
        #[inline(always)]
        #[track_caller]
        pub unsafe fn $name(p: *mut $ty, value: $ty) $(-> $result)? {
            // SAFETY: the caller's promise.
            unsafe { imp::$imp(p, value) }
        }
    )*};
}

loads! {
    /// Reads memory every time, in program order with this lane's other volatile accesses.
    ld_volatile;
    /// Reads what is current for the whole GPU, without ordering other accesses.
    ld_relaxed;
    /// Reads, and orders every later access of this lane after it: sees all that came before the
    /// [`st_release`] whose value it reads.
    ld_acquire;
}

stores! {
    /// Writes memory every time, in program order with this lane's other volatile accesses.
    st_volatile;
    /// Writes for the whole GPU to see, without ordering other accesses.
    st_relaxed;
    /// Writes, after every earlier access of this lane (and what it has observed through barriers).
    st_release;
}

updates! {
    /// `*p += value`, wrapping; the old value. Orders nothing.
    atomic_add_u32 = add_u32(u32) -> u32;
    /// `*p += value`; the old value. The order of additions, and so the last bits, may differ from run to run.
    atomic_add_f32 = add_f32(f32) -> f32;
    /// `*p += value`, wrapping; the old value. Acquires and releases: the counter of "the last block to finish".
    atomic_add_acq_rel = add_acq_rel(u32) -> u32;
    /// `*p = max(*p, value)`; the old value. Orders nothing.
    atomic_max_u32 = max_u32(u32) -> u32;
    /// `*p = value`; the old value. Orders nothing.
    atomic_exchange = exchange(u32) -> u32;
    /// `*p += value`, wrapping, without the old value, which is cheaper. Orders nothing.
    red_add_u32 = red_u32(u32);
    /// The same for 64 bits; `p` is 8-byte aligned.
    red_add_u64 = red_u64(u64);
    /// `*p += value` without the old value. The last bits may differ from run to run.
    red_add_f32 = red_f32(f32);
    /// `*p += value`, wrapping, after every earlier access of this lane.
    red_add_release = red_release(u32);
}

/// If `*p == expected`, `*p = value`; the old value either way. Acquires and releases.
///
/// # Safety
/// As [`atomic_add_u32`].
#[inline(always)]
#[track_caller]
pub unsafe fn atomic_compare_exchange(p: *mut u32, expected: u32, value: u32) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { imp::compare_exchange(p, expected, value) }
}

/// Orders this lane's accesses before and after, as seen by its block.
#[inline(always)]
pub fn block_fence() {
    imp::block_fence();
}

/// Orders this lane's accesses before and after, as seen by the GPU.
#[inline(always)]
pub fn device_fence() {
    imp::device_fence();
}

/// Orders this lane's accesses before and after, as seen by the GPU and the host.
#[inline(always)]
pub fn system_fence() {
    imp::system_fence();
}
