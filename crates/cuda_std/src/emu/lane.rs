//! What a running lane may do: the emulated side of this crate's accessors.

use super::block::{Block, CopyAsync, State};
use super::fault::{Access, What, raise};
use super::shared::BASE;
use super::warp::{Collective, Given, lanes};
use crate::{U32x4, Word};
use bytemuck::Pod;
use core::cell::Cell;
use core::ops::Deref;
use core::panic::Location;

thread_local! {
    /// The block that this host thread runs; null outside of a launch.
    static CURRENT: Cell<*const Block<'static>> = const { Cell::new(core::ptr::null()) };
}

/// Makes `block` the current one while `f` runs.
pub(super) fn with_current<R>(block: &Block<'_>, f: impl FnOnce() -> R) -> R {
    struct Restore(*const Block<'static>);
    impl Drop for Restore {
        fn drop(&mut self) {
            CURRENT.set(self.0);
        }
    }
    let _restore = Restore(CURRENT.replace(core::ptr::from_ref(block).cast()));
    f()
}

/// The lane that asks. Only lives within one call of an accessor.
#[derive(Clone, Copy)]
pub(crate) struct Lane(*const Block<'static>);

impl Deref for Lane {
    type Target = Block<'static>;

    #[inline(always)]
    fn deref(&self) -> &Self::Target {
        // SAFETY: `current` made it from a pointer that is set only while the block lives, and the lane's
        // coroutine, in which this value stays, does not outlive the block.
        unsafe { &*self.0 }
    }
}

/// The lane that runs on this host thread.
///
/// # Panics
/// Outside of an emulated launch.
#[inline(always)]
pub(crate) fn current() -> Lane {
    let block = CURRENT.get();
    assert!(!block.is_null(), "a device function was called outside of an emulated launch");
    Lane(block)
}

/// The value, or the end of this lane.
#[inline(always)]
#[track_caller]
fn or_raise<T>(result: Result<T, What>) -> T {
    match result {
        Ok(value) => value,
        Err(what) => raise(Location::caller(), what),
    }
}

/// Places and shapes.
impl Lane {
    pub(crate) fn thread_idx(self) -> [u32; 3] {
        self.thread(self.running.get())
    }
    pub(crate) fn block_idx(self) -> [u32; 3] {
        self.index.get()
    }
    pub(crate) fn block_dim(self) -> [u32; 3] {
        self.launch.block
    }
    pub(crate) fn grid_dim(self) -> [u32; 3] {
        self.launch.grid
    }
    pub(crate) fn lane_id(self) -> u32 {
        self.running.get() % 32
    }
}

/// Memory.
impl Lane {
    #[inline]
    #[track_caller]
    pub(crate) fn load<T: Pod>(self, p: *const T) -> T {
        or_raise(self.memory.load(p.addr()))
    }
    #[inline]
    #[track_caller]
    pub(crate) fn store<T: Pod>(self, p: *mut T, value: T) {
        or_raise(self.memory.store(p.addr(), value));
    }
    #[inline]
    #[track_caller]
    pub(crate) fn atomic<T: Word>(self, p: *mut T, op: impl Fn(T) -> T) -> T {
        T::from_bits(or_raise(self.memory.atomic(p.addr(), |bits| op(T::from_bits(bits)).to_bits())))
    }
    #[inline]
    #[track_caller]
    pub(crate) fn atomic_u64(self, p: *mut u64, op: impl Fn(u64) -> u64) -> u64 {
        or_raise(self.memory.atomic_u64(p.addr(), op))
    }

    pub(crate) fn shared_base(self) -> u32 {
        BASE
    }
    #[inline]
    #[track_caller]
    pub(crate) fn shared_load<T: Pod>(self, address: u32) -> T {
        or_raise(self.shared.borrow_mut().load(self.actor(), address))
    }
    /// A load past the usual ways, by a product of a warpgroup.
    #[inline]
    #[track_caller]
    pub(crate) fn shared_load_async<T: Pod>(self, address: u32) -> T {
        let mut shared = self.shared.borrow_mut();
        or_raise(shared.check_fenced::<T>(address));
        or_raise(shared.load(self.actor(), address))
    }
    pub(crate) fn fence_shared_async(self) {
        self.shared.borrow_mut().fence(self.actor());
    }
    #[inline]
    #[track_caller]
    pub(crate) fn shared_store<T: Pod>(self, address: u32, value: T) {
        or_raise(self.shared.borrow_mut().store(self.actor(), address, value));
    }
    #[inline]
    #[track_caller]
    pub(crate) fn shared_atomic<T: Word>(self, address: u32, op: impl Fn(T) -> T) -> T {
        let op = |bits| op(T::from_bits(bits)).to_bits();
        T::from_bits(or_raise(self.shared.borrow_mut().atomic(self.actor(), address, op)))
    }
    /// `ldmatrix` wants its rows aligned to their 16 bytes.
    #[track_caller]
    pub(crate) fn check_aligned_row(self, address: u32) {
        or_raise(self.shared.borrow().check_bytes(address, 16, 16, Access::Read));
    }
}

/// Asynchronous copies: checked when they start, done when they are waited for.
impl Lane {
    #[track_caller]
    pub(crate) fn copy_async<T: Pod>(self, to: u32, from: *const u8, bytes: u32) {
        let size = size_of::<T>();
        or_raise(self.shared.borrow().check_bytes(to, size, size, Access::Write));
        if bytes > 0 {
            or_raise(self.memory.check(from.addr(), bytes as usize, size, Access::Read));
        }
        let copy = CopyAsync { to, from: from.addr(), size, bytes, at: Location::caller() };
        self.slot().copies.borrow_mut().open.push(copy);
    }

    pub(crate) fn commit_copies(self) {
        let mut copies = self.slot().copies.borrow_mut();
        let group = core::mem::take(&mut copies.open);
        copies.groups.push_back(group);
    }

    pub(crate) fn wait_copies(self, pending: u32) {
        loop {
            let mut copies = self.slot().copies.borrow_mut();
            if copies.groups.len() <= pending as usize {
                return;
            }
            let group = copies.groups.pop_front().expect("there are more than `pending` groups");
            drop(copies);
            for copy in &group {
                self.finish_copy(copy).unwrap_or_else(|what| raise(copy.at, what));
            }
        }
    }

    fn finish_copy(self, copy: &CopyAsync) -> Result<(), What> {
        let mut bytes = [0u8; 16];
        for (i, byte) in bytes.iter_mut().enumerate().take(copy.bytes as usize) {
            *byte = self.memory.load(copy.from + i)?;
        }
        let (actor, mut shared) = (self.actor(), self.shared.borrow_mut());
        match copy.size {
            4 => shared.store::<u32>(actor, copy.to, bytemuck::pod_read_unaligned(&bytes[..4])),
            _ => shared.store::<U32x4>(actor, copy.to, bytemuck::cast(bytes)),
        }
    }
}

/// Meeting other lanes.
impl Lane {
    /// Gives up control until the state is `Ready` again.
    fn wait(self, state: State, at: &'static Location<'static>) {
        let slot = self.slot();
        slot.state.set(state);
        slot.at.set(Some(at));
        // SAFETY: set when this lane's coroutine began, which still runs: it is this code.
        unsafe { (*slot.yielder.get()).suspend(()) };
    }

    /// The block's barrier: the number of lanes whose predicate holds, and of all lanes.
    #[track_caller]
    pub(crate) fn barrier(self, predicate: bool) -> (u32, u32) {
        self.votes.set(self.votes.get() + u32::from(predicate));
        self.wait(State::Barrier, Location::caller());
        self.result.get()
    }

    /// Lets the other lanes run before memory is polled again.
    #[track_caller]
    pub(crate) fn spin(self) {
        self.wait(State::Spinning, Location::caller());
    }

    #[track_caller]
    pub(crate) fn sync_warp(self, mask: u32) {
        let [] = self.exchange(Collective::Sync, mask, [], |_: &Given<'_, 0>, _| []);
    }

    /// Brings `words` to a collective; `result` says what each lane gets for what all have brought.
    ///
    /// The last lane to come runs `result` for everybody and goes straight on.
    #[track_caller]
    pub(crate) fn exchange<const N: usize, const M: usize>(
        self,
        kind: Collective,
        mask: u32,
        words: [u32; N],
        result: impl Fn(&Given<'_, N>, u32) -> [u32; M],
    ) -> [u32; M] {
        const { assert!(N <= 32 && M <= 32) };
        let at = Location::caller();
        let (index, lane) = (self.running.get() / 32, self.lane_id());
        if mask >> lane & 1 == 0 {
            raise(at, What::OutsideMask { collective: kind.name(), mask, lane });
        }
        let warp = self.warp();
        warp.bring(lane, words);
        let state = State::Warp(kind, mask);
        if lanes(mask).any(|other| other != lane && self.state(index, other) != state) {
            self.wait(state, at);
        } else {
            warp.exchange(kind, mask, at, result);
            if kind == Collective::Sync {
                warp.epoch.set(warp.epoch.get() + 1);
            }
            for other in lanes(mask) {
                self.slots[(index * 32 + other) as usize].state.set(State::Ready);
            }
        }
        warp.take(lane)
    }
}
