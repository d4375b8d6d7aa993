//! Typed device memory: owned buffers, and checked parts of them.

use std::any::type_name;
use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};

use bytemuck::Pod;

use super::device::{Device, DeviceError, DeviceId, Memory, Result};

/// Device memory for a number of elements, freed on drop.
pub struct Buffer<D: Device, T> {
    memory: D::Memory,
    len: usize,
    device: DeviceId,
    element: PhantomData<T>,
}

impl<D: Device, T: Pod> Buffer<D, T> {
    pub(super) fn new(device: &D, len: usize) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok());
        let Some(bytes) = bytes else {
            return Err(DeviceError::OutOfMemory {
                wanted_bytes: u64::MAX,
                free_bytes: device.memory().map_or(0, |memory| memory.free_bytes),
            });
        };
        Ok(Buffer { memory: device.alloc_bytes(bytes)?, len, device: device.id(), element: PhantomData })
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All of it.
    pub fn slice(&self) -> Slice<'_, T> {
        Slice { address: self.memory.address(), len: self.len, device: self.device, buffer: PhantomData }
    }

    /// Elements `range` of it.
    ///
    /// # Errors
    /// [`DeviceError::Range`] where the range is not inside.
    pub fn part(&self, range: impl RangeBounds<usize>) -> Result<Slice<'_, T>> {
        self.slice().part(range)
    }
}

/// A part of device memory: an address, a length, and the lifetime of the buffer.
///
/// It is no Rust reference. The memory is the device's, host code never dereferences it, and kernels
/// may write through a slice that is also read elsewhere; each kernel's `# Safety` list says which of its
/// operands may overlap, and [`Slice::overlaps`] is there to check it.
#[derive(Debug)]
pub struct Slice<'a, T> {
    address: u64,
    len: usize,
    device: DeviceId,
    buffer: PhantomData<&'a T>,
}

impl<T> Clone for Slice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Slice<'_, T> {}

impl<'a, T: Pod> Slice<'a, T> {
    /// The number of elements.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Where the memory is.
    pub fn device(self) -> DeviceId {
        self.device
    }

    /// The device address, for a kernel's argument.
    pub fn ptr(self) -> *const T {
        std::ptr::with_exposed_provenance(self.address as usize)
    }

    /// The device address, for a kernel's output.
    pub fn ptr_mut(self) -> *mut T {
        std::ptr::with_exposed_provenance_mut(self.address as usize)
    }

    /// The device address as a number.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Elements `range` of it.
    ///
    /// # Errors
    /// [`DeviceError::Range`] where the range is not inside.
    pub fn part(self, range: impl RangeBounds<usize>) -> Result<Slice<'a, T>> {
        let start = match range.start_bound() {
            Bound::Included(&start) => Some(start),
            Bound::Excluded(&before) => before.checked_add(1),
            Bound::Unbounded => Some(0),
        };
        let end = match range.end_bound() {
            Bound::Included(&last) => last.checked_add(1),
            Bound::Excluded(&end) => Some(end),
            Bound::Unbounded => Some(self.len),
        };
        match (start, end) {
            (Some(start), Some(end)) if start <= end && end <= self.len => {
                // Inside the allocation, so neither product nor sum can overflow.
                let address = self.address + (start * size_of::<T>()) as u64;
                Ok(Slice { address, len: end - start, ..self })
            }
            _ => Err(DeviceError::Range(format!(
                "elements {:?}..{:?} of {} {}",
                range.start_bound(),
                range.end_bound(),
                self.len,
                type_name::<T>()
            ))),
        }
    }

    /// The same memory as elements of another type.
    ///
    /// # Errors
    /// [`DeviceError::Range`] where the size is no multiple of `U`'s, or the address not aligned for it.
    pub fn cast<U: Pod>(self) -> Result<Slice<'a, U>> {
        let bytes = self.as_bytes();
        let size = size_of::<U>();
        if size == 0 || !bytes.len.is_multiple_of(size) || !self.address.is_multiple_of(align_of::<U>() as u64) {
            let (from, to) = (type_name::<T>(), type_name::<U>());
            return Err(DeviceError::Range(format!("{} {from} at {:#x} as {to}", self.len, self.address)));
        }
        Ok(Slice { address: self.address, len: bytes.len / size, device: self.device, buffer: PhantomData })
    }

    /// The same memory as bytes.
    pub fn as_bytes(self) -> Slice<'a, u8> {
        // The buffer's size in bytes was checked when it was allocated.
        Slice { address: self.address, len: self.len * size_of::<T>(), device: self.device, buffer: PhantomData }
    }

    /// Whether two parts share a byte.
    pub fn overlaps<U: Pod>(self, other: Slice<'_, U>) -> bool {
        let (a, b) = (self.as_bytes(), other.as_bytes());
        a.device == b.device
            && a.len > 0
            && b.len > 0
            && a.address < b.address + b.len as u64
            && b.address < a.address + a.len as u64
    }

    /// Checks the address's alignment, in bytes, for wide loads.
    ///
    /// # Errors
    /// [`DeviceError::Range`].
    pub fn check_aligned(self, bytes: u64) -> Result<()> {
        if self.address.is_multiple_of(bytes) {
            return Ok(());
        }
        Err(DeviceError::Range(format!("{:#x} is not aligned to {bytes} bytes", self.address)))
    }

    /// Checks the number of elements.
    ///
    /// # Errors
    /// [`DeviceError::Range`], which names the operand.
    pub fn check_len(self, operand: &str, len: usize) -> Result<()> {
        if self.len == len {
            return Ok(());
        }
        Err(DeviceError::Range(format!("{operand} has {} elements, not {len}", self.len)))
    }
}
