//! What a profile of the device does not know: which part of the model launched what, and how much it had to move.

use std::collections::VecDeque;

use super::{GpuBackend, Result, device_error};
use crate::backend::{Launched, Measured, Section};
use crate::gpu::device::Device;
use crate::gpu::ops;
use crate::gpu::profile::Profile;

/// What is read to find out how fast reading is, in sizes of the second-level cache.
const SWEEP_CACHES: u64 = 8;
/// Sweeps, of which the fastest counts.
const SWEEPS: u32 = 10;

/// Marks between the launches of a profile, each at the number of launches before it.
#[derive(Default)]
pub(super) struct Marks {
    on: bool,
    sections: Vec<(usize, Section)>,
    /// Bytes that the launches since the last entry have to move.
    moved: VecDeque<(usize, u64)>,
}

impl Marks {
    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// Sections and traffic for every launch.
    fn apply(&mut self, profile: &Profile) -> Vec<Launched> {
        let mut sections = std::mem::take(&mut self.sections).into_iter().peekable();
        let mut section = Section::Embedding;
        let mut launches = Vec::with_capacity(profile.launches.len());
        for (i, launch) in profile.launches.iter().enumerate() {
            while let Some((_, next)) = sections.next_if(|(at, _)| *at <= i) {
                section = next;
            }
            launches.push(Launched { section, kernel: launch.kernel, us: launch.us, moved_bytes: 0 });
        }
        let mut from = 0;
        for (to, bytes) in std::mem::take(&mut self.moved) {
            let to = to.min(launches.len());
            // An operation of several launches has one that does the work: it took the longest.
            let longest = launches[from..to].iter_mut().max_by(|a, b| a.us.total_cmp(&b.us));
            if let Some(launch) = longest {
                launch.moved_bytes = bytes;
            }
            from = to;
        }
        launches
    }
}

impl<D: Device> GpuBackend<D> {
    pub(super) fn measure(&mut self, on: bool) {
        self.device.set_profiling(on);
        self.marks = Marks { on, ..Marks::default() };
    }

    pub(super) fn mark_section(&mut self, section: Section) {
        if self.marks.on {
            self.marks.sections.push((self.device.n_profiled(), section));
        }
    }

    pub(super) fn mark_moved(&mut self, bytes: u64) {
        if self.marks.on {
            self.marks.moved.push_back((self.device.n_profiled(), bytes));
        }
    }

    pub(super) fn measured(&mut self) -> Result<Measured> {
        let profile = self.device.take_profile().map_err(device_error)?;
        let launches = self.marks.apply(&profile);
        let read_gb_per_s = self.read_gb_per_s()?;
        // The sweeps' own launches are of no step.
        self.device.take_profile().map_err(device_error)?;
        Ok(Measured { launches, read_gb_per_s })
    }

    /// The speed of reading memory, which decoding cannot pass; `None` where there is no room to measure it.
    fn read_gb_per_s(&self) -> Result<Option<f64>> {
        let free = self.device.memory().map_err(device_error)?.free_bytes;
        let caches = SWEEP_CACHES * u64::from(self.device.properties().l2_bytes);
        // Whole blocks of any sweep.
        let bytes = caches.min(free / 4) as usize & !0xffff;
        if bytes == 0 {
            return Ok(None);
        }
        let measure = || -> ops::Result<f64> {
            let device = &*self.device;
            // The launcher wants a word of sums for every 4 KiB, in whole blocks.
            let (x, sums) = (device.alloc_zeroed::<u8>(bytes)?, device.alloc_zeroed::<u32>(bytes / 32)?);
            let mut best_us = f64::INFINITY;
            for _ in 0..SWEEPS {
                let start = device.record()?;
                ops::read_sweep(device, x.slice(), sums.slice())?;
                let end = device.record()?;
                device.wait(&end)?;
                best_us = best_us.min(device.elapsed_us(&start, &end)?);
            }
            Ok(bytes as f64 / best_us / 1e3)
        };
        measure().map(Some).map_err(super::op_error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_get_the_section_they_follow_and_an_operations_traffic_goes_to_its_longest() {
        let mut profile = Profile::default();
        for (kernel, us) in [("embedding", 1.0), ("rms_norm", 1.0), ("repack", 1.0), ("matvec", 5.0), ("argmax", 1.0)] {
            profile.add(kernel, us);
        }
        let sections = vec![(0, Section::Embedding), (1, Section::Moe), (4, Section::Head)];
        let moved = VecDeque::from([(1, 10), (2, 20), (4, 30)]);
        let launches = Marks { on: true, sections, moved }.apply(&profile);
        let found: Vec<_> = launches.iter().map(|l| (l.section, l.moved_bytes)).collect();
        let (moe, head) = (Section::Moe, Section::Head);
        assert_eq!(found, [(Section::Embedding, 10), (moe, 20), (moe, 0), (moe, 30), (head, 0)]);
    }
}
