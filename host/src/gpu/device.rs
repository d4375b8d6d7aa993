//! A device that runs kernels: what the GPU backend asks of the CUDA driver and of the emulator.
//!
//! # Order
//! A device has one stream. Launches, copies, uploads, downloads and fills take effect in the order of
//! the calls, and each sees the effects of those before it, so nothing between them synchronises. The
//! host does run ahead: what it shares with the device is page-locked memory, and it touches that only
//! after the event of the transfer. ([`super::staging`] does so.)
//!
//! # Lifetimes
//! A launch takes raw addresses, and returns before the kernel has run. Memory must therefore outlive
//! the work that uses it. Freeing device memory is safe at any time: the driver finishes outstanding
//! work first. What must not happen is a launch (or the replay of a graph) with the address of memory
//! that was freed before; launchers get addresses from a borrowed [`Slice`], and whoever keeps a graph
//! keeps the buffers that it was captured with.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

use bytemuck::Pod;
use cuda_std::launch::{Kernel, Launch};

use super::memory::{Buffer, Slice};
use super::profile::Profile;

/// The result of device operations.
pub type Result<T> = std::result::Result<T, DeviceError>;

/// A failure of a device operation.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// An allocation does not fit.
    #[error("out of device memory: {} wanted, {} free", mib(.wanted_bytes), mib(.free_bytes))]
    OutOfMemory {
        /// The size of the allocation.
        wanted_bytes: u64,
        /// What was free then.
        free_bytes: u64,
    },
    /// The device cannot do this.
    #[error("{device} cannot {what}")]
    Unsupported {
        /// The device's name.
        device: String,
        /// The operation.
        what: &'static str,
    },
    /// An operand lives on another device.
    #[error("memory of device {memory} used on device {device}")]
    WrongDevice {
        /// Where the memory is.
        memory: DeviceId,
        /// Where it was used.
        device: DeviceId,
    },
    /// A part of a buffer was asked for that it does not have, or that is not aligned.
    #[error("{0}")]
    Range(String),
    /// A launch that the device would refuse.
    #[error("kernel {kernel}, grid {grid:?}, block {block:?}: {reason}")]
    Launch {
        /// The kernel.
        kernel: &'static str,
        /// Blocks.
        grid: [u32; 3],
        /// Threads of a block.
        block: [u32; 3],
        /// What is wrong with it.
        reason: String,
    },
    /// A kernel did something wrong on the emulated device.
    #[error(transparent)]
    Fault(#[from] Box<cuda_std::emu::Fault>),
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] crate::cuda::Error),
}

fn mib(bytes: &u64) -> String {
    format!("{:.1} MiB", *bytes as f64 / (1 << 20) as f64)
}

/// Tells the devices of this process apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceId(u32);

impl DeviceId {
    /// An id that no other device has.
    pub fn next() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        DeviceId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// What launchers choose geometry by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    /// The product's name.
    pub name: String,
    /// Compute capability: 9.0 is `(9, 0)`.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub n_sm: u32,
    /// Shared memory that one block may have, opted in.
    pub shared_bytes_per_block: u32,
    /// Threads that one block may have.
    pub max_threads_per_block: u32,
    /// Second-level cache.
    pub l2_bytes: u32,
    /// Whether its kernels have the products of warpgroups ([`cuda_std::wgmma`]): those for sm_90a.
    pub wgmma: bool,
}

/// A device's memory at some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// What an allocation may still take.
    pub free_bytes: u64,
    /// All of it.
    pub total_bytes: u64,
}

/// Owned device memory, freed on drop.
pub trait Memory: Send + Sync {
    /// The device address of the first byte, aligned to at least 256 bytes.
    fn address(&self) -> u64;
    /// The size that was asked for.
    fn len_bytes(&self) -> usize;
}

/// Page-locked host memory, which the device reads and writes without the CPU. Dropping it waits for
/// the device, so a transfer under way never meets freed memory.
pub trait Pinned: Send + Sync {
    /// The bytes.
    fn bytes(&self) -> &[u8];
    /// The bytes, to write.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// A device that runs kernels. See the module's text for order and lifetimes.
#[expect(unsafe_code, reason = "launching has a contract that types cannot state")]
pub trait Device: Send + Sync + Sized + 'static {
    /// Device memory.
    type Memory: Memory;
    /// Page-locked host memory.
    type Pinned: Pinned;
    /// A point in the stream.
    type Event: Send;
    /// A captured sequence of launches.
    type Graph: Send;

    /// Which device this is.
    fn id(&self) -> DeviceId;
    /// Name and limits.
    fn properties(&self) -> &Properties;
    /// Free and total memory now.
    ///
    /// # Errors
    /// The driver's, also an earlier kernel's fault.
    fn memory(&self) -> Result<MemoryInfo>;

    /// Reserves `bytes` of device memory with unspecified contents. Zero bytes are allowed.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] where they do not fit.
    fn alloc_bytes(&self, bytes: usize) -> Result<Self::Memory>;

    /// Reserves zeroed page-locked host memory.
    ///
    /// # Errors
    /// Where the host has too little of it.
    fn alloc_pinned(&self, bytes: usize) -> Result<Self::Pinned>;

    /// Queues a kernel.
    ///
    /// # Errors
    /// [`DeviceError::Launch`] where grid, block or shared memory exceed what the kernel and the device
    /// allow. A fault of the kernel itself is reported by a later call, unless `ZINC_SYNC=1` is set.
    ///
    /// # Safety
    /// The caller keeps the kernel's `# Safety` list: geometry, extents, alignment and aliasing of each
    /// pointer. Every pointer is to live memory of this device.
    unsafe fn launch<K: Kernel>(&self, kernel: K, launch: Launch, args: K::Args) -> Result<()>;

    /// Copies host bytes to the device. `from` may be reused on return.
    ///
    /// # Errors
    /// [`DeviceError::Range`] where lengths differ, [`DeviceError::WrongDevice`], or the driver's.
    fn upload_bytes(&self, to: Slice<'_, u8>, from: &[u8]) -> Result<()>;

    /// Copies device bytes to the host, after everything queued before. Waits for it.
    ///
    /// # Errors
    /// As for [`Device::upload_bytes`].
    fn download_bytes(&self, from: Slice<'_, u8>, to: &mut [u8]) -> Result<()>;

    /// Queues a copy of the first `to.len()` bytes of `from`, and returns the event of its end.
    ///
    /// # Errors
    /// As for [`Device::upload_bytes`].
    ///
    /// # Safety
    /// Until the event is done, `from` is not written.
    unsafe fn upload_async(&self, to: Slice<'_, u8>, from: &Self::Pinned) -> Result<Self::Event>;

    /// Queues a copy of device bytes into the first bytes of `to`, and returns the event of its end.
    ///
    /// # Errors
    /// As for [`Device::upload_bytes`].
    ///
    /// # Safety
    /// Until the event is done, `to` is neither read nor written.
    unsafe fn download_async(&self, from: Slice<'_, u8>, to: &mut Self::Pinned) -> Result<Self::Event>;

    /// Queues a copy within the device. The ranges do not overlap.
    ///
    /// # Errors
    /// As for [`Device::upload_bytes`]; [`DeviceError::Range`] where they overlap.
    fn copy_bytes(&self, from: Slice<'_, u8>, to: Slice<'_, u8>) -> Result<()>;

    /// Queues setting every byte of `to`.
    ///
    /// # Errors
    /// [`DeviceError::WrongDevice`], or the driver's.
    fn fill_bytes(&self, to: Slice<'_, u8>, value: u8) -> Result<()>;

    /// Waits for everything queued.
    ///
    /// # Errors
    /// The driver's, also an earlier kernel's fault.
    fn synchronize(&self) -> Result<()>;

    /// Marks the present end of the stream.
    ///
    /// # Errors
    /// The driver's.
    fn record(&self) -> Result<Self::Event>;

    /// Whether everything before the event is done.
    ///
    /// # Errors
    /// The driver's, also a kernel's fault before the event.
    fn is_done(&self, event: &Self::Event) -> Result<bool>;

    /// Waits until everything before the event is done.
    ///
    /// # Errors
    /// As for [`Device::is_done`].
    fn wait(&self, event: &Self::Event) -> Result<()>;

    /// Microseconds of device time between two events, both done.
    ///
    /// # Errors
    /// Where one is not done.
    fn elapsed_us(&self, start: &Self::Event, end: &Self::Event) -> Result<f64>;

    /// Whether [`Device::capture`] works.
    fn supports_graphs(&self) -> bool;

    /// Records what `record` queues, without running it, as one graph.
    ///
    /// Launches, copies and fills within the device may be captured; uploads, downloads, allocation and
    /// waiting may not.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] where there are no graphs, else what `record` or the driver gives.
    fn capture(&self, record: &mut dyn FnMut() -> Result<()>) -> Result<Self::Graph>;

    /// Queues a captured graph.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// Every buffer that the graph was captured with is still alive.
    unsafe fn replay(&self, graph: &Self::Graph) -> Result<()>;

    /// Turns timing of each launch on or off. While it is on, launches are far apart in time, and those
    /// of a replay are not seen: time the launches themselves, or the replay as a whole by events.
    fn set_profiling(&self, on: bool);

    /// How many launches were timed since profiling was turned on or its times were last taken.
    fn n_profiled(&self) -> usize;

    /// The times of the launches since profiling was turned on or last taken.
    ///
    /// # Errors
    /// The driver's.
    fn take_profile(&self) -> Result<Profile>;

    /// Reserves memory for `len` elements, contents unspecified.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], also where the size in bytes overflows.
    fn alloc<T: Pod>(&self, len: usize) -> Result<Buffer<Self, T>> {
        Buffer::new(self, len)
    }

    /// Reserves memory for `len` elements of zero bytes.
    ///
    /// # Errors
    /// As for [`Device::alloc`] and [`Device::fill_bytes`].
    fn alloc_zeroed<T: Pod>(&self, len: usize) -> Result<Buffer<Self, T>> {
        let buffer = self.alloc(len)?;
        self.fill_bytes(buffer.slice().as_bytes(), 0)?;
        Ok(buffer)
    }

    /// A buffer with these contents.
    ///
    /// # Errors
    /// As for [`Device::alloc`] and [`Device::upload_bytes`].
    fn alloc_from<T: Pod>(&self, contents: &[T]) -> Result<Buffer<Self, T>> {
        let buffer = self.alloc(contents.len())?;
        self.upload(buffer.slice(), contents)?;
        Ok(buffer)
    }

    /// [`Device::upload_bytes`] of elements.
    ///
    /// # Errors
    /// As there.
    fn upload<T: Pod>(&self, to: Slice<'_, T>, from: &[T]) -> Result<()> {
        self.upload_bytes(to.as_bytes(), bytemuck::cast_slice(from))
    }

    /// [`Device::download_bytes`] of elements.
    ///
    /// # Errors
    /// As there.
    fn download<T: Pod>(&self, from: Slice<'_, T>, to: &mut [T]) -> Result<()> {
        self.download_bytes(from.as_bytes(), bytemuck::cast_slice_mut(to))
    }

    /// The elements of a slice, on the host.
    ///
    /// # Errors
    /// As for [`Device::download_bytes`].
    fn download_vec<T: Pod>(&self, from: Slice<'_, T>) -> Result<Vec<T>> {
        let mut host = vec![T::zeroed(); from.len()];
        self.download(from, &mut host)?;
        Ok(host)
    }

    /// [`Device::copy_bytes`] of elements.
    ///
    /// # Errors
    /// As there.
    fn copy<T: Pod>(&self, from: Slice<'_, T>, to: Slice<'_, T>) -> Result<()> {
        self.copy_bytes(from.as_bytes(), to.as_bytes())
    }

    /// Checks that a slice is of this device. Launchers that mix buffers of several owners call it.
    ///
    /// # Errors
    /// [`DeviceError::WrongDevice`].
    fn check_owner<T: Pod>(&self, slice: Slice<'_, T>) -> Result<()> {
        let (memory, device) = (slice.device(), self.id());
        if memory == device { Ok(()) } else { Err(DeviceError::WrongDevice { memory, device }) }
    }
}

/// Checks the operands of a copy between host and device.
pub(crate) fn check_transfer<D: Device>(device: &D, slice: Slice<'_, u8>, host_bytes: usize) -> Result<()> {
    device.check_owner(slice)?;
    if slice.len() == host_bytes {
        return Ok(());
    }
    Err(DeviceError::Range(format!("{} device bytes against {host_bytes} host bytes", slice.len())))
}

/// Checks the operands of a copy within a device.
pub(crate) fn check_copy<D: Device>(device: &D, from: Slice<'_, u8>, to: Slice<'_, u8>) -> Result<()> {
    device.check_owner(from)?;
    check_transfer(device, to, from.len())?;
    if from.overlaps(to) {
        return Err(DeviceError::Range("a copy onto itself".to_owned()));
    }
    Ok(())
}
