//! Where the device's time goes, launch by launch.

use std::collections::BTreeMap;

/// One timed launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LaunchTime {
    /// The kernel's name.
    pub kernel: &'static str,
    /// Its time in microseconds.
    pub us: f64,
}

/// The launches of one kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KernelTime {
    /// How many.
    pub n_launches: u64,
    /// Their time together, in microseconds.
    pub total_us: f64,
}

/// Times of launches, in their order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Profile {
    /// The launches.
    pub launches: Vec<LaunchTime>,
}

impl Profile {
    /// Adds one launch.
    pub fn add(&mut self, kernel: &'static str, us: f64) {
        self.launches.push(LaunchTime { kernel, us });
    }

    /// The kernels, most time first.
    pub fn by_time(&self) -> Vec<(&'static str, KernelTime)> {
        let mut kernels: BTreeMap<&'static str, KernelTime> = BTreeMap::new();
        for launch in &self.launches {
            let time = kernels.entry(launch.kernel).or_default();
            time.n_launches += 1;
            time.total_us += launch.us;
        }
        let mut kernels: Vec<_> = kernels.into_iter().collect();
        kernels.sort_by(|a, b| b.1.total_us.total_cmp(&a.1.total_us));
        kernels
    }
}
