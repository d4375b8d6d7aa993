//! Times of single launches, for `host bench` and profiles.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::error::Result;
use super::event::CudaEvent;
use crate::gpu::profile::Profile;

/// Launches kept before their times are read; two events each.
const MAX_PENDING: usize = 4096;

/// Event pairs around launches, while profiling is on.
#[derive(Default)]
pub(super) struct Timers {
    on: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    pending: Vec<(&'static str, CudaEvent, CudaEvent)>,
    profile: Profile,
}

impl Timers {
    pub(super) fn set(&self, on: bool) {
        self.on.store(on, Ordering::Relaxed);
    }

    pub(super) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Keeps the events around a launch of `kernel`.
    pub(super) fn add(&self, kernel: &'static str, start: CudaEvent, end: CudaEvent) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        state.pending.push((kernel, start, end));
        if state.pending.len() >= MAX_PENDING { state.settle() } else { Ok(()) }
    }

    /// Launches so far.
    pub(super) fn n_launches(&self) -> usize {
        let state = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        state.profile.launches.len() + state.pending.len()
    }

    /// The times so far; starts anew.
    pub(super) fn take(&self) -> Result<Profile> {
        let mut state = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        state.settle()?;
        Ok(std::mem::take(&mut state.profile))
    }
}

impl State {
    fn settle(&mut self) -> Result<()> {
        for (kernel, start, end) in self.pending.drain(..) {
            end.wait()?;
            self.profile.add(kernel, start.elapsed_us(&end)?);
        }
        Ok(())
    }
}
