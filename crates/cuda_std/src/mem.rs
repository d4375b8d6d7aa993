//! Global memory: plain, hinted and prefetching accesses. Ordered ones are in [`atomic`](crate::atomic).
//!
//! All take the raw pointers that a kernel got as parameters. A pointer that is a parameter of its own is
//! known to the compiler as a global address, so [`ld`] and [`st`] become `ld.global` and `st.global`; a
//! pointer out of a by-value struct would give generic accesses. Types of 16-byte alignment
//! ([`F32x4`](crate::F32x4) and so on) move in one instruction.
//!
//! | | for | PTX |
//! |---|---|---|
//! | [`ld`] | everything that has no reason for another | `ld.global` |
//! | [`ld_cs`] | weights: read once a step | `ld.global.cs` |
//! | [`ld_no_allocate`] | weights, without a place in L1 | `ld.global.L1::no_allocate` |
//! | [`ld_evict_first`] | as `ld_cs`, for L1 alone | `ld.global.L1::evict_first` |
//! | [`ld_nc`] | never written while the grid runs, nor by the grid ahead of it under [`pdl`](crate::pdl) | `ld.global.nc` |
//!
//! ptxas was seen to move `ld.global.nc` across `griddepcontrol.wait`, and the other loads not; so weights
//! that are fetched ahead of the wait use `ld_cs` or `ld_no_allocate`.
//!
//! PTX ISA: "Data Movement and Conversion Instructions: ld, st, prefetch".

use bytemuck::Pod;

/// Reads `*p`, weakly ordered.
///
/// # Safety
/// `p` is a global address, aligned for `T`, of `size_of::<T>()` initialised bytes that no other lane
/// writes without a barrier between.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn ld<T: Pod>(p: *const T) -> T {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: the caller's promise.
    let value = unsafe { *p };
    #[cfg(not(target_arch = "nvptx64"))]
    let value = crate::emu::lane::current().load(p);
    value
}

/// Writes `*p = value`, weakly ordered.
///
/// # Safety
/// `p` is a global address, aligned for `T`, of `size_of::<T>()` bytes that no other lane accesses
/// without a barrier between.
#[inline(always)]
#[track_caller]
pub unsafe fn st<T: Pod>(p: *mut T, value: T) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: the caller's promise.
    unsafe {
        *p = value;
    }
    #[cfg(not(target_arch = "nvptx64"))]
    crate::emu::lane::current().store(p, value);
}

#[cfg(target_arch = "nvptx64")]
mod imp {
    use bytemuck::Pod;
    use core::arch::asm;

    /// A load by inline PTX of 4, 8 or 16 bytes. `pure, readonly`: two loads of an address may become one,
    /// an unused one may go, and none crosses a write or a barrier, which are not `readonly`. The generic
    /// address serves as it is: outside of the shared, local and constant windows it is the global one
    /// (PTX ISA, "Generic Addressing").
    macro_rules! load {
        ($name:ident, $op:literal) => {
            #[inline(always)]
            pub(crate) unsafe fn $name<T: Pod>(p: *const T) -> T {
                const { assert!(size_of::<T>() == align_of::<T>() && matches!(size_of::<T>(), 4 | 8 | 16)) };
                let mut words = [0u32; 4];
                let [x, y, z, w] = &mut words;
                // SAFETY: the caller's promise about `p`; the asm only reads.
                unsafe {
                    match size_of::<T>() {
                        4 => asm!(concat!($op, ".b32 {}, [{}];"), out(reg32) *x, in(reg64) p,
                            options(pure, readonly, nostack)),
                        8 => asm!(concat!($op, ".v2.b32 {{{}, {}}}, [{}];"), out(reg32) *x, out(reg32) *y,
                            in(reg64) p, options(pure, readonly, nostack)),
                        _ => asm!(concat!($op, ".v4.b32 {{{}, {}, {}, {}}}, [{}];"), out(reg32) *x, out(reg32) *y,
                            out(reg32) *z, out(reg32) *w, in(reg64) p, options(pure, readonly, nostack)),
                    }
                }
                from_words(words)
            }
        };
    }

    load!(ld_cs, "ld.global.cs");
    load!(ld_nc, "ld.global.nc");
    load!(ld_no_allocate, "ld.global.L1::no_allocate");
    load!(ld_evict_first, "ld.global.L1::evict_first");

    /// The value whose memory image is the first bytes of `words`.
    #[inline(always)]
    pub(crate) fn from_words<T: Pod>(words: [u32; 4]) -> T {
        const { assert!(size_of::<T>() <= 16) };
        let mut value = T::zeroed();
        // SAFETY: both are plain old data and do not overlap; `T` is no larger than the words.
        unsafe {
            core::ptr::copy_nonoverlapping((&raw const words).cast::<u8>(), (&raw mut value).cast(), size_of::<T>());
        }
        value
    }

    #[inline(always)]
    pub(super) unsafe fn prefetch_l2<T>(p: *const T) {
        // SAFETY: a prefetch has no effect on memory.
        unsafe { asm!("prefetch.global.L2 [{}];", in(reg64) p, options(nostack, readonly)) }
    }

    #[inline(always)]
    pub(super) unsafe fn prefetch_l1<T>(p: *const T) {
        // SAFETY: a prefetch has no effect on memory.
        unsafe { asm!("prefetch.global.L1 [{}];", in(reg64) p, options(nostack, readonly)) }
    }
}

#[cfg(target_arch = "nvptx64")]
pub(crate) use imp::from_words;

#[cfg(not(target_arch = "nvptx64"))]
mod imp {
    //! A hint changes no value, so each hinted load is [`super::ld`], with the device's limits on the type.
    use crate::emu::lane;
    use bytemuck::Pod;

    macro_rules! load {
        ($($name:ident)*) => {$(
            #[track_caller]
            pub(crate) unsafe fn $name<T: Pod>(p: *const T) -> T {
                const { assert!(size_of::<T>() == align_of::<T>() && matches!(size_of::<T>(), 4 | 8 | 16)) };
                lane::current().load(p)
            }
        )*};
    }
    load!(ld_cs ld_nc ld_no_allocate ld_evict_first);

    pub(super) unsafe fn prefetch_l2<T>(_: *const T) {}
    pub(super) unsafe fn prefetch_l1<T>(_: *const T) {}
}

macro_rules! hinted {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// `T` has 4, 8 or 16 bytes and is aligned to its size; anything else does not compile.
        ///
        /// # Safety
        /// As [`ld`].
        #[inline(always)]
        #[track_caller]
        #[must_use]
        pub unsafe fn $name<T: Pod>(p: *const T) -> T {
            // SAFETY: the caller's promise.
            unsafe { imp::$name(p) }
        }
    )*};
}

hinted! {
    /// Reads `*p` and marks the line as first to go, in L1 and L2: it will not be used again.
    ld_cs;
    /// Reads `*p` through the read-only path. Besides [`ld`]'s duties: nobody writes these bytes while the
    /// grid runs, and under a dependent launch the grid ahead does not either.
    ld_nc;
    /// Reads `*p` past L1.
    ld_no_allocate;
    /// Reads `*p` and marks its L1 line as first to go.
    ld_evict_first;
}

/// Starts to bring the line that holds `*p` into L2. Any address is allowed; a bad one does nothing.
///
/// # Safety
/// None beyond a global address; it is unsafe like its neighbours.
#[inline(always)]
pub unsafe fn prefetch_l2<T>(p: *const T) {
    // SAFETY: a prefetch neither reads nor writes for the program.
    unsafe { imp::prefetch_l2(p) }
}

/// Starts to bring the line that holds `*p` into L1. Any address is allowed; a bad one does nothing.
///
/// # Safety
/// None beyond a global address; it is unsafe like its neighbours.
#[inline(always)]
pub unsafe fn prefetch_l1<T>(p: *const T) {
    // SAFETY: a prefetch neither reads nor writes for the program.
    unsafe { imp::prefetch_l1(p) }
}
