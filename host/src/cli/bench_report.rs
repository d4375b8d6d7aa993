//! What `host bench` found, as a table or as JSON.

use std::fmt;

use serde::Serialize;

use super::bench_profile::Profile;
use super::report::peak_memory_bytes;

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
    pub(super) median: f64,
    min: f64,
    max: f64,
    all: Vec<f64>,
}

impl Report {
    pub(super) fn new(model: String, device: String, load_s: f64) -> Self {
        Report { model, device, load_s, peak_memory_bytes: None, tests: Vec::new(), profiles: Vec::new() }
    }

    /// Notes what the process took at most, when everything has run.
    pub(super) fn finish(&mut self) {
        self.peak_memory_bytes = peak_memory_bytes();
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
