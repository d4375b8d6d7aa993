//! The emulated device: the GPU backend without a GPU.
//!
//! It runs the kernels' source on the host through [`cuda_std::emu`], which checks every access. Work
//! is done when it is queued, so a fault is reported by the launch that made it, and events are always
//! done. Graphs are kept as the list of what was captured and run again on replay, with the arguments
//! of the capture: a stale one shows here as it would on a GPU.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use cuda_std::emu::{self, Order};
use cuda_std::launch::{Kernel, Launch};

use super::device::{
    Device, DeviceError, DeviceId, Memory, MemoryInfo, Pinned, Properties, Result, check_copy, check_transfer,
};
use super::memory::Slice;
use super::profile::Profile;

/// The memory of a device that was given no limit: enough for every test model, and no more than a
/// plan that went wrong should be let to ask of the host.
const DEFAULT_MEMORY_BYTES: u64 = 8 << 30;

/// An emulated GPU. It may be used from several threads; each test makes its own.
pub struct Emulated {
    device: emu::Device,
    id: DeviceId,
    properties: Properties,
    heap: Arc<Mutex<Heap>>,
    state: Mutex<State>,
}

/// The live allocations by address.
struct Heap {
    buffers: BTreeMap<u64, Arc<emu::Buffer<u8>>>,
    used_bytes: u64,
    total_bytes: u64,
}

#[derive(Default)]
struct State {
    /// What is being captured, if anything is.
    capture: Option<Vec<Step>>,
    /// Times of launches, while profiling is on.
    profile: Option<Profile>,
}

/// One captured operation.
type Step = Box<dyn Fn(&Emulated) -> Result<()> + Send>;

/// An allocation of an emulated device.
pub struct EmulatedMemory {
    address: u64,
    len_bytes: usize,
    heap: Arc<Mutex<Heap>>,
}

/// Host memory; there is nothing to lock in place.
pub struct EmulatedPinned(Vec<u8>);

/// A moment; everything queued before it is done.
pub struct EmulatedEvent(Instant);

/// Captured operations.
pub struct EmulatedGraph(Vec<Step>);

/// A launch kept for replay.
struct Recorded<K: Kernel> {
    kernel: K,
    launch: Launch,
    args: K::Args,
}

// SAFETY: a kernel is a zero-sized name, and arguments are plain values. Pointers among them are device
// addresses, which nothing but an emulated launch uses, and that checks them.
#[expect(unsafe_code, reason = "raw pointers are not Send")]
unsafe impl<K: Kernel> Send for Recorded<K> {}

impl Default for Emulated {
    fn default() -> Self {
        Self::new()
    }
}

impl Emulated {
    /// A device that looks like a small sm_90.
    pub fn new() -> Self {
        Self::with_order(Order::Forward)
    }

    /// A device that runs lanes and blocks in this order.
    pub fn with_order(order: Order) -> Self {
        let properties = Properties {
            name: "emulated".to_owned(),
            capability: (9, 0),
            n_sm: 4,
            shared_bytes_per_block: 227 << 10,
            max_threads_per_block: 1024,
            l2_bytes: 1 << 20,
            wgmma: true,
        };
        let heap = Heap { buffers: BTreeMap::new(), used_bytes: 0, total_bytes: DEFAULT_MEMORY_BYTES };
        Emulated {
            device: emu::Device::with_order(order),
            id: DeviceId::next(),
            properties,
            heap: Arc::new(Mutex::new(heap)),
            state: Mutex::default(),
        }
    }

    /// The same with this much memory.
    #[must_use]
    pub fn memory_limit(self, total_bytes: u64) -> Self {
        lock(&self.heap).total_bytes = total_bytes;
        self
    }

    /// The same with this many multiprocessors, which launchers size grids by.
    #[must_use]
    pub fn multiprocessors(mut self, n_sm: u32) -> Self {
        self.properties.n_sm = n_sm;
        self
    }

    /// The same without the products of warpgroups: like a GPU that is no Hopper.
    #[must_use]
    pub fn without_wgmma(mut self) -> Self {
        self.properties.wgmma = false;
        self
    }

    /// The allocation that a slice is in, and where in it. Slices borrow their buffers, so only a graph
    /// that outlived them can fail here.
    fn locate(&self, slice: Slice<'_, u8>) -> Result<(Arc<emu::Buffer<u8>>, usize)> {
        self.locate_range(slice.address(), slice.len())
    }

    fn locate_range(&self, address: u64, len: usize) -> Result<(Arc<emu::Buffer<u8>>, usize)> {
        let heap = lock(&self.heap);
        let found = heap.buffers.range(..=address).next_back().and_then(|(start, buffer)| {
            let offset = (address - start) as usize;
            let fits = offset.checked_add(len).is_some_and(|end| end <= buffer.len());
            fits.then(|| (Arc::clone(buffer), offset))
        });
        found.ok_or_else(|| DeviceError::Range(format!("{len} bytes at {address:#x} are no live memory")))
    }

    /// Runs a step, or keeps it where a graph is being captured.
    fn submit(&self, step: impl Fn(&Emulated) -> Result<()> + Send + 'static) -> Result<()> {
        if let Some(steps) = &mut lock(&self.state).capture {
            steps.push(Box::new(step));
            return Ok(());
        }
        step(self)
    }

    fn run<K: Kernel>(&self, kernel: K, launch: Launch, args: K::Args) -> Result<()> {
        let start = Instant::now();
        self.device.launch(kernel, launch, args).map_err(Box::new)?;
        if let Some(profile) = &mut lock(&self.state).profile {
            profile.add(K::NAME, start.elapsed().as_secs_f64() * 1e6);
        }
        Ok(())
    }

    /// Refuses what a capture on a GPU cannot hold.
    fn outside_capture(&self, what: &'static str) -> Result<()> {
        match lock(&self.state).capture {
            None => Ok(()),
            Some(_) => Err(DeviceError::Unsupported { device: self.properties.name.clone(), what }),
        }
    }
}

/// Nothing here is left half done by a panic: a poisoned lock is as good as any.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[expect(unsafe_code, reason = "the trait's contract; nothing here relies on it")]
impl Device for Emulated {
    type Memory = EmulatedMemory;
    type Pinned = EmulatedPinned;
    type Event = EmulatedEvent;
    type Graph = EmulatedGraph;

    fn id(&self) -> DeviceId {
        self.id
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn memory(&self) -> Result<MemoryInfo> {
        let heap = lock(&self.heap);
        Ok(MemoryInfo { free_bytes: heap.total_bytes - heap.used_bytes, total_bytes: heap.total_bytes })
    }

    fn alloc_bytes(&self, bytes: usize) -> Result<EmulatedMemory> {
        self.outside_capture("allocate while a graph is captured")?;
        let wanted_bytes = bytes as u64;
        {
            // Reserved before it is allocated, so that two threads cannot both take the last of it.
            let mut heap = lock(&self.heap);
            let free_bytes = heap.total_bytes.saturating_sub(heap.used_bytes);
            if wanted_bytes > free_bytes {
                return Err(DeviceError::OutOfMemory { wanted_bytes, free_bytes });
            }
            heap.used_bytes += wanted_bytes;
        }
        let buffer = Arc::new(self.device.alloc::<u8>(bytes));
        let address = buffer.as_ptr().expose_provenance() as u64;
        lock(&self.heap).buffers.insert(address, buffer);
        Ok(EmulatedMemory { address, len_bytes: bytes, heap: Arc::clone(&self.heap) })
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<EmulatedPinned> {
        self.outside_capture("allocate while a graph is captured")?;
        Ok(EmulatedPinned(vec![0; bytes]))
    }

    unsafe fn launch<K: Kernel>(&self, kernel: K, launch: Launch, args: K::Args) -> Result<()> {
        let recorded = Recorded { kernel, launch, args };
        self.submit(move |device| recorded.run_on(device))
    }

    fn upload_bytes(&self, to: Slice<'_, u8>, from: &[u8]) -> Result<()> {
        check_transfer(self, to, from.len())?;
        self.outside_capture("upload while a graph is captured")?;
        let (buffer, offset) = self.locate(to)?;
        buffer.write(offset, from);
        Ok(())
    }

    fn download_bytes(&self, from: Slice<'_, u8>, to: &mut [u8]) -> Result<()> {
        check_transfer(self, from, to.len())?;
        self.outside_capture("download while a graph is captured")?;
        let (buffer, offset) = self.locate(from)?;
        buffer.read(offset, to);
        Ok(())
    }

    unsafe fn upload_async(&self, to: Slice<'_, u8>, from: &EmulatedPinned) -> Result<EmulatedEvent> {
        let len = to.len().min(from.0.len());
        self.upload_bytes(to, &from.0[..len])?;
        self.record()
    }

    unsafe fn download_async(&self, from: Slice<'_, u8>, to: &mut EmulatedPinned) -> Result<EmulatedEvent> {
        let len = from.len().min(to.0.len());
        self.download_bytes(from, &mut to.0[..len])?;
        self.record()
    }

    fn copy_bytes(&self, from: Slice<'_, u8>, to: Slice<'_, u8>) -> Result<()> {
        check_copy(self, from, to)?;
        let (from, to, len) = (from.address(), to.address(), from.len());
        self.submit(move |device| {
            let (source, source_offset) = device.locate_range(from, len)?;
            let (target, target_offset) = device.locate_range(to, len)?;
            let mut bytes = vec![0; len];
            source.read(source_offset, &mut bytes);
            target.write(target_offset, &bytes);
            Ok(())
        })
    }

    fn fill_bytes(&self, to: Slice<'_, u8>, value: u8) -> Result<()> {
        self.check_owner(to)?;
        let (to, len) = (to.address(), to.len());
        self.submit(move |device| {
            let (buffer, offset) = device.locate_range(to, len)?;
            buffer.write(offset, &vec![value; len]);
            Ok(())
        })
    }

    fn synchronize(&self) -> Result<()> {
        self.outside_capture("wait while a graph is captured")
    }

    fn record(&self) -> Result<EmulatedEvent> {
        self.outside_capture("record an event while a graph is captured")?;
        Ok(EmulatedEvent(Instant::now()))
    }

    fn is_done(&self, _: &EmulatedEvent) -> Result<bool> {
        Ok(true)
    }

    fn wait(&self, _: &EmulatedEvent) -> Result<()> {
        Ok(())
    }

    fn elapsed_us(&self, start: &EmulatedEvent, end: &EmulatedEvent) -> Result<f64> {
        Ok(end.0.saturating_duration_since(start.0).as_secs_f64() * 1e6)
    }

    fn supports_graphs(&self) -> bool {
        true
    }

    fn capture(&self, record: &mut dyn FnMut() -> Result<()>) -> Result<EmulatedGraph> {
        self.outside_capture("capture a graph while one is captured")?;
        /// Ends the capture also where `record` panics.
        struct Capture<'a>(&'a Emulated);
        impl Drop for Capture<'_> {
            fn drop(&mut self) {
                lock(&self.0.state).capture = None;
            }
        }
        lock(&self.state).capture = Some(Vec::new());
        let capture = Capture(self);
        record()?;
        Ok(EmulatedGraph(lock(&capture.0.state).capture.take().unwrap_or_default()))
    }

    unsafe fn replay(&self, graph: &EmulatedGraph) -> Result<()> {
        self.outside_capture("replay a graph while one is captured")?;
        graph.0.iter().try_for_each(|step| step(self))
    }

    fn set_profiling(&self, on: bool) {
        lock(&self.state).profile = on.then(Profile::default);
    }

    fn n_profiled(&self) -> usize {
        lock(&self.state).profile.as_ref().map_or(0, |profile| profile.launches.len())
    }

    fn take_profile(&self) -> Result<Profile> {
        Ok(lock(&self.state).profile.as_mut().map(std::mem::take).unwrap_or_default())
    }
}

impl<K: Kernel> Recorded<K> {
    fn run_on(&self, device: &Emulated) -> Result<()> {
        device.run(self.kernel, self.launch, self.args)
    }
}

impl Memory for EmulatedMemory {
    fn address(&self) -> u64 {
        self.address
    }

    fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

impl Drop for EmulatedMemory {
    fn drop(&mut self) {
        // Freeing waits for a launch that is under way; the heap is not locked meanwhile.
        let buffer = lock(&self.heap).buffers.remove(&self.address);
        drop(buffer);
        lock(&self.heap).used_bytes -= self.len_bytes as u64;
    }
}

impl Pinned for EmulatedPinned {
    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}
