//! Runs the lanes of a block, each as a coroutine, until all have exited or none can go on.

use super::block::{Block, State};
use super::fault::{Fault, Unwind, What};
use super::lane::with_current;
use super::order::Order;
use super::warp::lanes;
use crate::launch::Kernel;
use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A kernel keeps its arrays in registers, and an unoptimised build spills some kilobytes.
const STACK_BYTES: usize = 128 << 10;
/// Rounds in which lanes only poll before the block counts as stuck.
const SPIN_ROUNDS: u32 = 1000;

/// Runs blocks of one launch on one host thread.
pub(super) struct Runner<'a, K: Kernel> {
    pub(super) block: Block<'a>,
    pub(super) args: K::Args,
    pub(super) order: Order,
    /// Stacks that no lane uses.
    pub(super) stacks: Vec<DefaultStack>,
    lanes: Vec<Option<Coroutine<(), (), ()>>>,
    warp_order: Vec<u32>,
}

impl<'a, K: Kernel> Runner<'a, K> {
    pub(super) fn new(block: Block<'a>, args: K::Args, order: Order, stacks: Vec<DefaultStack>) -> Self {
        let lanes = block.slots.iter().map(|_| None).collect();
        let warp_order = vec![0; block.warps.len()];
        Self { block, args, order, stacks, lanes, warp_order }
    }

    /// Runs block number `number` of the grid.
    pub(super) fn run(&mut self, number: u64) -> Result<(), Fault> {
        self.block.begin(number);
        let result = self.phases(number);
        if result.is_err() {
            // The lanes that wait are unwound, while nothing is current: they hold no more than numbers.
            self.lanes.fill_with(|| None);
        }
        result
    }

    /// From barrier to barrier.
    fn phases(&mut self, number: u64) -> Result<(), Fault> {
        let mut phase = 0;
        let mut spins = 0;
        loop {
            let progress = self.run_ready(number ^ phase << 40)?;
            if self.block.slots.iter().all(|slot| slot.state.get() == State::Exited) {
                return Ok(());
            }
            spins = if progress { 0 } else { spins + 1 };
            let spinning = self.wake_spinning();
            if spinning && spins < SPIN_ROUNDS {
                if spins > 16 {
                    std::thread::yield_now(); // another block may be about to write
                }
                continue;
            }
            if spinning {
                return Err(self.block.fault(0, None, What::Stuck));
            }
            self.release_barrier()?;
            phase += 1;
        }
    }

    /// Runs every lane that can, warp by warp, until none can. Whether any did more than poll.
    fn run_ready(&mut self, salt: u64) -> Result<bool, Fault> {
        let mut warps = core::mem::take(&mut self.warp_order);
        self.order.permute(&mut warps, salt);
        let mut progress = false;
        for &warp in &warps {
            let count = (self.lanes.len() - warp as usize * 32).min(32);
            let mut order = [0; 32];
            self.order.permute(&mut order[..count], salt ^ u64::from(warp) << 20);
            loop {
                let mut ran = false;
                for &lane in &order[..count] {
                    let lane = warp * 32 + lane;
                    if self.block.slots[lane as usize].state.get() == State::Ready {
                        self.resume(lane)?;
                        ran = true;
                        progress |= self.block.slots[lane as usize].state.get() != State::Spinning;
                    }
                }
                if !ran {
                    break;
                }
            }
        }
        self.warp_order = warps;
        Ok(progress)
    }

    /// Runs a lane until it waits or exits.
    fn resume(&mut self, lane: u32) -> Result<(), Fault> {
        let Self { block, args, stacks, lanes, .. } = self;
        let entry = &mut lanes[lane as usize];
        let coroutine = match entry {
            Some(coroutine) => coroutine,
            None => entry.insert(begin::<K>(*args, stacks)),
        };
        block.running.set(lane);
        match with_current(block, || catch_unwind(AssertUnwindSafe(|| coroutine.resume(())))) {
            Ok(CoroutineResult::Yield(())) => Ok(()),
            Ok(CoroutineResult::Return(())) => {
                block.slots[lane as usize].state.set(State::Exited);
                stacks.extend(entry.take().map(Coroutine::into_stack));
                Ok(())
            }
            Err(payload) => {
                let Unwind { at, what } = cause(payload);
                Err(block.fault(lane, at, what))
            }
        }
    }

    /// Lanes that poll get another turn. Whether there were any.
    fn wake_spinning(&self) -> bool {
        let mut any = false;
        for slot in self.block.slots.iter().filter(|slot| slot.state.get() == State::Spinning) {
            slot.state.set(State::Ready);
            any = true;
        }
        any
    }

    /// Nobody can run: opens the barrier if the whole block waits there, else says who is to blame.
    ///
    /// Warps that have exited as a whole do not count, as on the GPU; lanes that have exited out of a warp
    /// do, since the GPU's treatment of them has changed between generations.
    fn release_barrier(&self) -> Result<(), Fault> {
        let block = &self.block;
        for (i, slot) in (0..).zip(&block.slots) {
            if let Some(what) = self.blame(i, slot.state.get()) {
                return Err(block.fault(i, slot.at.get(), what));
            }
        }
        let waiting = || block.slots.iter().filter(|slot| slot.state.get() == State::Barrier);
        let count = u32::try_from(waiting().count()).expect("a block has at most 1024 lanes");
        waiting().for_each(|slot| slot.state.set(State::Ready));
        block.result.set((block.votes.replace(0), count));
        for warp in &block.warps {
            warp.epoch.set(0);
        }
        block.shared.borrow_mut().barrier();
        Ok(())
    }

    /// Why lane `i` cannot go on, if that is somebody's fault.
    fn blame(&self, i: u32, state: State) -> Option<What> {
        let block = &self.block;
        match state {
            State::Warp(kind, mask) => {
                let state_of = |lane| block.state(i / 32, lane);
                if let Some(exited) = lanes(mask).find(|&lane| state_of(lane) == State::Exited) {
                    return Some(What::ExitedLane { collective: kind.name(), exited });
                }
                let missing = lanes(mask).find(|&lane| state_of(lane) != state).unwrap_or_default();
                let doing = state_of(missing).describe();
                Some(What::DivergentWarp { collective: kind.name(), missing, doing })
            }
            State::Barrier => {
                let whole_warp_exited = |warp: u32| (0..32).all(|lane| block.state(warp, lane) == State::Exited);
                let states = (0..).zip(&block.slots).map(|(lane, slot)| (lane, slot.state.get()));
                let missing = states
                    .filter(|(lane, state)| match state {
                        // One that waits in a collective is to blame itself, and is found in its turn.
                        State::Barrier | State::Warp(..) => false,
                        _ => !whole_warp_exited(lane / 32),
                    })
                    .next();
                missing.map(|(missing, state)| What::DivergentBarrier { missing, doing: state.describe() })
            }
            State::Ready | State::Spinning | State::Exited => None,
        }
    }
}

/// A lane that has not run yet.
fn begin<K: Kernel>(args: K::Args, stacks: &mut Vec<DefaultStack>) -> Coroutine<(), (), ()> {
    let stack = stacks.pop().unwrap_or_else(|| DefaultStack::new(STACK_BYTES).expect("memory for a lane's stack"));
    Coroutine::with_stack(stack, move |yielder, ()| {
        super::lane::current().slot().yielder.set(yielder);
        // SAFETY: this is an emulated launch.
        unsafe { K::run(args) }
    })
}

/// The fault in the payload of an unwind; any other payload is a panic of the kernel.
fn cause(payload: Box<dyn Any + Send>) -> Unwind {
    match payload.downcast::<Unwind>() {
        Ok(unwind) => *unwind,
        Err(payload) => {
            let text = payload.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("of unknown cause");
            Unwind { at: None, what: What::Panic(text.to_owned()) }
        }
    }
}
