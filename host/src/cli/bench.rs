//! `host bench`: the speed of prompts and of decoding, and where its time goes.
//!
//! It drives the model itself, without queue, sampler or text: greedy decoding, each sequence with its own tokens, so
//! that experts are chosen as in real use. Keys and values before a depth are zeros; attention reads them all the
//! same, and no time is spent on making them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::{Args as ClapArgs, ValueEnum};

use super::args::GpuArgs;
use super::bench_plot;
use super::bench_profile::Profile;
use super::bench_report::{Report, Test};
use super::error::CliError;
use super::interrupt::Interrupt;
use super::model_path::default_model;
use super::output;
use crate::backend::{Batch, Choose, PAGE_TOKENS, Span};
use crate::engine::{self, DeviceChoice, sampler};
use crate::gguf::Gguf;
use crate::model::executor::{Executor, Limits};

/// Steps that are profiled: enough to even out, few enough not to take long.
const PROFILED_STEPS: u32 = 8;
/// Steps before the first that counts: a graph is captured at the second of its shape.
const WARM_UP_STEPS: u32 = 3;

#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    /// The GGUF file; without it, the small model of the checkout.
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// auto, cpu, cuda, cuda:N, or emulated (slow: for tests).
    #[arg(long, default_value = "auto", value_name = "DEVICE", env = "ZINC_DEVICE")]
    device: DeviceChoice,
    #[command(flatten)]
    gpu: GpuArgs,
    /// Prompt lengths; 0 for none.
    #[arg(short = 'p', long, value_name = "N,…", value_delimiter = ',', default_values_t = [512])]
    n_prompt: Vec<u32>,
    /// Tokens to decode, for each depth and number of sequences; 0 for none.
    #[arg(short, long, default_value_t = 128, value_name = "N")]
    n_gen: u32,
    /// Tokens before the first that is decoded.
    #[arg(short, long, value_name = "N,…", value_delimiter = ',', default_values_t = [0])]
    depth: Vec<u32>,
    /// Sequences that are decoded at once.
    #[arg(short = 'b', long, value_name = "N,…", value_delimiter = ',', default_values_t = [1])]
    sequences: Vec<u32>,
    /// Tokens in one step of a prompt.
    #[arg(long, default_value_t = 2048, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    batch: u32,
    /// Times that each is measured.
    #[arg(short, long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,
    /// Also time every kernel of a prompt and of a decode step: by stage and by kernel, with bytes moved and share of
    /// the bandwidth.
    #[arg(long)]
    profile: bool,
    /// Draw the profiles: a roofline of the stages, and the timeline of one step. Implies --profile.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// A table, or one JSON object.
    #[arg(long, value_enum, default_value_t = Format::Md)]
    format: Format,
}

impl Args {
    fn profiles(&self) -> bool {
        self.profile || self.plot.is_some()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Md,
    Json,
}

pub(super) fn bench(args: Args) -> Result<(), CliError> {
    let interrupt = Interrupt::listen();
    let path = default_model(args.model.as_deref())?;
    let gguf = Arc::new(Gguf::open(&path)?);
    let start = Instant::now();
    let executor = engine::load_with(gguf, &args.device, &args.gpu.kernels(), limits(&args)?, args.gpu.options())?;
    let load_s = start.elapsed().as_secs_f64();
    let mut bench = Bench { executor, interrupt, logits: Vec::new(), ids: Vec::new() };
    let mut report = Report::new(path.display().to_string(), args.device.to_string(), load_s);
    for &n in args.n_prompt.iter().filter(|n| **n > 0) {
        // The first also warms up.
        bench.prompt(n, args.batch)?;
        let speeds = (0..args.repeat).map(|_| bench.prompt(n, args.batch)).collect::<Result<_, _>>()?;
        let test = Test::new(format!("pp{n}"), speeds);
        if args.profiles() {
            let us = f64::from(n) / test.median * 1e6;
            let run = |bench: &mut Bench| bench.prompt(n, args.batch);
            report.profiles.extend(bench.profile(format!("prompt of {n}"), 1, us, run)?);
        }
        report.tests.push(test);
    }
    for (&depth, &sequences) in args.depth.iter().flat_map(|d| args.sequences.iter().map(move |b| (d, b))) {
        if args.n_gen == 0 || sequences == 0 {
            continue;
        }
        bench.decode(WARM_UP_STEPS, depth, sequences)?;
        let speed = |_| bench.decode(args.n_gen, depth, sequences);
        let speeds = (0..args.repeat).map(speed).collect::<Result<_, _>>()?;
        let test = Test::new(format!("tg{} @ d{depth}, {sequences} seq", args.n_gen), speeds);
        if args.profiles() {
            let step_us = f64::from(sequences) / test.median * 1e6;
            let run = |bench: &mut Bench| bench.decode(PROFILED_STEPS, depth, sequences);
            let name = format!("decode @ d{depth}, {sequences} seq");
            report.profiles.extend(bench.profile(name, PROFILED_STEPS, step_us, run)?);
        }
        report.tests.push(test);
    }
    report.finish();
    if let Some(path) = &args.plot {
        if report.profiles.is_empty() {
            return Err(CliError::Usage("--plot: this device has no kernels, or -n 0 decodes nothing".to_owned()));
        }
        bench_plot::draw(path, &report.profiles)?;
    }
    match args.format {
        Format::Md => output::write(&report.to_string()),
        Format::Json => output::write_json(&report),
    }
}

/// Room for the longest of each.
fn limits(args: &Args) -> Result<Limits, CliError> {
    let too_long = || CliError::Usage("the sequences are too long".to_owned());
    let largest = |list: &[u32]| list.iter().copied().max().unwrap_or(0);
    let sequences = largest(&args.sequences).max(1);
    let n_gen = args.n_gen.max(PROFILED_STEPS).max(WARM_UP_STEPS);
    let decoded = largest(&args.depth).checked_add(n_gen).ok_or_else(too_long)?;
    let pages = decoded.div_ceil(PAGE_TOKENS).checked_mul(sequences).ok_or_else(too_long)?;
    let n_pages = pages.max(largest(&args.n_prompt).div_ceil(PAGE_TOKENS)).max(1);
    Ok(Limits { n_pages, n_slots: sequences, n_batch: args.batch.max(sequences), n_outputs: sequences })
}

struct Bench {
    executor: Box<dyn Executor>,
    interrupt: Interrupt,
    logits: Vec<f32>,
    ids: Vec<u32>,
}

impl Bench {
    /// A token for every position of every sequence.
    fn token(&self, sequence: u32, position: u32) -> u32 {
        let mixed = position.wrapping_mul(2_654_435_761).wrapping_add(sequence.wrapping_mul(40_503));
        mixed % self.executor.config().n_vocab as u32
    }

    /// Runs a batch; the most probable token of each output goes to `ids`.
    fn step(&mut self, batch: &Batch) -> Result<(), CliError> {
        self.interrupt.check()?;
        let n_vocab = self.executor.config().n_vocab;
        if self.executor.chooses() {
            self.executor.submit(batch, &Choose { n_tokens: n_vocab as u32, ..Choose::default() })?;
            return Ok(self.executor.collect(&mut self.ids)?);
        }
        self.executor.forward(batch, &mut self.logits)?;
        self.ids.clear();
        self.ids.extend(self.logits.chunks_exact(n_vocab).map(|row| sampler::argmax(row).unwrap_or(0)));
        Ok(())
    }

    /// Tokens a second of a prompt of `n` tokens, `n_batch` a step.
    fn prompt(&mut self, n: u32, n_batch: u32) -> Result<f64, CliError> {
        let start = Instant::now();
        for first in (0..n).step_by(n_batch as usize) {
            let rows = n_batch.min(n - first);
            let pages = (0..(first + rows).div_ceil(PAGE_TOKENS)).collect();
            let tokens = (first..first + rows).map(|position| self.token(0, position)).collect();
            let spans = vec![Span { slot: 0, start: first, rows, pages }];
            let outputs = if first + rows == n { vec![rows - 1] } else { Vec::new() };
            self.step(&Batch { tokens, spans, outputs })?;
        }
        Ok(f64::from(n) / start.elapsed().as_secs_f64())
    }

    /// Tokens a second, of all sequences together, over `n` steps from `depth` on.
    fn decode(&mut self, n: u32, depth: u32, sequences: u32) -> Result<f64, CliError> {
        let n_pages = (depth + n).div_ceil(PAGE_TOKENS);
        let n_vocab = self.executor.config().n_vocab as u32;
        let batch = |position: u32, tokens: Vec<u32>| {
            let span = |slot: u32| {
                let pages = slot * n_pages..slot * n_pages + (position + 1).div_ceil(PAGE_TOKENS);
                Span { slot, start: position, rows: 1, pages: pages.collect() }
            };
            Batch { tokens, spans: (0..sequences).map(span).collect(), outputs: (0..sequences).collect() }
        };
        let mut tokens: Vec<u32> = (0..sequences).map(|s| self.token(s, depth)).collect();
        let chooses = self.executor.chooses();
        let start = Instant::now();
        for position in depth..depth + n {
            if !chooses {
                self.step(&batch(position, tokens))?;
                tokens = self.ids.iter().map(|id| id % n_vocab).collect();
                continue;
            }
            // As the engine does: a step is queued before the tokens of the one before are read.
            self.interrupt.check()?;
            let fed = if position > depth { (0..sequences).map(Some).collect() } else { Vec::new() };
            let choose = Choose { n_tokens: n_vocab, fed, ..Choose::default() };
            self.executor.submit(&batch(position, std::mem::take(&mut tokens)), &choose)?;
            tokens = vec![0; sequences as usize];
            if position > depth {
                self.executor.collect(&mut self.ids)?;
            }
        }
        if chooses && n > 0 {
            self.executor.collect(&mut self.ids)?;
        }
        Ok(f64::from(n) * f64::from(sequences) / start.elapsed().as_secs_f64())
    }

    /// The kernels of what `run` does, `n_steps` times the same; `None` where the device has none.
    fn profile(
        &mut self,
        name: String,
        n_steps: u32,
        step_us: f64,
        run: impl FnOnce(&mut Self) -> Result<f64, CliError>,
    ) -> Result<Option<Profile>, CliError> {
        self.executor.set_profiling(true);
        let done = run(self);
        let measured = self.executor.take_profile();
        self.executor.set_profiling(false);
        done?;
        Ok(measured?.map(|measured| Profile::new(name, &measured, n_steps, step_us)))
    }
}
