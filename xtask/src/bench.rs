//! `cargo xtask bench`: a model's speed beside llama.cpp's, on the same machine at the same time.
//!
//! The two take turns, each in a process of its own with a warm-up and one measured run, so that what else the
//! machine does meets both alike. Prefill is one prompt from nothing, decode follows a prompt of that length. Ours
//! takes the tokens that it decoded, `llama-bench` random ones. `--serve` is another matter: see `serve`.

mod peer;
mod serve;

use std::fs;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::available_parallelism;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::{dist, setup, workspace};

/// Memory that the CPU backend may take beside the mapped file.
const MAX_EXTRA_BYTES: u64 = 300_000_000;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Measure the CPU; without it, the GPU, with a `llama-bench` that was built for it.
    #[arg(long, required_unless_present_any = ["peer", "serve"])]
    cpu: bool,
    /// Put the server under load instead, with the small model of the checkout unless another is given.
    #[arg(long, conflicts_with = "peer")]
    serve: bool,
    /// Clients at once, with --serve.
    #[arg(long, default_value_t = 32, value_name = "N", requires = "serve")]
    clients: usize,
    /// Requests of all clients together, with --serve.
    #[arg(long, default_value_t = 2000, value_name = "N", requires = "serve")]
    requests: usize,
    /// Requests that the server runs at once, with --serve.
    #[arg(long, default_value_t = 8, value_name = "N", requires = "serve")]
    slots: usize,
    /// The model; without it, SmolLM2, which setup fetches.
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Tokens of the prompt.
    #[arg(short = 'p', long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    n_prompt: u32,
    /// Tokens to generate.
    #[arg(short, long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    n_gen: u32,
    /// Turns of each.
    #[arg(short, long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Threads of each on the CPU.
    #[arg(short, long, default_value_t = available_parallelism().map_or(1, NonZero::get), value_name = "N")]
    threads: usize,
    /// The llama-bench to compare with; without it, one for the CPU is built from the sources on PyPI.
    #[arg(long, value_name = "FILE")]
    peer: Option<PathBuf>,
    /// Our program; without it, it is built in release mode.
    #[arg(long, value_name = "FILE")]
    host: Option<PathBuf>,
}

/// Tokens a second.
#[derive(Clone, Copy)]
struct Rates {
    prefill_tok_s: f64,
    decode_tok_s: f64,
}

/// What `host bench --format json` prints, of it what is used here.
#[derive(Deserialize)]
struct HostReport {
    peak_memory_bytes: Option<u64>,
    /// The prompt's, then the reply's.
    tests: Vec<HostTest>,
}

#[derive(Deserialize)]
struct HostTest {
    median: f64,
}

impl HostReport {
    fn rates(&self) -> Result<Rates> {
        match &*self.tests {
            [prefill, decode] => Ok(Rates { prefill_tok_s: prefill.median, decode_tok_s: decode.median }),
            tests => bail!("host bench reports {} tests instead of two", tests.len()),
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.serve {
        return run_serve(args);
    }
    let model = match &args.model {
        Some(path) => path.clone(),
        None => {
            setup::smollm2()?;
            workspace::cache().join(host::models::SMOLLM2_FILE)
        }
    };
    let peer = args.peer.clone().map_or_else(peer::build, Ok)?;
    let host = host(args)?;
    let place = if args.cpu { format!("CPU, {} threads", args.threads) } else { "GPU".to_owned() };
    println!("{}: {place}, {} prompt tokens, {} generated", model.display(), args.n_prompt, args.n_gen);
    let (mut ours, mut theirs, mut peak_bytes) = (Vec::new(), Vec::new(), None);
    for turn in 1..=args.repeat {
        let load = load_average();
        let report = run_host(&host, &model, args)?;
        peak_bytes = peak_bytes.max(report.peak_memory_bytes);
        let our = report.rates()?;
        let their = peer::run(&peer, &model, args)?;
        println!(
            "turn {turn}: prefill {:.1} beside {:.1} tok/s, decode {:.1} beside {:.1} tok/s; load average before {load}",
            our.prefill_tok_s, their.prefill_tok_s, our.decode_tok_s, their.decode_tok_s
        );
        ours.push(our);
        theirs.push(their);
    }
    println!("\n| tok/s, median (least to most) | zinc | llama.cpp | ratio |\n|---|---:|---:|---:|");
    let (prompt, reply) = (format!("prompt of {}", args.n_prompt), format!("reply of {}", args.n_gen));
    let prefill = (|r| r.prefill_tok_s) as fn(&Rates) -> f64;
    for (what, rate) in [(prompt, prefill), (reply, |r: &Rates| r.decode_tok_s)] {
        let (ours, theirs) = (Spread::of(ours.iter().map(rate)), Spread::of(theirs.iter().map(rate)));
        println!("| {what} | {ours} | {theirs} | {:.2} |", ours.median / theirs.median);
    }
    println!();
    if let Some(peak_bytes) = peak_bytes {
        print_memory(&model, peak_bytes, args.cpu)?;
    }
    Ok(())
}

fn run_serve(args: &Args) -> Result<()> {
    let model = args.model.clone().unwrap_or_else(|| workspace::root().join(workspace::TINY_MODEL));
    let device = if args.cpu { "cpu" } else { "cuda" };
    let load = serve::Load { clients: args.clients, requests: args.requests, slots: args.slots };
    println!(
        "{} on {device}: {} clients, {} requests, {} slots",
        model.display(),
        load.clients,
        load.requests,
        load.slots
    );
    println!("{}", serve::run(&host(args)?, &model, device, load)?);
    Ok(())
}

/// Our program.
fn host(args: &Args) -> Result<PathBuf> {
    match &args.host {
        Some(path) => Ok(path.clone()),
        None => dist::executable(&["build", "--release", "--package", "host"], "host"),
    }
}

fn print_memory(model: &Path, peak_bytes: u64, is_cpu: bool) -> Result<()> {
    let file_bytes = fs::metadata(model).with_context(|| model.display().to_string())?.len();
    let megabytes = |bytes: u64| bytes as f64 / 1e6;
    print!("peak memory {:.0} MB, of a file of {:.0} MB", megabytes(peak_bytes), megabytes(file_bytes));
    if is_cpu {
        let limit = file_bytes.saturating_add(MAX_EXTRA_BYTES);
        print!("; {} the limit of {:.0} MB", if peak_bytes <= limit { "within" } else { "OVER" }, megabytes(limit));
    }
    println!();
    Ok(())
}

/// One run that counts, in a new process, after its own warm-up.
fn run_host(host: &Path, model: &Path, args: &Args) -> Result<HostReport> {
    let mut command = Command::new(host);
    command.arg("bench").arg("-m").arg(model).args(["--repeat", "1", "--format", "json"]);
    let (n_prompt, n_gen) = (args.n_prompt.to_string(), args.n_gen.to_string());
    command.args(["-p", &n_prompt, "-d", &n_prompt, "-n", &n_gen]);
    command.args(["--device", if args.cpu { "cpu" } else { "cuda" }]);
    command.env("RAYON_NUM_THREADS", args.threads.to_string());
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("cannot run {}", host.display()))?;
    if !output.status.success() {
        bail!("host bench failed ({})", output.status);
    }
    serde_json::from_slice(&output.stdout).context("host bench's output")
}

/// The system's load, to judge a run by; a dash where it does not say.
fn load_average() -> String {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split_whitespace().next().unwrap_or("-").to_owned()
}

/// Median and range of measurements.
#[derive(Debug, PartialEq)]
struct Spread {
    median: f64,
    least: f64,
    most: f64,
}

impl Spread {
    /// Of at least one value.
    fn of(values: impl Iterator<Item = f64>) -> Spread {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let (least, most) = (values[0], values[values.len() - 1]);
        Spread { median: (values[(values.len() - 1) / 2] + values[values.len() / 2]) / 2.0, least, most }
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.1} ({:.1} to {:.1})", self.median, self.least, self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_between() {
        assert_eq!(Spread::of([4.0, 1.0, 2.0].into_iter()), Spread { median: 2.0, least: 1.0, most: 4.0 });
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 3.0].into_iter()).median, 2.5);
    }
}
