//! A warp's 32 lanes: shuffles, votes, reductions.
//!
//! The `warp_*` functions are rust-cuda's, with mask and width; the short ones are for a whole warp.
//! In the emulator the lanes named by a mask all have to come, as on the GPU, and a lane that has
//! exited counts as missing: its value would be undefined.
//!
//! PTX ISA: "shfl.sync", "vote.sync", "redux.sync", "bar.warp.sync".

use crate::Word;

/// Lanes of a warp.
pub const WARP_SIZE: u32 = 32;
/// The mask that names all lanes of a warp.
pub const FULL_MASK: u32 = 0xffff_ffff;

#[cfg(target_arch = "nvptx64")]
mod imp {
    unsafe extern "C" {
        #[link_name = "llvm.nvvm.read.ptx.sreg.laneid"]
        safe fn sreg_laneid() -> i32;
        #[link_name = "llvm.nvvm.bar.warp.sync"]
        fn bar_warp_sync(mask: i32);
        #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
        fn shfl_bfly(mask: i32, value: i32, lane_mask: i32, clamp: i32) -> i32;
        #[link_name = "llvm.nvvm.shfl.sync.down.i32"]
        fn shfl_down(mask: i32, value: i32, delta: i32, clamp: i32) -> i32;
        #[link_name = "llvm.nvvm.shfl.sync.up.i32"]
        fn shfl_up(mask: i32, value: i32, delta: i32, clamp: i32) -> i32;
        #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
        fn shfl_idx(mask: i32, value: i32, lane: i32, clamp: i32) -> i32;
        #[link_name = "llvm.nvvm.vote.all.sync"]
        fn vote_all(mask: i32, predicate: bool) -> bool;
        #[link_name = "llvm.nvvm.vote.any.sync"]
        fn vote_any(mask: i32, predicate: bool) -> bool;
        #[link_name = "llvm.nvvm.vote.ballot.sync"]
        fn vote_ballot(mask: i32, predicate: bool) -> i32;
        #[link_name = "llvm.nvvm.redux.sync.umax"]
        fn redux_umax(value: i32, mask: i32) -> i32;
        #[link_name = "llvm.nvvm.redux.sync.umin"]
        fn redux_umin(value: i32, mask: i32) -> i32;
    }

    #[inline(always)]
    pub(super) fn lane_id() -> u32 {
        sreg_laneid().cast_unsigned()
    }
    #[inline(always)]
    pub(super) unsafe fn sync(mask: u32) {
        // SAFETY: the caller's promise: all lanes of the mask come.
        unsafe { bar_warp_sync(mask.cast_signed()) }
    }

    /// `c` operand of `shfl`: segment mask in bits 8..13, and the clamp value, which is the last lane
    /// of a segment, or the first for `up`.
    const fn segment(width: u32, clamp: u32) -> i32 {
        (((super::WARP_SIZE - width) << 8) | clamp) as i32
    }

    macro_rules! shuffle {
        ($name:ident, $intrinsic:ident, $clamp:literal) => {
            #[inline(always)]
            pub(super) unsafe fn $name(mask: u32, value: u32, operand: u32, width: u32) -> u32 {
                // SAFETY: the caller's promise: all lanes of the mask come.
                let bits = unsafe {
                    $intrinsic(mask.cast_signed(), value.cast_signed(), operand.cast_signed(), segment(width, $clamp))
                };
                bits.cast_unsigned()
            }
        };
    }
    shuffle!(xor, shfl_bfly, 31);
    shuffle!(down, shfl_down, 31);
    shuffle!(up, shfl_up, 0);
    shuffle!(idx, shfl_idx, 31);

    #[inline(always)]
    pub(super) unsafe fn all(mask: u32, predicate: bool) -> bool {
        // SAFETY: the caller's promise: all lanes of the mask come.
        unsafe { vote_all(mask.cast_signed(), predicate) }
    }
    #[inline(always)]
    pub(super) unsafe fn any(mask: u32, predicate: bool) -> bool {
        // SAFETY: the caller's promise: all lanes of the mask come.
        unsafe { vote_any(mask.cast_signed(), predicate) }
    }
    #[inline(always)]
    pub(super) unsafe fn ballot(mask: u32, predicate: bool) -> u32 {
        // SAFETY: the caller's promise: all lanes of the mask come.
        unsafe { vote_ballot(mask.cast_signed(), predicate) }.cast_unsigned()
    }
    #[inline(always)]
    pub(super) unsafe fn max_u32(mask: u32, value: u32) -> u32 {
        // SAFETY: the caller's promise: all lanes of the mask come.
        unsafe { redux_umax(value.cast_signed(), mask.cast_signed()) }.cast_unsigned()
    }
    #[inline(always)]
    pub(super) unsafe fn min_u32(mask: u32, value: u32) -> u32 {
        // SAFETY: the caller's promise: all lanes of the mask come.
        unsafe { redux_umin(value.cast_signed(), mask.cast_signed()) }.cast_unsigned()
    }
}

#[cfg(not(target_arch = "nvptx64"))]
mod imp {
    use super::{WARP_SIZE, source_lane};
    use crate::emu::lane;
    use crate::emu::warp::Collective;

    pub(super) fn lane_id() -> u32 {
        lane::current().lane_id()
    }
    #[track_caller]
    pub(super) unsafe fn sync(mask: u32) {
        lane::current().sync_warp(mask);
    }

    macro_rules! shuffle {
        ($name:ident, $kind:ident) => {
            #[track_caller]
            pub(super) unsafe fn $name(mask: u32, value: u32, operand: u32, width: u32) -> u32 {
                let [bits] =
                    lane::current().exchange(Collective::$kind, mask, [value, operand, width], |given, lane| {
                        let [_, operand, width] = given.of(lane);
                        let (from, _) = source_lane(Collective::$kind.shuffle_mode(), lane, operand, width);
                        [given.from(from)[0]]
                    });
                bits
            }
        };
    }
    shuffle!(xor, ShuffleXor);
    shuffle!(down, ShuffleDown);
    shuffle!(up, ShuffleUp);
    shuffle!(idx, ShuffleIdx);

    #[track_caller]
    pub(super) unsafe fn ballot(mask: u32, predicate: bool) -> u32 {
        let [votes] = lane::current().exchange(Collective::Vote, mask, [u32::from(predicate)], |given, _| {
            let mut votes = 0;
            for lane in (0..WARP_SIZE).filter(|lane| mask >> lane & 1 != 0) {
                votes |= given.of(lane)[0] << lane;
            }
            [votes]
        });
        votes
    }
    macro_rules! redux {
        ($name:ident, $kind:ident, $op:ident) => {
            #[track_caller]
            pub(super) unsafe fn $name(mask: u32, value: u32) -> u32 {
                let [result] = lane::current().exchange(Collective::$kind, mask, [value], |given, lane| {
                    let [own] = given.of(lane);
                    let lanes = (0..WARP_SIZE).filter(|lane| mask >> lane & 1 != 0);
                    [lanes.fold(own, |result, lane| result.$op(given.of(lane)[0]))]
                });
                result
            }
        };
    }
    redux!(max_u32, ReduceMax, max);
    redux!(min_u32, ReduceMin, min);

    #[track_caller]
    pub(super) unsafe fn all(mask: u32, predicate: bool) -> bool {
        // SAFETY: the emulator checks that the lanes come.
        unsafe { ballot(mask, predicate) == mask }
    }
    #[track_caller]
    pub(super) unsafe fn any(mask: u32, predicate: bool) -> bool {
        // SAFETY: the emulator checks that the lanes come.
        unsafe { ballot(mask, predicate) != 0 }
    }
}

/// The four ways a shuffle finds its source.
#[derive(Clone, Copy)]
pub(crate) enum ShuffleMode {
    /// `lane ^ operand`
    Xor,
    /// `lane + operand`
    Down,
    /// `lane - operand`
    Up,
    /// `operand`, counted within the segment
    Idx,
}

/// The lane that `lane` reads from, and whether it lies in the segment; where it does not, a lane reads
/// its own value. PTX ISA, "shfl.sync", the pseudo-code.
#[inline(always)]
pub(crate) fn source_lane(mode: ShuffleMode, lane: u32, operand: u32, width: u32) -> (u32, bool) {
    let first = lane & !(width - 1);
    let last = first + width - 1;
    let (from, inside) = match mode {
        ShuffleMode::Xor => (lane ^ operand, (lane ^ operand) <= last),
        ShuffleMode::Down => (lane.wrapping_add(operand), lane.wrapping_add(operand) <= last),
        ShuffleMode::Up => (lane.wrapping_sub(operand), lane >= first + operand),
        ShuffleMode::Idx => (first | (operand & (width - 1)), true),
    };
    if inside { (from, true) } else { (lane, false) }
}

/// This lane's place in its warp.
#[inline(always)]
#[must_use]
pub fn lane_id() -> u32 {
    imp::lane_id()
}

/// Waits for the lanes of `mask` and orders their memory accesses.
///
/// # Safety
/// Every lane of `mask` comes here with the same mask.
#[inline(always)]
#[track_caller]
pub unsafe fn sync_warp(mask: u32) {
    // SAFETY: the caller's promise.
    unsafe { imp::sync(mask) }
}

macro_rules! shuffle {
    ($(#[$doc:meta])* $short:ident, $(#[$long_doc:meta])* $long:ident, $imp:ident, $mode:ident, $operand:ident) => {
        $(#[$long_doc])*
        ///
        /// # Safety
        /// Every lane of `mask` comes here with the same mask; `width` is a power of two up to 32.
        #[inline(always)]
        #[track_caller]
        #[must_use]
        pub unsafe fn $long<T: Word>(mask: u32, value: T, $operand: u32, width: u32) -> (T, bool) {
            // SAFETY: the caller's promise.
            let bits = unsafe { imp::$imp(mask, value.to_bits(), $operand, width) };
            (T::from_bits(bits), source_lane(ShuffleMode::$mode, lane_id(), $operand, width).1)
        }

        $(#[$doc])*
        ///
        /// # Safety
        /// Every lane of the warp comes here.
        #[inline(always)]
        #[track_caller]
        #[must_use]
        pub unsafe fn $short<T: Word>(value: T, $operand: u32) -> T {
            // SAFETY: the caller's promise.
            unsafe { $long(FULL_MASK, value, $operand, WARP_SIZE).0 }
        }
    };
}

shuffle!(
    /// The value of lane `lane_id() ^ lane_mask`.
    shuffle_xor,
    /// The value of lane `lane_id() ^ lane_mask`, and whether it lies in this lane's segment or before.
    warp_shuffle_xor, xor, Xor, lane_mask);
shuffle!(
    /// The value of lane `lane_id() + delta`; the last `delta` lanes keep their own.
    shuffle_down,
    /// The value of lane `lane_id() + delta`, and whether it lies in this lane's segment of `width`.
    warp_shuffle_down, down, Down, delta);
shuffle!(
    /// The value of lane `lane_id() - delta`; the first `delta` lanes keep their own.
    shuffle_up,
    /// The value of lane `lane_id() - delta`, and whether it lies in this lane's segment of `width`.
    warp_shuffle_up, up, Up, delta);
shuffle!(
    /// The value of lane `lane`, modulo 32.
    shuffle_idx,
    /// The value of lane `lane` of this lane's segment of `width`.
    warp_shuffle_idx, idx, Idx, lane);

/// Whether the predicate holds in every lane of `mask`.
///
/// # Safety
/// Every lane of `mask` comes here with the same mask.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn warp_vote_all(mask: u32, predicate: bool) -> bool {
    // SAFETY: the caller's promise.
    unsafe { imp::all(mask, predicate) }
}

/// Whether the predicate holds in any lane of `mask`.
///
/// # Safety
/// Every lane of `mask` comes here with the same mask.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn warp_vote_any(mask: u32, predicate: bool) -> bool {
    // SAFETY: the caller's promise.
    unsafe { imp::any(mask, predicate) }
}

/// One bit for each lane of `mask` in which the predicate holds.
///
/// # Safety
/// Every lane of `mask` comes here with the same mask.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn warp_vote_ballot(mask: u32, predicate: bool) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { imp::ballot(mask, predicate) }
}

/// [`warp_vote_all`] over the whole warp.
///
/// # Safety
/// Every lane of the warp comes here.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn all(predicate: bool) -> bool {
    // SAFETY: the caller's promise.
    unsafe { imp::all(FULL_MASK, predicate) }
}

/// [`warp_vote_any`] over the whole warp.
///
/// # Safety
/// Every lane of the warp comes here.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn any(predicate: bool) -> bool {
    // SAFETY: the caller's promise.
    unsafe { imp::any(FULL_MASK, predicate) }
}

/// [`warp_vote_ballot`] over the whole warp.
///
/// # Safety
/// Every lane of the warp comes here.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn ballot(predicate: bool) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { imp::ballot(FULL_MASK, predicate) }
}

/// Combines the values of all lanes with `op`, which is commutative; every lane gets the result.
/// A butterfly: five shuffles, the same tree in every lane, so all lanes hold the same bits.
///
/// # Safety
/// Every lane of the warp comes here.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn reduce<T: Word>(value: T, op: impl Fn(T, T) -> T) -> T {
    let mut value = value;
    let mut distance = WARP_SIZE / 2;
    while distance > 0 {
        // SAFETY: the caller's promise.
        value = op(value, unsafe { shuffle_xor(value, distance) });
        distance /= 2;
    }
    value
}

/// `Σ value` over the warp, in every lane.
///
/// # Safety
/// Every lane of the warp comes here.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn sum<T: Word + core::ops::Add<Output = T>>(value: T) -> T {
    // SAFETY: the caller's promise.
    unsafe { reduce(value, |a, b| a + b) }
}

/// `max value` over the warp, in every lane.
///
/// # Safety
/// Every lane of the warp comes here.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn max(value: f32) -> f32 {
    // SAFETY: the caller's promise.
    unsafe { reduce(value, f32::max) }
}

/// `max value` over the warp, in every lane: one instruction.
///
/// # Safety
/// Every lane of the warp comes here.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn max_u32(value: u32) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { imp::max_u32(FULL_MASK, value) }
}

/// `min value` over the warp, in every lane: one instruction.
///
/// # Safety
/// Every lane of the warp comes here.
#[inline(always)]
#[track_caller]
#[must_use]
pub unsafe fn min_u32(value: u32) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { imp::min_u32(FULL_MASK, value) }
}
