//! Hopper's tensor cores: `wgmma`, a product that four warps issue together and that runs on while they go on.
//!
//! `D[64,N] += A[64,16]·B[16,N]` with bf16 factors and f32 sums, N a multiple of 16 up to 128. Warp `w` of the warpgroup
//! (four warps from a multiple of four on) has rows `16·w ..+16` of A and D, in registers; with `g = lane / 4` and
//! `t = lane % 4`, a lane's hold:
//!
//! | | register | rows | columns |
//! |---|---|---|---|
//! | A | `a[j]`, half `i` | `16w + g + 8·(j % 2)` | `2t + i + 8·(j / 2)` |
//! | D | `d[j]` | `16w + g + 8·(j / 2 % 2)` | `8·(j / 4) + 2t + j % 2` |
//!
//! B lies in shared memory, and a [`Descriptor`] says where: each of its N columns is a row of 64 elements there (128
//! bytes, of which one product takes 32), with the 16-byte units of a row exchanged by [`swizzle_128`], so that neither
//! writing nor reading them meets in a bank.
//!
//! # Order
//! A product reads its registers and shared memory after it was issued. So [`begin`] and [`fence`] come before the first,
//! and [`fence`] after each write to A by another instruction; [`commit`] closes a group of products; and after [`wait`]
//! (registers of A, shared memory) or [`finish`] (D) what they used may be touched again. Products read shared memory
//! past the usual ways: a lane that has written there calls [`fence_shared`] before the barrier that announces it.
//!
//! In the emulator a product is done when it is issued; of the order it checks barriers and [`fence_shared`].
//!
//! PTX ISA: "Asynchronous Warpgroup Level Matrix Instructions", "Async proxy". Target sm_90a alone: see [`available`].

use crate::shared::Shared;
use bytemuck::Pod;

/// Lanes of a warpgroup.
pub const WARPGROUP: u32 = 128;
/// Bytes of a column of B in shared memory: 64 elements.
pub const COLUMN_BYTES: u32 = 128;
/// What the start of B is a multiple of.
pub const ALIGN: u32 = 1024;

#[cfg(target_arch = "nvptx64")]
mod imp {
    use core::arch::asm;

    /// Not `pure`, as [`mma`](crate::mma); and no `nomem`, since it reads shared memory.
    macro_rules! mma {
        ($d:ident $a:ident $b:ident $n:literal: 0 $($i:literal)+) => {
            asm!(
                concat!(
                    "{{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n", $n,
                    "k16.f32.bf16.bf16 {{{0}", $(", {", $i, "}",)+
                    "}}, {{{a0}, {a1}, {a2}, {a3}}}, {b}, p, 1, 1, 0; }}"
                ),
                inout(reg32) $d[0], $(inout(reg32) $d[$i],)+
                a0 = in(reg32) $a[0], a1 = in(reg32) $a[1], a2 = in(reg32) $a[2], a3 = in(reg32) $a[3],
                b = in(reg64) $b, options(nostack),
            )
        };
    }

    #[inline(always)]
    pub(super) unsafe fn mma_bf16<const N: usize, const R: usize>(d: &mut [f32; R], a: [u32; 4], b: u64) {
        // SAFETY: the caller's promise: the warpgroup is here, and the descriptor is of shared memory of the block.
        unsafe {
            match N {
                16 => mma!(d a b 16: 0 1 2 3 4 5 6 7),
                32 => mma!(d a b 32: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15),
                48 => mma!(d a b 48: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23),
                64 => mma!(d a b 64: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29
                    30 31),
                80 => mma!(d a b 80: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29
                    30 31 32 33 34 35 36 37 38 39),
                96 => mma!(d a b 96: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29
                    30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47),
                112 => mma!(d a b 112: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28
                    29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55),
                _ => mma!(d a b 128: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29
                    30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61
                    62 63),
            }
        }
    }

    #[inline(always)]
    pub(super) unsafe fn fence() {
        // SAFETY: the caller's promise: the warp is here.
        unsafe { asm!("wgmma.fence.sync.aligned;", options(nostack)) }
    }
    #[inline(always)]
    pub(super) unsafe fn commit() {
        // SAFETY: the caller's promise: the warp is here.
        unsafe { asm!("wgmma.commit_group.sync.aligned;", options(nostack)) }
    }
    #[inline(always)]
    pub(super) unsafe fn wait<const PENDING: u32>() {
        // SAFETY: the caller's promise: the warp is here.
        unsafe { asm!("wgmma.wait_group.sync.aligned {};", const PENDING, options(nostack)) }
    }
    /// Without it the compiler could set `value` behind a fence, or use it ahead of a wait, for it does not know that
    /// they are about it.
    #[inline(always)]
    pub(super) fn pin(value: &mut f32) {
        // SAFETY: does nothing. Not `pure`, so it stays on its side of both.
        unsafe { asm!("/* {0} */", inout(reg32) * value, options(nostack)) }
    }
    #[inline(always)]
    pub(super) fn fence_shared() {
        // SAFETY: no precondition.
        unsafe { asm!("fence.proxy.async.shared::cta;", options(nostack)) }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
mod imp {
    use super::COLUMN_BYTES;
    use crate::convert::bf16_to_f32;
    use crate::emu::lane;
    use crate::emu::warp::Collective;
    use crate::warp::FULL_MASK;

    /// A warp's part: what the other three have is not needed for it.
    #[track_caller]
    pub(super) unsafe fn mma_bf16<const N: usize, const R: usize>(d: &mut [f32; R], a: [u32; 4], b: u64) {
        let lane = lane::current();
        let words = [a[0], a[1], a[2], a[3], b as u32, (b >> 32) as u32];
        // The rows of A that the four lanes of the same `g` hold, to each of them.
        let rows: [u32; 16] = lane.exchange(Collective::Wgmma, FULL_MASK, words, |given, lane| {
            assert!(given.of(lane)[4..] == words[4..], "the lanes' descriptors differ");
            core::array::from_fn(|i| given.of(lane / 4 * 4 + i as u32 / 4)[i % 4])
        });
        let t = lane.lane_id() % 4;
        for (j, d) in (0..).zip(&mut d[..N / 2]) {
            let (column, half) = (8 * (j / 4) + 2 * t + j % 2, j / 2 % 2);
            // The order of the hardware's sum is not specified; here it is exact, then rounded once.
            let mut sum = f64::from(*d);
            for word in 0..8 {
                let b: u32 = lane.shared_load_async(address(b, column, 4 * word));
                let a = rows[(word % 4 * 4 + half + 2 * (word / 4)) as usize];
                sum += value(a) * value(b) + value(a >> 16) * value(b >> 16);
            }
            *d = sum as f32;
        }
    }

    fn value(bits: u32) -> f64 {
        f64::from(bf16_to_f32(bits as u16))
    }

    /// Where byte `byte` of a column of B lies, by the fields of its descriptor.
    fn address(descriptor: u64, column: u32, byte: u32) -> u32 {
        assert!(descriptor >> 62 == 1 && descriptor >> 49 & 7 == 0, "the emulator knows one swizzle");
        let field = |shift: u32| ((descriptor >> shift & 0x3fff) << 4) as u32;
        let (start, stride) = (field(0), field(32));
        super::swizzle_128(start + column / 8 * stride + column % 8 * COLUMN_BYTES + byte)
    }

    pub(super) unsafe fn fence() {}
    pub(super) unsafe fn commit() {}
    pub(super) unsafe fn wait<const PENDING: u32>() {}
    pub(super) fn pin(_: &mut f32) {}
    pub(super) fn fence_shared() {
        lane::current().fence_shared_async();
    }
}

/// Whether the PTX is for a GPU that has these instructions, which the ones after Hopper do not. A kernel that uses
/// them begins with [`require`].
#[inline(always)]
#[must_use]
pub fn available() -> bool {
    #[cfg(target_arch = "nvptx64")]
    let available = crate::pdl::cuda_arch() == 900;
    #[cfg(not(target_arch = "nvptx64"))]
    let available = true;
    available
}

/// Ends the grid, as an error, unless [`available`]: nothing of the kernel is then in the module.
#[inline(always)]
pub fn require() {
    #[cfg(target_arch = "nvptx64")]
    if !available() {
        // SAFETY: `trap` ends the grid.
        unsafe { core::arch::nvptx::trap() }
    }
}

/// Where byte `byte` of a B lies, counted from its start: the 16-byte units of a row of 128 bytes are exchanged by the
/// number of the row. It applies to shared addresses, too, since B starts at a multiple of [`ALIGN`].
#[inline(always)]
#[must_use]
pub const fn swizzle_128(byte: u32) -> u32 {
    byte ^ (byte >> 7 & 7) << 4
}

/// Where a B of 64 rows lies in shared memory: the columns one after the other, [`COLUMN_BYTES`] each.
///
/// PTX ISA: "Matrix Descriptor Format": bits 0–13 the start and 32–45 the bytes from eight columns to the next, both
/// divided by 16; 62–63 the swizzle, 1 for 128 bytes.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor(u64);

impl Descriptor {
    /// For a B that starts at `start`, a multiple of [`ALIGN`].
    #[inline(always)]
    #[must_use]
    pub fn new<T: Pod>(start: Shared<T>) -> Self {
        let stride = (8 * COLUMN_BYTES / 16) as u64;
        Descriptor(u64::from((start.address_of(0) & 0x3_ffff) / 16) | 1 << 16 | stride << 32 | 1 << 62)
    }

    /// Rows `16·i ..+16`, `i < 4`. The swizzle works on addresses, so the rows of 32 bytes are just further on.
    #[inline(always)]
    #[must_use]
    pub fn rows(self, i: u32) -> Self {
        Descriptor(self.0 + u64::from(2 * i))
    }
}

/// Issues `D += A·B` for the first `N` columns of D; N is a multiple of 16, at most 128 and `2·R`.
///
/// # Safety
/// - Every lane of the warpgroup comes here, with the same descriptor, of `N` columns that were written; the blocks of
///   the launch are one-dimensional.
/// - [`fence`] and [`fence_shared`] were called as the module's text says. Neither `d` nor that memory is touched until
///   the product was waited for.
#[inline(always)]
#[track_caller]
pub unsafe fn mma_bf16<const N: usize, const R: usize>(d: &mut [f32; R], a: [u32; 4], b: Descriptor) {
    const { assert!(N.is_multiple_of(16) && N >= 16 && N <= 128) };
    // SAFETY: the caller's promise.
    unsafe { imp::mma_bf16::<N, R>(d, a, b.0) }
}

/// The values that sums begin with, before the first product.
#[expect(clippy::needless_range_loop, reason = "an index that the compiler knows keeps the sums in registers")]
#[inline(always)]
pub fn begin<const R: usize>(d: &mut [f32; R]) {
    for i in 0..R {
        imp::pin(&mut d[i]);
    }
}

/// Orders earlier writes to registers before the products that follow.
///
/// # Safety
/// Every lane of the warp comes here.
#[inline(always)]
pub unsafe fn fence() {
    // SAFETY: the caller's promise.
    unsafe { imp::fence() }
}

/// Closes the group of the products that were issued since the last one.
///
/// # Safety
/// Every lane of the warp comes here.
#[inline(always)]
pub unsafe fn commit() {
    // SAFETY: the caller's promise.
    unsafe { imp::commit() }
}

/// Waits until at most `PENDING` of the latest groups still run.
///
/// # Safety
/// Every lane of the warp comes here.
#[inline(always)]
pub unsafe fn wait<const PENDING: u32>() {
    // SAFETY: the caller's promise.
    unsafe { imp::wait::<PENDING>() }
}

/// Waits for all groups, the sums of which are `d`.
///
/// # Safety
/// Every lane of the warp comes here.
#[expect(clippy::needless_range_loop, reason = "an index that the compiler knows keeps the sums in registers")]
#[inline(always)]
pub unsafe fn finish<const R: usize>(d: &mut [f32; R]) {
    // SAFETY: the caller's promise.
    unsafe { imp::wait::<0>() };
    for i in 0..R {
        imp::pin(&mut d[i]);
    }
}

/// Makes this lane's writes to shared memory, and the copies to it that it has waited for, visible to products that
/// are issued after the next barrier.
#[inline(always)]
pub fn fence_shared() {
    imp::fence_shared();
}
