//! A block's shared memory, with the history of every byte.
//!
//! # The race detector
//! For each byte it keeps when it was last written, and when and by whom it was read since. Time is counted
//! in *epochs*: the block's goes on at each barrier of the block, the warp's at each `sync_warp`. Two
//! accesses by different lanes are ordered if the block's epoch lies between them or, within a warp, the
//! warp's. If they are not, and one is a write, that is a race, whatever order the lanes happened to run in:
//! the GPU may choose the other.
//!
//! A product of a warpgroup reads what was fenced for it ([`wgmma::fence_shared`](crate::wgmma::fence_shared)): a lane's
//! fences are counted, and a byte remembers the count at its last write.
//!
//! Readers are kept as one lane, as "several lanes of one warp" or as "lanes of several warps", which is all
//! that a later write has to know. Shuffles and votes order no memory, as on the GPU. A `sync_warp` of some
//! lanes counts for the whole warp, so a race may be missed there, but none is invented.

use super::fault::{Access, Space, What};
use bytemuck::Pod;

/// Where the shared window begins. Not 0, so that a forgotten base shows.
pub(super) const BASE: u32 = 0x400;
/// The most lanes of a block.
const MAX_LANES: usize = 1024;

pub(super) struct SharedMemory {
    bytes: Vec<u8>,
    history: Vec<History>,
    /// Epochs only grow, over all blocks that use this memory: what is older than this was written by
    /// another block, hence not at all.
    first_epoch: u32,
    epoch: u32,
    /// How often each lane has fenced its writes for asynchronous reads.
    fences: Vec<u32>,
}

/// Who accesses, and in which epoch of its warp.
#[derive(Clone, Copy)]
pub(super) struct Actor {
    pub(super) lane: u32,
    pub(super) warp_epoch: u32,
}

#[derive(Clone, Copy, Default)]
struct History {
    written: Stamp,
    read: Stamp,
    /// The writer's fences before the write.
    fences: u32,
}

/// How many lanes a stamp stands for.
#[derive(Clone, Copy, Default, PartialEq)]
enum Who {
    /// `lane`
    #[default]
    One,
    /// `lane` and others of its warp
    Warp,
    /// `lane` and others of other warps
    Many,
}

#[derive(Clone, Copy, Default)]
struct Stamp {
    epoch: u32,
    warp_epoch: u32,
    lane: u16,
    who: Who,
    atomic: bool,
}

impl Stamp {
    /// Whether every access behind this stamp is the actor's own, or ordered before it.
    #[inline(always)]
    fn before(&self, actor: Actor, epoch: u32) -> bool {
        if self.epoch < epoch {
            return true;
        }
        let same_warp = u32::from(self.lane) / 32 == actor.lane / 32;
        match self.who {
            Who::One if u32::from(self.lane) == actor.lane => true,
            Who::One | Who::Warp => same_warp && self.warp_epoch < actor.warp_epoch,
            Who::Many => false,
        }
    }

    /// The stamp of these accesses and one more.
    #[inline(always)]
    fn and(&self, actor: Actor, epoch: u32, atomic: bool) -> Self {
        let lane = u16::try_from(actor.lane).expect("a block has at most 1024 lanes");
        let mut new = Self { epoch, warp_epoch: actor.warp_epoch, lane, who: Who::One, atomic };
        if self.epoch == epoch && self.atomic == atomic {
            let same_warp = u32::from(self.lane) / 32 == actor.lane / 32;
            new.who = match self.who {
                Who::Many => Who::Many,
                _ if !same_warp => Who::Many,
                Who::One if self.lane == lane => Who::One,
                // Those before a sync of the warp matter to other warps only, and `lane` stands for them there.
                _ if self.warp_epoch < actor.warp_epoch => Who::One,
                _ => Who::Warp,
            };
        }
        new
    }
}

impl SharedMemory {
    pub(super) fn new(bytes: u32) -> Self {
        let bytes = bytes as usize;
        let history = vec![History::default(); bytes];
        Self { bytes: vec![0; bytes], history, first_epoch: 1, epoch: 1, fences: vec![0; MAX_LANES] }
    }

    /// Forgets everything: another block begins.
    pub(super) fn begin_block(&mut self) {
        self.epoch += 1;
        self.first_epoch = self.epoch;
    }

    /// Every lane has reached the block's barrier.
    pub(super) fn barrier(&mut self) {
        self.epoch += 1;
    }

    #[inline]
    pub(super) fn load<T: Pod>(&mut self, actor: Actor, address: u32) -> Result<T, What> {
        let at = self.check::<T>(address, Access::Read)?;
        let (epoch, first_epoch) = (self.epoch, self.first_epoch);
        for (i, history) in self.history[at..at + size_of::<T>()].iter_mut().enumerate() {
            if history.written.epoch < first_epoch {
                return Err(What::Uninitialised { space: Space::Shared, address: at + i });
            }
            if !history.written.before(actor, epoch) {
                return Err(race(at + i, Access::Read, &history.written, written_by(&history.written)));
            }
            history.read = history.read.and(actor, epoch, false);
        }
        Ok(bytemuck::pod_read_unaligned(&self.bytes[at..at + size_of::<T>()]))
    }

    /// The lane's writes so far are fenced.
    pub(super) fn fence(&mut self, actor: Actor) {
        self.fences[actor.lane as usize] += 1;
    }

    /// Whether those who wrote these bytes have fenced them.
    pub(super) fn check_fenced<T: Pod>(&self, address: u32) -> Result<(), What> {
        let at = self.check::<T>(address, Access::Read)?;
        let fenced = |history: &History| history.fences < self.fences[usize::from(history.written.lane)];
        match self.history[at..at + size_of::<T>()].iter().position(|history| !fenced(history)) {
            // Of what nobody has written, the load itself complains.
            Some(i) if self.history[at + i].written.epoch >= self.first_epoch => {
                Err(What::NotFenced { offset: at + i, writer: u32::from(self.history[at + i].written.lane) })
            }
            _ => Ok(()),
        }
    }

    #[inline]
    pub(super) fn store<T: Pod>(&mut self, actor: Actor, address: u32, value: T) -> Result<(), What> {
        let at = self.check::<T>(address, Access::Write)?;
        self.note_write(actor, at, size_of::<T>(), Access::Write)?;
        self.bytes[at..at + size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&value));
        Ok(())
    }

    #[inline]
    pub(super) fn atomic(&mut self, actor: Actor, address: u32, op: impl Fn(u32) -> u32) -> Result<u32, What> {
        let at = self.check::<u32>(address, Access::Atomic)?;
        if let Some(i) = (at..at + 4).find(|&i| self.history[i].written.epoch < self.first_epoch) {
            return Err(What::Uninitialised { space: Space::Shared, address: i });
        }
        self.note_write(actor, at, 4, Access::Atomic)?;
        let old = bytemuck::pod_read_unaligned(&self.bytes[at..at + 4]);
        self.bytes[at..at + 4].copy_from_slice(&op(old).to_le_bytes());
        Ok(old)
    }

    #[inline]
    fn note_write(&mut self, actor: Actor, at: usize, bytes: usize, access: Access) -> Result<(), What> {
        let epoch = self.epoch;
        let atomic = access == Access::Atomic;
        for (i, history) in self.history[at..at + bytes].iter_mut().enumerate() {
            let written = &history.written;
            let both_atomic = atomic && written.atomic;
            if !both_atomic && !written.before(actor, epoch) {
                return Err(race(at + i, access, written, written_by(written)));
            }
            if !history.read.before(actor, epoch) {
                return Err(race(at + i, access, &history.read, Access::Read));
            }
            history.fences = self.fences[actor.lane as usize];
            history.written = match both_atomic {
                true => written.and(actor, epoch, true),
                false => Stamp::default().and(actor, epoch, atomic),
            };
        }
        Ok(())
    }

    /// The offset of an access that is aligned and inside.
    #[inline]
    pub(super) fn check<T>(&self, address: u32, access: Access) -> Result<usize, What> {
        self.check_bytes(address, size_of::<T>(), align_of::<T>(), access)
    }

    #[inline]
    pub(super) fn check_bytes(&self, address: u32, bytes: usize, align: usize, access: Access) -> Result<usize, What> {
        let offset = address.wrapping_sub(BASE) as usize;
        if !offset.is_multiple_of(align) {
            return Err(What::Misaligned { space: Space::Shared, access, address: offset, align });
        }
        if offset > self.bytes.len() || bytes > self.bytes.len() - offset {
            let nearest = format!("the block has {} bytes", self.bytes.len());
            return Err(What::OutOfBounds { space: Space::Shared, access, address: offset, bytes, nearest });
        }
        Ok(offset)
    }
}

fn written_by(stamp: &Stamp) -> Access {
    if stamp.atomic { Access::Atomic } else { Access::Write }
}

#[cold]
fn race(offset: usize, access: Access, other: &Stamp, other_access: Access) -> What {
    What::Race { offset, access, other_access, other: u32::from(other.lane) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(lane: u32) -> Actor {
        Actor { lane, warp_epoch: 0 }
    }

    /// Memory of one word, which lane 0 has written before a barrier.
    fn written() -> SharedMemory {
        let mut memory = SharedMemory::new(4);
        memory.begin_block();
        memory.store(lane(0), BASE, 7u32).expect("nobody else is there");
        memory.barrier();
        memory
    }

    fn races<T>(result: Result<T, What>) -> bool {
        matches!(result, Err(What::Race { .. }))
    }

    #[test]
    fn any_number_of_lanes_may_read() {
        let mut memory = written();
        for reader in [0, 1, 2, 33, 1, 1000] {
            assert_eq!(memory.load(lane(reader), BASE), Ok(7u32));
        }
    }

    #[test]
    fn a_write_races_with_every_earlier_reader_but_itself() {
        for readers in [&[5][..], &[5, 6], &[6, 5], &[5, 40], &[40, 5], &[5, 40, 5]] {
            let mut memory = written();
            for &reader in readers {
                assert_eq!(memory.load(lane(reader), BASE), Ok(7u32));
            }
            let alone = readers == [5];
            assert_eq!(races(memory.store(lane(5), BASE, 8u32)), !alone, "readers {readers:?}");
            let mut memory = written();
            for &reader in readers {
                assert_eq!(memory.load(lane(reader), BASE), Ok(7u32));
            }
            memory.barrier();
            assert_eq!(memory.store(lane(5), BASE, 8u32), Ok(()));
        }
    }

    #[test]
    fn a_warps_sync_orders_that_warp() {
        let mut memory = written();
        let after_sync = |lane| Actor { lane, warp_epoch: 1 };
        assert_eq!(memory.load(lane(3), BASE), Ok(7u32));
        assert_eq!(memory.store(after_sync(4), BASE, 8u32), Ok(()), "same warp, later");
        assert!(races(memory.load::<u32>(after_sync(40), BASE)), "another warp");
        assert!(races(memory.load::<u32>(after_sync(5), BASE)), "no second sync");
        assert_eq!(memory.load(Actor { lane: 5, warp_epoch: 2 }, BASE), Ok(8u32));
    }

    #[test]
    fn atomics_race_with_plain_accesses_only() {
        let mut memory = written();
        assert_eq!(memory.atomic(lane(1), BASE, |v| v + 1), Ok(7));
        assert_eq!(memory.atomic(lane(40), BASE, |v| v + 1), Ok(8));
        assert!(races(memory.load::<u32>(lane(40), BASE)), "lane 1 has added in the same epoch");
        memory.barrier();
        assert_eq!(memory.load(lane(40), BASE), Ok(9u32));
        assert!(races(memory.atomic(lane(1), BASE, |v| v)), "lane 40 has read");
    }

    #[test]
    fn a_fence_covers_the_lanes_earlier_writes() {
        let mut memory = written();
        let not_fenced =
            |memory: &SharedMemory| matches!(memory.check_fenced::<u32>(BASE), Err(What::NotFenced { .. }));
        assert!(not_fenced(&memory));
        memory.fence(lane(1));
        assert!(not_fenced(&memory), "another lane's fence");
        memory.fence(lane(0));
        assert_eq!(memory.check_fenced::<u32>(BASE), Ok(()));
        memory.store(lane(0), BASE, 8u32).expect("nobody else is there");
        assert!(not_fenced(&memory), "written again");
    }

    #[test]
    fn neighbouring_bytes_do_not_race() {
        let mut memory = written();
        for byte in 0..4 {
            assert_eq!(memory.store(lane(byte), BASE + byte, byte as u8), Ok(()));
        }
        memory.barrier();
        assert_eq!(memory.load(lane(9), BASE), Ok(0x0302_0100u32));
    }

    #[test]
    fn another_block_finds_nothing_written() {
        let mut memory = written();
        memory.begin_block();
        assert_eq!(memory.load::<u32>(lane(0), BASE), Err(What::Uninitialised { space: Space::Shared, address: 0 }));
    }
}
