//! Global memory: allocations, and the check of every access against them.

use super::fault::{Access, Space, What};
use bytemuck::Pod;
use core::cell::Cell;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::{Arc, PoisonError, RwLock};

/// As `cuMemAlloc`.
const ALIGN: usize = 256;
/// Unused bytes behind each allocation, so that a stray access does not meet the neighbour.
const GUARD: usize = 4096;
/// What unwritten memory holds: NaN as a float, −1 as an integer.
const POISON: u8 = 0xff;

/// The live allocations, by address. A launch holds the lock for reading until it has ended, and whoever
/// frees or touches an allocation from the host takes it for writing.
#[derive(Debug, Default)]
pub(super) struct Table {
    pub(super) ranges: Vec<Range>,
}

/// One allocation, as an access sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    start: usize,
    bytes: usize,
    /// One byte for each byte, 1 once it is written; null where all is written from the start.
    written: *const AtomicU8,
}

// SAFETY: `written` points to atomics that live as long as the range is in the table.
unsafe impl Send for Range {}
// SAFETY: as above.
unsafe impl Sync for Range {}

const NOTHING: Range = Range { start: 0, bytes: 0, written: core::ptr::null() };

/// The table as one block sees it: with the ranges it met last, which is nearly always enough.
pub(super) struct View<'a> {
    ranges: &'a [Range],
    recent: [Cell<Range>; 4],
    oldest: Cell<usize>,
}

impl<'a> View<'a> {
    pub(super) fn new(table: &'a Table) -> Self {
        Self { ranges: &table.ranges, recent: [const { Cell::new(NOTHING) }; 4], oldest: Cell::new(0) }
    }

    /// The value at `address`.
    #[inline]
    pub(super) fn load<T: Pod>(&self, address: usize) -> Result<T, What> {
        let range = self.check(address, size_of::<T>(), align_of::<T>(), Access::Read)?;
        range.require_written(address, size_of::<T>())?;
        // SAFETY: the check has found the bytes inside of a live allocation, and the alignment right.
        Ok(unsafe { read(address as *const T) })
    }

    /// Writes the value at `address`.
    #[inline]
    pub(super) fn store<T: Pod>(&self, address: usize, value: T) -> Result<(), What> {
        let range = self.check(address, size_of::<T>(), align_of::<T>(), Access::Write)?;
        range.mark_written(address, size_of::<T>());
        // SAFETY: as in `load`.
        unsafe { write(address as *mut T, value) };
        Ok(())
    }

    /// Replaces the word at `address` by `op` of it; the old one.
    #[inline]
    pub(super) fn atomic(&self, address: usize, op: impl Fn(u32) -> u32) -> Result<u32, What> {
        let range = self.check(address, 4, 4, Access::Atomic)?;
        range.require_written(address, 4)?;
        // SAFETY: as in `load`; all accesses to the memory are atomic.
        let word = unsafe { AtomicU32::from_ptr(address as *mut u32) };
        let mut old = word.load(Relaxed);
        while let Err(now) = word.compare_exchange_weak(old, op(old), Relaxed, Relaxed) {
            old = now;
        }
        Ok(old)
    }

    /// The same of a word of 64 bits.
    #[inline]
    pub(super) fn atomic_u64(&self, address: usize, op: impl Fn(u64) -> u64) -> Result<u64, What> {
        let range = self.check(address, 8, 8, Access::Atomic)?;
        range.require_written(address, 8)?;
        // SAFETY: as in `atomic`.
        let word = unsafe { AtomicU64::from_ptr(address as *mut u64) };
        let mut old = word.load(Relaxed);
        while let Err(now) = word.compare_exchange_weak(old, op(old), Relaxed, Relaxed) {
            old = now;
        }
        Ok(old)
    }

    #[inline]
    pub(super) fn check(&self, address: usize, bytes: usize, align: usize, access: Access) -> Result<Range, What> {
        if !address.is_multiple_of(align) {
            return Err(What::Misaligned { space: Space::Global, access, address, align });
        }
        for recent in &self.recent {
            let range = recent.get();
            if range.holds(address, bytes) {
                return Ok(range);
            }
        }
        self.find(address, bytes, access)
    }

    #[cold]
    fn find(&self, address: usize, bytes: usize, access: Access) -> Result<Range, What> {
        let above = self.ranges.partition_point(|range| range.start <= address);
        let below = above.checked_sub(1).map(|i| self.ranges[i]);
        if let Some(range) = below.filter(|range| range.holds(address, bytes)) {
            let slot = self.oldest.get();
            self.recent[slot].set(range);
            self.oldest.set((slot + 1) % self.recent.len());
            return Ok(range);
        }
        let nearest = match below {
            Some(range) if address - range.start < range.bytes + GUARD => {
                format!("{} bytes into an allocation of {}", address - range.start, range.bytes)
            }
            _ => "near no allocation below it".to_owned(),
        };
        Err(What::OutOfBounds { space: Space::Global, access, address, bytes, nearest })
    }
}

impl Range {
    #[inline(always)]
    fn holds(&self, address: usize, bytes: usize) -> bool {
        self.bytes >= bytes && address.wrapping_sub(self.start) <= self.bytes - bytes
    }

    fn flags(&self, address: usize, bytes: usize) -> &[AtomicU8] {
        if self.written.is_null() {
            return &[];
        }
        // SAFETY: there is a flag for each byte of the range, and `check` has found these bytes inside.
        unsafe { core::slice::from_raw_parts(self.written.add(address - self.start), bytes) }
    }

    #[inline]
    pub(super) fn require_written(&self, address: usize, bytes: usize) -> Result<(), What> {
        match self.flags(address, bytes).iter().position(|flag| flag.load(Relaxed) == 0) {
            None => Ok(()),
            Some(i) => Err(What::Uninitialised { space: Space::Global, address: address + i }),
        }
    }

    #[inline]
    fn mark_written(&self, address: usize, bytes: usize) {
        for flag in self.flags(address, bytes) {
            flag.store(1, Relaxed);
        }
    }
}

/// Copies in units of the alignment, each atomically: two blocks that race on the emulated device must not
/// be undefined behaviour on the host.
macro_rules! units {
    ($atomic:ident, $unit:ty, $memory:expr, $bytes:expr, |$word:ident, $i:ident| $body:expr) => {
        for $i in 0..$bytes / size_of::<$unit>() {
            // SAFETY: the caller's promise; the unit is no larger than the alignment.
            let $word = unsafe { $atomic::from_ptr($memory.cast::<$unit>().add($i)) };
            $body
        }
    };
}

/// # Safety
/// `from` is aligned, and its bytes lie in one live allocation.
#[inline(always)]
unsafe fn read<T: Pod>(from: *const T) -> T {
    let mut value = T::zeroed();
    let to = (&raw mut value).cast::<u8>();
    let from = from.cast_mut();
    macro_rules! copy {
        ($atomic:ident, $unit:ty) => {
            units!($atomic, $unit, from, size_of::<T>(), |word, i| {
                // SAFETY: the bytes of `value`; unit by unit.
                unsafe { to.cast::<$unit>().add(i).write_unaligned(word.load(Relaxed)) }
            })
        };
    }
    match align_of::<T>() {
        1 => copy!(AtomicU8, u8),
        2 => copy!(AtomicU16, u16),
        4 => copy!(AtomicU32, u32),
        _ => copy!(AtomicU64, u64),
    }
    value
}

/// # Safety
/// `to` is aligned, and its bytes lie in one live allocation.
#[inline(always)]
unsafe fn write<T: Pod>(to: *mut T, value: T) {
    let from = (&raw const value).cast::<u8>();
    macro_rules! copy {
        ($atomic:ident, $unit:ty) => {
            units!($atomic, $unit, to, size_of::<T>(), |word, i| {
                // SAFETY: the bytes of `value`, all initialised since `T` is plain old data.
                word.store(unsafe { from.cast::<$unit>().add(i).read_unaligned() }, Relaxed)
            })
        };
    }
    match align_of::<T>() {
        1 => copy!(AtomicU8, u8),
        2 => copy!(AtomicU16, u16),
        4 => copy!(AtomicU32, u32),
        _ => copy!(AtomicU64, u64),
    }
}

/// Memory of the emulated device: `len` elements, freed on drop.
///
/// A buffer is passed to a kernel by its pointer, as the driver would have it.
#[derive(Debug)]
pub struct Buffer<T> {
    table: Arc<RwLock<Table>>,
    memory: NonNull<u8>,
    layout: Layout,
    len: usize,
    /// Owns what [`Range::written`] points to.
    written: Box<[AtomicU8]>,
    marker: PhantomData<T>,
}

// SAFETY: the memory is only accessed under the table's lock or by atomics.
unsafe impl<T: Send> Send for Buffer<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Buffer<T> {}

impl<T: Pod> Buffer<T> {
    pub(super) fn new(table: &Arc<RwLock<Table>>, len: usize, initialised: bool) -> Self {
        let bytes = size_of::<T>().checked_mul(len).expect("a buffer fits the address space");
        let padded = bytes.checked_add(GUARD).expect("a buffer fits the address space");
        let layout = Layout::from_size_align(padded, ALIGN).expect("a buffer fits the address space");
        // SAFETY: the size is not zero.
        let memory = NonNull::new(unsafe { alloc(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        // SAFETY: the allocation has this many bytes.
        unsafe { memory.write_bytes(POISON, padded) };
        let written: Box<[AtomicU8]> = match initialised {
            true => Box::default(),
            false => (0..bytes).map(|_| AtomicU8::new(0)).collect(),
        };
        let flags = if initialised { core::ptr::null() } else { written.as_ptr() };
        let range = Range { start: memory.as_ptr().addr(), bytes, written: flags };
        let ranges = &mut table.write().unwrap_or_else(PoisonError::into_inner).ranges;
        ranges.insert(ranges.partition_point(|other| other.start < range.start), range);
        Self { table: Arc::clone(table), memory, layout, len, written, marker: PhantomData }
    }

    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device pointer, for a kernel that reads.
    #[must_use]
    pub fn as_ptr(&self) -> *const T {
        self.memory.as_ptr().cast()
    }

    /// The device pointer, for a kernel that writes. Takes `&self`, since a launch is not a borrow.
    #[must_use]
    pub fn as_mut_ptr(&self) -> *mut T {
        self.memory.as_ptr().cast()
    }

    /// The elements. Bytes that were never written read as all ones.
    #[must_use]
    pub fn to_vec(&self) -> Vec<T> {
        let mut out = vec![T::zeroed(); self.len];
        self.read(0, &mut out);
        out
    }

    /// Copies the elements from `start` on into `out`.
    ///
    /// # Panics
    /// If they are not all there.
    pub fn read(&self, start: usize, out: &mut [T]) {
        assert!(start <= self.len && out.len() <= self.len - start, "read past the end of a buffer");
        let _no_launch = self.table.write().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: inside of the allocation, which no launch touches while the table is locked.
        unsafe { out.as_mut_ptr().copy_from_nonoverlapping(self.as_ptr().add(start), out.len()) };
    }

    /// Copies `values` to the elements from `start` on.
    ///
    /// # Panics
    /// If there are not that many.
    pub fn write(&self, start: usize, values: &[T]) {
        assert!(start <= self.len && values.len() <= self.len - start, "write past the end of a buffer");
        let _no_launch = self.table.write().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as in `read`.
        unsafe { self.as_mut_ptr().add(start).copy_from_nonoverlapping(values.as_ptr(), values.len()) };
        if !self.written.is_empty() {
            let bytes = start * size_of::<T>()..(start + values.len()) * size_of::<T>();
            for flag in &self.written[bytes] {
                flag.store(1, Relaxed);
            }
        }
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        let ranges = &mut self.table.write().unwrap_or_else(PoisonError::into_inner).ranges;
        ranges.retain(|range| range.start != self.memory.as_ptr().addr());
        // SAFETY: allocated with this layout, and out of the table, so nobody can reach it any more.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) };
    }
}
