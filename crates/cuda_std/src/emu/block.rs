//! The block that runs on this host thread: its lanes' states, its warps, its memories.

use super::fault::{Fault, What};
use super::memory::View;
use super::shared::{Actor, SharedMemory};
use super::warp::{Collective, Warp};
use crate::launch::Launch;
use core::cell::{Cell, RefCell};
use core::panic::Location;
use corosensei::Yielder;
use std::collections::VecDeque;

/// What a lane is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Can run.
    Ready,
    /// Polls memory: can run once the others had their turn.
    Spinning,
    /// Waits for the block.
    Barrier,
    /// Waits for the lanes of the mask to do the same.
    Warp(Collective, u32),
    /// Has returned.
    Exited,
}

impl State {
    /// For a fault's text.
    pub(super) fn describe(self) -> String {
        match self {
            Self::Ready => "runs".to_owned(),
            Self::Spinning => "polls memory".to_owned(),
            Self::Barrier => "waits at the block's barrier".to_owned(),
            Self::Warp(kind, mask) => format!("waits in {} with mask {mask:#010x}", kind.name()),
            Self::Exited => "has exited".to_owned(),
        }
    }
}

/// A lane of the running block.
pub(super) struct Slot {
    pub(super) state: Cell<State>,
    /// Where it waits.
    pub(super) at: Cell<Option<&'static Location<'static>>>,
    /// How it gives up control; valid while its coroutine lives.
    pub(super) yielder: Cell<*const Yielder<(), ()>>,
    pub(super) copies: RefCell<Copies>,
}

/// A lane's asynchronous copies: those of the open group, and the closed groups, oldest first.
#[derive(Default)]
pub(super) struct Copies {
    pub(super) open: Vec<CopyAsync>,
    pub(super) groups: VecDeque<Vec<CopyAsync>>,
}

pub(super) struct CopyAsync {
    pub(super) to: u32,
    pub(super) from: usize,
    /// Bytes that are written, and those of them that are read; the others are 0.
    pub(super) size: usize,
    pub(super) bytes: u32,
    pub(super) at: &'static Location<'static>,
}

/// The state that the accessors of a running lane work on. Blocks reuse it one after another.
pub(crate) struct Block<'a> {
    pub(super) kernel: &'static str,
    pub(super) launch: Launch,
    pub(super) index: Cell<[u32; 3]>,
    /// The lane that runs, counted in the block.
    pub(super) running: Cell<u32>,
    pub(super) slots: Box<[Slot]>,
    pub(super) warps: Box<[Warp]>,
    pub(super) memory: View<'a>,
    pub(super) shared: RefCell<SharedMemory>,
    /// Lanes whose predicate held at the barrier that is filling, and that result once it is full.
    pub(super) votes: Cell<u32>,
    pub(super) result: Cell<(u32, u32)>,
}

impl<'a> Block<'a> {
    pub(super) fn new(kernel: &'static str, launch: Launch, memory: View<'a>) -> Self {
        let threads = u32::try_from(launch.threads()).expect("the launch was checked");
        let slot = || Slot {
            state: Cell::new(State::Ready),
            at: Cell::new(None),
            yielder: Cell::new(core::ptr::null()),
            copies: RefCell::default(),
        };
        Self {
            kernel,
            launch,
            index: Cell::new([0; 3]),
            running: Cell::new(0),
            slots: (0..threads).map(|_| slot()).collect(),
            warps: (0..threads.div_ceil(32)).map(|_| Warp::new()).collect(),
            memory,
            shared: RefCell::new(SharedMemory::new(launch.shared_bytes)),
            votes: Cell::new(0),
            result: Cell::new((0, 0)),
        }
    }

    /// Makes ready for block number `block` of the grid, counted along x, then y, then z.
    pub(super) fn begin(&self, block: u64) {
        let [x, y, _] = self.launch.grid.map(u64::from);
        self.index.set([block % x, block / x % y, block / x / y].map(|i| i as u32));
        for slot in &self.slots {
            slot.state.set(State::Ready);
            slot.at.set(None);
            *slot.copies.borrow_mut() = Copies::default();
        }
        for warp in &self.warps {
            warp.epoch.set(0);
        }
        self.votes.set(0);
        self.shared.borrow_mut().begin_block();
    }

    /// `thread_idx` of a lane.
    pub(super) fn thread(&self, lane: u32) -> [u32; 3] {
        let [x, y, _] = self.launch.block;
        [lane % x, lane / x % y, lane / x / y]
    }

    /// The state of a lane of a warp; one that the block does not have has exited.
    pub(super) fn state(&self, warp: u32, lane: u32) -> State {
        self.slots.get((warp * 32 + lane) as usize).map_or(State::Exited, |slot| slot.state.get())
    }

    pub(super) fn slot(&self) -> &Slot {
        &self.slots[self.running.get() as usize]
    }

    pub(super) fn warp(&self) -> &Warp {
        &self.warps[(self.running.get() / 32) as usize]
    }

    pub(super) fn actor(&self) -> Actor {
        Actor { lane: self.running.get(), warp_epoch: self.warp().epoch.get() }
    }

    pub(super) fn fault(&self, lane: u32, at: Option<&'static Location<'static>>, what: What) -> Fault {
        Fault { kernel: self.kernel, block: self.index.get(), thread: self.thread(lane), at, what }
    }
}
