//! The device: its memory, and launches.

use super::block::Block;
use super::fault::{Fault, What};
use super::memory::{Buffer, Table, View};
use super::order::Order;
use super::schedule::Runner;
use crate::launch::{Kernel, Launch};
use bytemuck::Pod;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use corosensei::stack::DefaultStack;
use std::num::NonZero;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// The largest dynamic shared memory of a block, that of sm_90: 227 KiB.
const MAX_SHARED_BYTES: u32 = 227 << 10;
/// Lanes from which on it pays to start further host threads.
const PARALLEL_LANES: u64 = 16 << 10;

/// An emulated GPU. See the [module](super).
#[derive(Debug)]
pub struct Device {
    order: Order,
    threads: usize,
    table: Arc<RwLock<Table>>,
    stacks: Mutex<Stacks>,
}

/// Stacks of lanes that have exited, for later ones.
#[derive(Default)]
struct Stacks(Vec<DefaultStack>);

impl core::fmt::Debug for Stacks {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} stacks", self.0.len())
    }
}

impl Default for Device {
    fn default() -> Self {
        Self::new()
    }
}

impl Device {
    /// A device that runs lanes forward, and blocks on all of the host's threads.
    #[must_use]
    pub fn new() -> Self {
        Self::with_order(Order::Forward)
    }

    /// A device that runs lanes and blocks in this order.
    #[must_use]
    pub fn with_order(order: Order) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
        Self { order, threads, table: Arc::default(), stacks: Mutex::default() }
    }

    /// The same on this many host threads. With one, `f32` atomics add in one order every time.
    #[must_use]
    pub fn threads(self, threads: NonZero<usize>) -> Self {
        Self { threads: threads.get(), ..self }
    }

    /// `len` elements that nobody has written: a kernel that reads them before it writes them faults.
    #[must_use]
    pub fn alloc<T: Pod>(&self, len: usize) -> Buffer<T> {
        Buffer::new(&self.table, len, false)
    }

    /// `len` elements of zero bytes.
    #[must_use]
    pub fn zeroed<T: Pod>(&self, len: usize) -> Buffer<T> {
        self.upload(&vec![T::zeroed(); len])
    }

    /// A copy of `values`.
    #[must_use]
    pub fn upload<T: Pod>(&self, values: &[T]) -> Buffer<T> {
        let buffer = Buffer::new(&self.table, values.len(), true);
        buffer.write(0, values);
        buffer
    }

    /// Runs a grid to its end.
    ///
    /// Safe, since every access is checked against the live buffers; pointers may be anything.
    ///
    /// # Errors
    /// The fault of the first block, in the device's order, that has one. The blocks that ran meanwhile have
    /// left their writes.
    pub fn launch<K: Kernel>(&self, _: K, launch: Launch, args: K::Args) -> Result<(), Fault> {
        if let Err(reason) = check::<K>(&launch) {
            let what = What::Launch(reason);
            return Err(Fault { kernel: K::NAME, block: [0; 3], thread: [0; 3], at: None, what });
        }
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let lanes = launch.blocks().saturating_mul(launch.threads());
        let threads = if lanes < PARALLEL_LANES { 1 } else { self.threads.min(launch.blocks() as usize) };
        let grid =
            Grid::<K> { device: self, launch, args: Args(args), next: AtomicU64::new(0), first: Mutex::default() };
        if threads == 1 {
            grid.work(&table);
        } else {
            std::thread::scope(|scope| {
                for _ in 0..threads {
                    scope.spawn(|| grid.work(&table));
                }
            });
        }
        match grid.first.into_inner().unwrap_or_else(PoisonError::into_inner) {
            None => Ok(()),
            Some((_, fault)) => Err(fault),
        }
    }
}

/// A launch that is running.
struct Grid<'a, K: Kernel> {
    device: &'a Device,
    launch: Launch,
    args: Args<K::Args>,
    /// Blocks that have begun.
    next: AtomicU64,
    /// The first block in order that faulted, and how.
    first: Mutex<Option<(u64, Fault)>>,
}

/// Arguments hold raw pointers, which are device addresses: numbers, to the host.
#[derive(Clone, Copy)]
struct Args<T>(T);
// SAFETY: every access through the pointers is checked, and atomic.
unsafe impl<T> Sync for Args<T> {}

impl<K: Kernel> Grid<'_, K> {
    /// Runs blocks until none is left, or one has faulted. They begin in order, so that no block ahead of
    /// the faulting one is left out, and the first fault is the same every time.
    fn work(&self, table: &Table) {
        let block = Block::new(K::NAME, self.launch, View::new(table));
        // No more than a block wants: the other threads look for theirs here, too.
        let stacks = {
            let all = &mut self.device.lock_stacks().0;
            let rest = all.len().saturating_sub(block.slots.len());
            all.split_off(rest)
        };
        let mut runner = Runner::<K>::new(block, self.args.0, self.device.order, stacks);
        let blocks = self.launch.blocks();
        let order = BlockOrder::new(self.device.order, blocks);
        loop {
            let position = self.next.fetch_add(1, Relaxed);
            if position >= blocks {
                break;
            }
            if let Err(fault) = runner.run(order.block(position)) {
                self.next.store(blocks, Relaxed);
                let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
                if first.as_ref().is_none_or(|(other, _)| position < *other) {
                    *first = Some((position, fault));
                }
                break;
            }
        }
        self.device.lock_stacks().0.append(&mut runner.stacks);
    }
}

impl Device {
    fn lock_stacks(&self) -> std::sync::MutexGuard<'_, Stacks> {
        self.stacks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Which block comes when. A shuffled grid is walked in steps of a number that is coprime to its size, from
/// a place that the seed chooses: a permutation that needs no memory.
struct BlockOrder {
    order: Order,
    blocks: u64,
    step: u64,
    start: u64,
}

impl BlockOrder {
    fn new(order: Order, blocks: u64) -> Self {
        let seed = if let Order::Shuffled(seed) = order { seed } else { 0 };
        let mixed = (seed ^ 0x5851_f42d_4c95_7f2d).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let coprime = |step: &u64| gcd(*step, blocks) == 1;
        let step = (mixed % blocks + 1..).find(coprime).unwrap_or(1) % blocks.max(2);
        Self { order, blocks, step: step.max(1), start: (mixed >> 32) % blocks }
    }

    fn block(&self, position: u64) -> u64 {
        match self.order {
            Order::Forward => position,
            Order::Backward => self.blocks - 1 - position,
            Order::Shuffled(_) => {
                let walked = u128::from(position) * u128::from(self.step) + u128::from(self.start);
                (walked % u128::from(self.blocks)) as u64
            }
        }
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// What every GPU from sm_80 on refuses. CUDA C++ Programming Guide, "Compute Capabilities".
fn check<K: Kernel>(launch: &Launch) -> Result<(), String> {
    let [x, y, z] = launch.grid;
    if [x, y, z].contains(&0) || x > i32::MAX.cast_unsigned() || y > 65535 || z > 65535 {
        return Err(format!("a grid of {:?} blocks", launch.grid));
    }
    let [x, y, z] = launch.block;
    if [x, y, z].contains(&0) || x > 1024 || y > 1024 || z > 64 || launch.threads() > 1024 {
        return Err(format!("a block of {:?} threads", launch.block));
    }
    if let Some(most) = K::MAX_THREADS.filter(|&most| launch.threads() > u64::from(most)) {
        return Err(format!("a block of {} threads, and the kernel promises at most {most}", launch.threads()));
    }
    if launch.shared_bytes > MAX_SHARED_BYTES {
        return Err(format!("{} bytes of shared memory, {MAX_SHARED_BYTES} at most", launch.shared_bytes));
    }
    Ok(())
}
