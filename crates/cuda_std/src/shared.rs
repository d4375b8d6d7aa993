//! Dynamic shared memory, through typed handles.
//!
//! Rust has no address spaces, and a generic pointer to shared memory compiles to generic loads. So a
//! handle holds a 32-bit shared address, and its accessors are `ld.shared` and `st.shared`. A kernel lays
//! its arrays out itself, by byte offsets that the launcher's `shared_bytes` has to cover:
//!
//! ```
//! # use cuda_std::prelude::*;
//! # #[kernel]
//! # unsafe fn staged(x: *const F32x4) {
//! let lane = thread::thread_idx_x();
//! let sums = dynamic::<f32>(0);         // 32 words, one a warp
//! let tile = dynamic::<F32x4>(32 * 4);  // behind them, 16-byte elements: one instruction each
//! tile.set(lane, ld(x.add(lane as usize)));
//! block::sync_threads();                // the tile is whole before it is read
//! let total = block::reduce_sum(sums, tile.get(lane ^ 1).x);
//! # let _ = total;
//! # }
//! # let device = cuda_std::emu::Device::new();
//! # let x = device.zeroed::<F32x4>(64);
//! # let launch = cuda_std::launch::Launch::linear(1, 64).shared(32 * 4 + 64 * 16);
//! # device.launch(staged, launch, (x.as_ptr(),)).unwrap();
//! ```
//!
//! rust-cuda's `shared_array!` and `dynamic_shared_mem` return generic pointers, so here the APIs part.
//!
//! The emulator poisons the memory when a block starts, and reports a read of a byte that nobody wrote,
//! and two lanes at one byte, one of them writing, without a barrier (or, within a warp,
//! [`sync_warp`](crate::warp::sync_warp)) between them.

use crate::Word;
use bytemuck::Pod;
use core::marker::PhantomData;

/// Elements of `T` from some place of the block's shared memory on.
#[derive(Debug)]
pub struct Shared<T> {
    address: u32,
    marker: PhantomData<*mut T>,
}

impl<T> Clone for Shared<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<T> {}

/// The block's dynamic shared memory from `byte_offset` on, as elements of `T`.
///
/// The memory begins 1024-byte aligned. The offset is a multiple of `T`'s alignment, or the first access
/// faults.
#[inline(always)]
#[must_use]
pub fn dynamic<T: Pod>(byte_offset: u32) -> Shared<T> {
    Shared { address: imp::base() + byte_offset, marker: PhantomData }
}

impl<T: Pod> Shared<T> {
    /// Element `i`.
    ///
    /// # Safety
    /// The element lies within the launch's `shared_bytes`, was written, and no other lane writes it
    /// without a barrier between.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn get(self, i: u32) -> T {
        // SAFETY: the caller's promise.
        unsafe { imp::load(self.address + i * size_of::<T>() as u32) }
    }

    /// Writes element `i`.
    ///
    /// # Safety
    /// The element lies within the launch's `shared_bytes`, and no other lane accesses it without a
    /// barrier between.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn set(self, i: u32, value: T) {
        // SAFETY: the caller's promise.
        unsafe { imp::store(self.address + i * size_of::<T>() as u32, value) }
    }

    /// The handle `n` elements further on.
    #[allow(clippy::should_implement_trait, reason = "named as the method of raw pointers")]
    #[inline(always)]
    #[must_use]
    pub fn add(self, n: u32) -> Self {
        Self { address: self.address + n * size_of::<T>() as u32, marker: PhantomData }
    }

    /// The same bytes as elements of another type: to fill an `f32` array by `F32x4`, say.
    #[inline(always)]
    #[must_use]
    pub fn cast<U: Pod>(self) -> Shared<U> {
        Shared { address: self.address, marker: PhantomData }
    }

    /// The address of element `i` in the shared window, for inline PTX.
    #[inline(always)]
    #[must_use]
    pub fn address_of(self, i: u32) -> u32 {
        self.address + i * size_of::<T>() as u32
    }
}

impl<T: Word> Shared<T> {
    /// Adds to element `i` atomically and returns what was there.
    ///
    /// # Safety
    /// As [`get`](Shared::get), but other lanes may do the same at the same time.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn atomic_add(self, i: u32, value: T) -> T
    where
        T: AtomicAdd,
    {
        // SAFETY: the caller's promise.
        unsafe { T::atomic_add_shared(self.address_of(i), value) }
    }
}

/// Words that shared memory can add atomically: `u32` (wrapping) and `f32`.
pub trait AtomicAdd: Word {
    /// `atom.shared.add` at a shared address.
    ///
    /// # Safety
    /// As [`Shared::atomic_add`].
    unsafe fn atomic_add_shared(address: u32, value: Self) -> Self;
}

macro_rules! atomic_add {
    ($ty:ty, $op:literal, $add:expr) => {
        impl AtomicAdd for $ty {
            #[inline(always)]
            #[track_caller]
            unsafe fn atomic_add_shared(address: u32, value: Self) -> Self {
                #[cfg(target_arch = "nvptx64")]
                {
                    let old;
                    // SAFETY: the caller's promise about the address.
                    unsafe {
                        core::arch::asm!(concat!($op, " {}, [{}], {};"), out(reg32) old, in(reg32) address,
                            in(reg32) value, options(nostack));
                    }
                    old
                }
                #[cfg(not(target_arch = "nvptx64"))]
                {
                    let add: fn($ty, $ty) -> $ty = $add;
                    crate::emu::lane::current().shared_atomic(address, |old| add(old, value))
                }
            }
        }
    };
}
atomic_add!(u32, "atom.shared.add.u32", u32::wrapping_add);
atomic_add!(f32, "atom.shared.add.f32", |a, b| a + b);

#[cfg(target_arch = "nvptx64")]
mod imp {
    use crate::mem::from_words;
    use bytemuck::Pod;
    use core::arch::{asm, global_asm};

    global_asm!(".extern .shared .align 1024 .b8 cuda_std_dynamic_shared[];");

    #[inline(always)]
    pub(super) fn base() -> u32 {
        let address;
        // SAFETY: takes the address of the array declared above; a constant, hence `pure, nomem`.
        unsafe { asm!("mov.u32 {}, cuda_std_dynamic_shared;", out(reg32) address, options(pure, nomem, nostack)) }
        address
    }

    /// `pure, readonly`: independent loads may be merged, dropped and reordered among themselves, but
    /// none crosses a write to memory, and to the compiler both `store` below and a barrier are one.
    #[inline(always)]
    pub(super) unsafe fn load<T: Pod>(address: u32) -> T {
        const { assert!(matches!(size_of::<T>(), 1 | 2 | 4 | 8 | 16) && size_of::<T>() >= align_of::<T>()) };
        let (x, y, z, w): (u32, u32, u32, u32);
        // SAFETY: the caller's promise about the address; the asm only reads.
        unsafe {
            match size_of::<T>() {
                1 => {
                    asm!("ld.shared.u8 {}, [{}];", out(reg32) x, in(reg32) address, options(pure, readonly, nostack));
                    from_words([x, 0, 0, 0])
                }
                2 => {
                    asm!("ld.shared.u16 {}, [{}];", out(reg32) x, in(reg32) address, options(pure, readonly, nostack));
                    from_words([x, 0, 0, 0])
                }
                4 => {
                    asm!("ld.shared.b32 {}, [{}];", out(reg32) x, in(reg32) address, options(pure, readonly, nostack));
                    from_words([x, 0, 0, 0])
                }
                8 => {
                    asm!("ld.shared.v2.b32 {{{}, {}}}, [{}];", out(reg32) x, out(reg32) y, in(reg32) address,
                        options(pure, readonly, nostack));
                    from_words([x, y, 0, 0])
                }
                _ => {
                    asm!("ld.shared.v4.b32 {{{}, {}, {}, {}}}, [{}];", out(reg32) x, out(reg32) y, out(reg32) z,
                        out(reg32) w, in(reg32) address, options(pure, readonly, nostack));
                    from_words([x, y, z, w])
                }
            }
        }
    }

    /// No `nomem`, no `readonly`: for the compiler it may write any memory, so loads and barriers stay on
    /// their side of it.
    #[inline(always)]
    pub(super) unsafe fn store<T: Pod>(address: u32, value: T) {
        const { assert!(matches!(size_of::<T>(), 1 | 2 | 4 | 8 | 16) && size_of::<T>() >= align_of::<T>()) };
        let mut words = [0u32; 4];
        // SAFETY: both are plain old data and do not overlap; `T` is no larger than the words.
        unsafe {
            core::ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), (&raw mut words).cast(), size_of::<T>());
        }
        let [x, y, z, w] = words;
        // SAFETY: the caller's promise about the address.
        unsafe {
            match size_of::<T>() {
                1 => asm!("st.shared.u8 [{}], {};", in(reg32) address, in(reg32) x, options(nostack)),
                2 => asm!("st.shared.u16 [{}], {};", in(reg32) address, in(reg32) x, options(nostack)),
                4 => asm!("st.shared.b32 [{}], {};", in(reg32) address, in(reg32) x, options(nostack)),
                8 => asm!("st.shared.v2.b32 [{}], {{{}, {}}};", in(reg32) address, in(reg32) x, in(reg32) y,
                    options(nostack)),
                _ => asm!("st.shared.v4.b32 [{}], {{{}, {}, {}, {}}};", in(reg32) address, in(reg32) x, in(reg32) y,
                    in(reg32) z, in(reg32) w, options(nostack)),
            }
        }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
mod imp {
    use crate::emu::lane;
    use bytemuck::Pod;

    pub(super) fn base() -> u32 {
        lane::current().shared_base()
    }
    #[track_caller]
    pub(super) unsafe fn load<T: Pod>(address: u32) -> T {
        const { assert!(matches!(size_of::<T>(), 1 | 2 | 4 | 8 | 16) && size_of::<T>() >= align_of::<T>()) };
        lane::current().shared_load(address)
    }
    #[track_caller]
    pub(super) unsafe fn store<T: Pod>(address: u32, value: T) {
        const { assert!(matches!(size_of::<T>(), 1 | 2 | 4 | 8 | 16) && size_of::<T>() >= align_of::<T>()) };
        lane::current().shared_store(address, value);
    }
}
