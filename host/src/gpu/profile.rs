//! Where the device's time goes, by kernel.

use std::collections::BTreeMap;
use std::fmt;

/// The launches of one kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KernelTime {
    /// How many.
    pub n_launches: u64,
    /// Their time together, in microseconds.
    pub total_us: f64,
}

/// Times of launches, keyed by kernel name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Profile {
    kernels: BTreeMap<&'static str, KernelTime>,
}

impl Profile {
    /// Adds one launch.
    pub fn add(&mut self, kernel: &'static str, us: f64) {
        let time = self.kernels.entry(kernel).or_default();
        time.n_launches += 1;
        time.total_us += us;
    }

    /// The kernels, most time first.
    pub fn by_time(&self) -> Vec<(&'static str, KernelTime)> {
        let mut kernels: Vec<_> = self.kernels.iter().map(|(name, time)| (*name, *time)).collect();
        kernels.sort_by(|a, b| b.1.total_us.total_cmp(&a.1.total_us));
        kernels
    }

    /// The time of all launches, in microseconds.
    pub fn total_us(&self) -> f64 {
        self.kernels.values().map(|time| time.total_us).sum()
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = self.total_us().max(f64::MIN_POSITIVE);
        for (name, time) in self.by_time() {
            let (n, us) = (time.n_launches, time.total_us);
            writeln!(
                f,
                "{name:<28} {n:>7} launches {us:>12.1} us {:>9.2} each {:>5.1} %",
                us / n as f64,
                us / total * 100.0
            )?;
        }
        Ok(())
    }
}
