//! Counters, levels and latencies in Prometheus' text form.
//!
//! Source: the exposition format, version 0.0.4, of the Prometheus documentation.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::engine::{Stats, Timings, Usage};

/// Upper bounds of the buckets in seconds: from a step of a small model to a long reply.
const BOUNDS: [f64; 12] = [0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0];

/// What the server counts.
#[derive(Default)]
pub(super) struct Metrics {
    /// HTTP replies by status class: 2xx, 4xx, 5xx.
    http: [AtomicU64; 3],
    levels: Mutex<Levels>,
}

#[derive(Default)]
struct Levels {
    engine: Stats,
    queued: Histogram,
    first_token: Histogram,
    per_token: Histogram,
    whole: Histogram,
}

#[derive(Default)]
struct Histogram {
    /// Per bucket, not cumulative; the last is for everything above.
    counts: [u64; BOUNDS.len() + 1],
    sum: f64,
}

impl Histogram {
    fn observe(&mut self, seconds: f64) {
        let bucket = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        self.counts[bucket] += 1;
        self.sum += seconds;
    }

    fn write(&self, out: &mut String, name: &str, help: &str) -> std::fmt::Result {
        writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram")?;
        let mut total = 0;
        for (bound, count) in BOUNDS.iter().zip(&self.counts) {
            total += count;
            writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {total}")?;
        }
        total += self.counts[BOUNDS.len()];
        writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {total}\n{name}_sum {}\n{name}_count {total}", self.sum)
    }
}

impl Metrics {
    /// Counts an HTTP reply.
    pub(super) fn count_reply(&self, status: u16) {
        let class = match status {
            400..500 => 1,
            500.. => 2,
            _ => 0,
        };
        self.http[class].fetch_add(1, Ordering::Relaxed);
    }

    /// The engine after a step.
    pub(super) fn set_engine(&self, stats: Stats) {
        self.levels.lock().unwrap_or_else(PoisonError::into_inner).engine = stats;
    }

    /// A request that ended. One that was never started, or gave nothing, has no latency.
    pub(super) fn observe(&self, timings: &Timings, usage: &Usage) {
        if usage.completion_tokens == 0 {
            return;
        }
        let mut levels = self.levels.lock().unwrap_or_else(PoisonError::into_inner);
        levels.queued.observe(timings.queued.as_secs_f64());
        levels.first_token.observe((timings.queued + timings.prefill).as_secs_f64());
        if let Some(steps) = usage.completion_tokens.checked_sub(1).filter(|n| *n > 0) {
            levels.per_token.observe((timings.decode / steps).as_secs_f64());
        }
        levels.whole.observe((timings.queued + timings.prefill + timings.decode).as_secs_f64());
    }

    /// Everything, as `GET /metrics` shows it.
    pub(super) fn render(&self) -> String {
        let mut out = String::new();
        // A String takes whatever is written to it.
        self.write(&mut out).ok();
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        writeln!(out, "# HELP zinc_http_replies_total HTTP replies by class.\n# TYPE zinc_http_replies_total counter")?;
        for (class, count) in ["2xx", "4xx", "5xx"].iter().zip(&self.http) {
            writeln!(out, "zinc_http_replies_total{{class=\"{class}\"}} {}", count.load(Ordering::Relaxed))?;
        }
        let levels = self.levels.lock().unwrap_or_else(PoisonError::into_inner);
        let s = &levels.engine;
        for (name, kind, help, value) in [
            ("zinc_requests_finished_total", "counter", "Requests that ended, by any reason.", s.finished),
            ("zinc_requests_failed_total", "counter", "Requests that ended with an error.", s.failed),
            ("zinc_requests_cancelled_total", "counter", "Requests whose client went away.", s.cancelled),
            ("zinc_steps_total", "counter", "Forward passes.", s.steps),
            ("zinc_prompt_tokens_total", "counter", "Prompt tokens computed.", s.prompt_tokens),
            ("zinc_cached_tokens_total", "counter", "Prompt tokens reused from earlier requests.", s.cached_tokens),
            ("zinc_generated_tokens_total", "counter", "Tokens generated.", s.generated_tokens),
            ("zinc_requests_queued", "gauge", "Requests that wait.", s.queued as u64),
            ("zinc_slots_used", "gauge", "Requests that run.", s.running as u64),
            ("zinc_slots", "gauge", "Requests that can run at once.", u64::from(s.n_slots)),
            ("zinc_kv_pages", "gauge", "KV pages there are.", u64::from(s.pages)),
            ("zinc_kv_pages_used", "gauge", "KV pages of running requests.", u64::from(s.pages_used)),
            ("zinc_kv_pages_cached", "gauge", "KV pages kept for reuse only.", u64::from(s.pages_cached)),
        ] {
            writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}")?;
        }
        levels.queued.write(out, "zinc_queue_seconds", "Time in the queue.")?;
        levels.first_token.write(out, "zinc_first_token_seconds", "Arrival to the first token.")?;
        levels.per_token.write(out, "zinc_token_seconds", "Mean time between the tokens of a reply.")?;
        levels.whole.write(out, "zinc_reply_seconds", "Arrival to the last token.")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn buckets_are_cumulative_and_end_with_the_count() {
        let metrics = Metrics::default();
        let timings = Timings { prefill: Duration::from_millis(20), ..Timings::default() };
        metrics.observe(&timings, &Usage { completion_tokens: 1, ..Usage::default() });
        metrics.observe(
            &Timings { prefill: Duration::from_secs(500), ..timings },
            &Usage { completion_tokens: 1, ..Usage::default() },
        );
        metrics.observe(&timings, &Usage::default());
        let text = metrics.render();
        for line in [
            "zinc_first_token_seconds_bucket{le=\"0.01\"} 0",
            "zinc_first_token_seconds_bucket{le=\"0.05\"} 1",
            "zinc_first_token_seconds_bucket{le=\"120\"} 1",
            "zinc_first_token_seconds_bucket{le=\"+Inf\"} 2",
            "zinc_first_token_seconds_count 2",
            "zinc_token_seconds_count 0",
            "zinc_reply_seconds_count 2",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }
}
