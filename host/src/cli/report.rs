//! Time and memory, as the commands report them.

use serde::Serialize;

use crate::engine::{Stats, Timings, Usage};

/// Speeds of one completion.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Report {
    /// Seconds to load the model.
    pub(super) load_s: f64,
    /// Prompt tokens a second, those that were computed.
    pub(super) prefill_tok_s: Option<f64>,
    /// Tokens a second after the first one.
    pub(super) decode_tok_s: Option<f64>,
    /// Share of guessed tokens that were right; `None` where none were guessed.
    pub(super) acceptance: Option<f64>,
    /// Most memory the process ever had resident.
    pub(super) peak_memory_bytes: Option<u64>,
}

impl Report {
    pub(super) fn new(load_s: f64, usage: &Usage, timings: &Timings) -> Self {
        let per_second = |n: u32, time: std::time::Duration| {
            let seconds = time.as_secs_f64();
            (n > 0 && seconds > 0.0).then(|| f64::from(n) / seconds)
        };
        Self {
            load_s,
            prefill_tok_s: per_second(usage.prompt_tokens - usage.cached_tokens, timings.prefill),
            decode_tok_s: per_second(usage.completion_tokens.saturating_sub(1), timings.decode),
            acceptance: None,
            peak_memory_bytes: peak_memory_bytes(),
        }
    }

    /// The same with the engine's guesses so far.
    pub(super) fn drafts(self, stats: &Stats) -> Self {
        let (drafted, accepted) = (stats.drafted_tokens as f64, stats.accepted_tokens as f64);
        Self { acceptance: (drafted > 0.0).then(|| accepted / drafted), ..self }
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "load {:.2} s", self.load_s)?;
        if let Some(speed) = self.prefill_tok_s {
            write!(f, ", prefill {speed:.1} tok/s")?;
        }
        if let Some(speed) = self.decode_tok_s {
            write!(f, ", decode {speed:.1} tok/s")?;
        }
        if let Some(share) = self.acceptance {
            write!(f, ", {:.0} % of guesses right", share * 100.0)?;
        }
        match self.peak_memory_bytes {
            Some(bytes) => write!(f, ", peak memory {} MiB", bytes >> 20),
            None => Ok(()),
        }
    }
}

/// The high-water mark of resident memory; Linux only. Source: proc_pid_status(5), `VmHWM`.
pub(super) fn peak_memory_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}
