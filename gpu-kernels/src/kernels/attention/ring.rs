//! A warp's tiles in shared memory, some of them on their way while one is used.

use cuda_std::{cp_async, prelude::*};

use super::tile::{Pages, Tile};
use super::{CHUNK, SPLIT_KEYS};

/// Tiles of keys and of values in turn, of the chunks that a warp takes: `AHEAD` on their way, and the one in use.
pub(super) struct Ring<const K: usize, const AHEAD: u32> {
    warp: u32,
    /// Of keys and of values.
    caches: [Pages; 2],
    /// The first key that is seen, and one past the last.
    seen: (u32, u32),
    /// What is copied next: keys, then values of a chunk, to the slot that was used longest ago.
    next: u32,
    next_is_v: bool,
    next_slot: u32,
    /// The slot used last.
    slot: u32,
}

impl<const K: usize, const AHEAD: u32> Ring<K, AHEAD> {
    /// The ring of a warp whose first chunk starts at key `next`; nothing is copied yet.
    #[inline(always)]
    pub(super) fn new(warp: u32, caches: [Pages; 2], next: u32, seen: (u32, u32)) -> Self {
        Self { warp, caches, seen, next, next_is_v: false, next_slot: 0, slot: AHEAD }
    }

    /// Where slot `slot` of a warp's ring starts, in bytes.
    #[inline(always)]
    fn byte(warp: u32, slot: u32) -> u32 {
        (warp * (AHEAD + 1) + slot) * Tile::<K>::CHUNK_BYTES
    }

    /// Slot `slot` of a warp's ring.
    #[inline(always)]
    pub(super) fn tile(warp: u32, slot: u32) -> Tile<K> {
        Tile::at(Self::byte(warp, slot))
    }

    /// The slot of a warp that is filled last, as it is before that.
    #[inline(always)]
    pub(super) fn last(warp: u32) -> Shared<f32> {
        dynamic(Self::byte(warp, AHEAD))
    }

    #[inline(always)]
    fn after(slot: u32) -> u32 {
        if slot == AHEAD { 0 } else { slot + 1 }
    }

    /// Starts to copy the next tile, if there is one; keys from `end` on become zeros.
    ///
    /// # Safety
    /// All of the warp is here and done with the tile that was used longest ago; the pages have what the tile copies.
    #[inline(always)]
    unsafe fn copy_next(&mut self, end: u32) {
        // SAFETY: the caller's promise.
        unsafe {
            if self.next < self.seen.1 {
                let from = if self.next_is_v { self.caches[1] } else { self.caches[0] };
                let (keys, seen) = ((self.next, CHUNK), (self.seen.0, end.min(self.seen.1)));
                Self::tile(self.warp, self.next_slot).copy(from, keys, seen, (warp::lane_id(), warp::WARP_SIZE));
            }
        }
        cp_async::commit();
        self.next += if self.next_is_v { SPLIT_KEYS } else { 0 };
        self.next_is_v = !self.next_is_v;
        self.next_slot = Self::after(self.next_slot);
    }

    /// Starts to copy the first `AHEAD` tiles, of keys before `end`.
    ///
    /// # Safety
    /// All of the warp comes here, once; the pages have those keys, and nobody uses the ring but for its last slot.
    #[inline(always)]
    pub(super) unsafe fn fill(&mut self, end: u32) {
        let mut i = 0;
        while i < AHEAD {
            // SAFETY: the caller's promise.
            unsafe { self.copy_next(end) };
            i += 1;
        }
    }

    /// The next tile in order, after its copies have arrived; `AHEAD` more are on their way.
    ///
    /// # Safety
    /// All of the warp comes here, after `fill`; the pages have all keys that are seen.
    #[inline(always)]
    pub(super) unsafe fn arrived(&mut self) -> Tile<K> {
        // SAFETY: the caller's promise.
        unsafe {
            warp::sync_warp(warp::FULL_MASK); // all lanes are done with the tile that is copied over
            self.copy_next(self.seen.1);
            cp_async::wait::<AHEAD>();
            warp::sync_warp(warp::FULL_MASK); // what other lanes copied is there as well
        }
        self.slot = Self::after(self.slot);
        Self::tile(self.warp, self.slot)
    }
}
