//! What `host bench` found, as a table or as JSON.

use std::fmt;

use serde::Serialize;

use super::report::peak_memory_bytes;
use crate::backend::Measured;

/// All that was measured.
#[derive(Serialize)]
pub(super) struct Report {
    model: String,
    device: String,
    load_s: f64,
    peak_memory_bytes: Option<u64>,
    pub(super) tests: Vec<Test>,
    pub(super) profiles: Vec<Profile>,
}

/// Tokens a second, over the repeats.
#[derive(Serialize)]
pub(super) struct Test {
    name: String,
    median: f64,
    min: f64,
    max: f64,
    all: Vec<f64>,
}

/// Where the time of one step went. Kernels are timed one by one, without overlap.
#[derive(Serialize)]
pub(super) struct Profile {
    name: String,
    step_us: f64,
    moved_bytes: u64,
    gb_per_s: f64,
    kernels: Vec<Kernel>,
}

#[derive(Serialize)]
struct Kernel {
    name: &'static str,
    launches: f64,
    us: f64,
}

impl Report {
    pub(super) fn new(model: String, device: String, load_s: f64) -> Self {
        let peak_memory_bytes = peak_memory_bytes();
        Report { model, device, load_s, peak_memory_bytes, tests: Vec::new(), profiles: Vec::new() }
    }
}

impl Test {
    /// `speeds` has at least one.
    pub(super) fn new(name: String, speeds: Vec<f64>) -> Self {
        let mut sorted = speeds.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let median = match sorted.len() {
            0 => f64::NAN,
            n if n % 2 == 1 => sorted[middle],
            _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
        };
        let end = |x: Option<&f64>| x.copied().unwrap_or(f64::NAN);
        Test { name, median, min: end(sorted.first()), max: end(sorted.last()), all: speeds }
    }
}

impl Profile {
    pub(super) fn new(name: String, measured: &Measured, n_steps: u32) -> Self {
        let steps = f64::from(n_steps);
        let kernel = |(name, time): (_, crate::gpu::profile::KernelTime)| Kernel {
            name,
            launches: time.n_launches as f64 / steps,
            us: time.total_us / steps,
        };
        let step_us = measured.kernels.total_us() / steps;
        let moved_bytes = measured.moved_bytes / u64::from(n_steps.max(1));
        let gb_per_s = moved_bytes as f64 / step_us.max(f64::MIN_POSITIVE) / 1e3;
        let kernels = measured.kernels.by_time().into_iter().map(kernel).collect();
        Profile { name, step_us, moved_bytes, gb_per_s, kernels }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} on {}, loaded in {:.2} s\n", self.model, self.device, self.load_s)?;
        writeln!(f, "| test | tok/s, median | min | max |\n|---|---:|---:|---:|")?;
        for Test { name, median, min, max, .. } in &self.tests {
            writeln!(f, "| {name} | {median:.1} | {min:.1} | {max:.1} |")?;
        }
        self.profiles.iter().try_for_each(|profile| write!(f, "\n{profile}"))
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Profile { name, step_us, moved_bytes, gb_per_s, kernels } = self;
        let mib = *moved_bytes as f64 / f64::from(1 << 20);
        writeln!(f, "{name}: {step_us:.1} us of kernels a step, {mib:.1} MiB, {gb_per_s:.0} GB/s\n")?;
        writeln!(f, "| kernel | launches | us | us each | share |\n|---|---:|---:|---:|---:|")?;
        for Kernel { name, launches, us } in kernels {
            let (each, share) = (us / launches, us / step_us * 100.0);
            writeln!(f, "| {name} | {launches:.1} | {us:.1} | {each:.2} | {share:.1} % |")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_and_even_numbers_of_repeats() {
        let median = |speeds: &[f64]| Test::new(String::new(), speeds.to_vec()).median;
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }
}
