//! `cargo xtask golden`: every golden file against a device, with the worst error of each.
//!
//! The forms a device computes in are judged one by one. Exact ones, f32 throughout, are held against the other
//! engine's logits; the quantised activations that a GPU takes by default are held against our own exact logits, and
//! may be no farther from them than llama.cpp's quantised path is.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use gpu_kernels::blocks::GgmlType;
use host::cpu::dequant::dequantize_row;
use host::cuda::KernelSource;
use host::engine::{self, DeviceChoice};
use host::gguf::Gguf;
use host::gpu::BackendOptions;
use host::model::distance::{Distance, relative_l2};
use host::model::golden::{self, Case, Expected, Report};
use host::model::{Executor, Limits};
use serde::Deserialize;

use crate::workspace;

/// Relative L2 of a position, computed in f32. The engine that made the files differs from itself by 8e-7.
const MAX_RELATIVE_L2: f64 = 1e-4;
/// Of one logit, computed in f32; the files have four decimals.
const MAX_LOGIT_ERROR: f64 = 1e-3;
/// Relative L2 with int8 activations, for the models of random weights: a product in blocks of 16 is off by about
/// 2⁻⁸, and the layers' errors add up like noise.
const MAX_INT8_RELATIVE_L2: f64 = 0.1;
/// Difference of two experts' router logits up to which that noise may choose the other: it moves a router's logit by
/// 0.004 to 0.017 in these models (root mean square). Where another expert was chosen, the distance is that of two experts:
/// such positions are told apart in what a failed check says.
const NEAR_TIE: f32 = 0.03;
/// Rows of a batch.
const N_BATCH: u32 = 64;
/// The emulated device runs every lane of every kernel as a program of its own.
const EMULATED_POSITIONS: usize = 8;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// cpu, cuda, cuda:N or emulated.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    device: DeviceChoice,
    /// Only the first N positions of each case; on the emulated device 8, if not given.
    #[arg(short, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    n: Option<u32>,
}

/// Prompts of a trained model, and llama.cpp's own distance from f32 with quantised activations.
struct TopFile {
    file: &'static str,
    model: PathBuf,
    max_kl: f64,
    min_top1: f64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.device == DeviceChoice::Auto {
        bail!("name the device: cpu, cuda, cuda:N or emulated");
    }
    let emulated = args.device == DeviceChoice::Emulated;
    let n = args.n.map(|n| n as usize).or(emulated.then_some(EMULATED_POSITIONS));
    let mut checks = Checks { device: args.device.clone(), n, n_failed: 0 };
    let data = workspace::root().join("tests/data");
    checks.dequant(&data.join("dequant.json"))?;
    for case in golden::read_manifest(&data.join("logits"))? {
        checks.full_logits(&case)?;
    }
    let zinc_tiny = workspace::root().join("models/zinc-tiny-qwen35moe.gguf");
    let smollm2 = workspace::cache().join(host::models::SMOLLM2_FILE);
    let files = [
        TopFile { file: "zinc-tiny.json", model: zinc_tiny, max_kl: 0.0041, min_top1: 0.969 },
        TopFile { file: "smollm2.json", model: smollm2, max_kl: 0.0029, min_top1: 0.964 },
    ];
    for file in &files {
        if emulated {
            println!("skipped {}: the model is too large for the emulated device", file.file);
        } else if file.model.starts_with(workspace::cache()) && !file.model.exists() {
            println!("skipped {}: no {}; `cargo xtask setup` fetches it", file.file, file.model.display());
        } else {
            checks.top(&data, file)?;
        }
    }
    if checks.n_failed > 0 { bail!("{} of the results are out of bounds", checks.n_failed) } else { Ok(()) }
}

/// Runs checks and counts those that fail.
struct Checks {
    device: DeviceChoice,
    /// Positions of each case, all without it.
    n: Option<usize>,
    n_failed: usize,
}

/// A form in which a device computes.
#[derive(Clone, Copy)]
enum Form {
    /// f32 throughout.
    Exact,
    /// A GPU's default: int8 activations, f16 keys and values.
    Int8,
}

impl Form {
    fn options(self) -> BackendOptions {
        match self {
            Form::Exact => BackendOptions::exact(),
            Form::Int8 => BackendOptions::default(),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Form::Exact => "f32",
            Form::Int8 => "int8",
        }
    }
}

impl Checks {
    fn say(&mut self, is_good: bool, what: &str, finding: &str) {
        println!("{:<6} {what:<30} {finding}", if is_good { "ok" } else { "FAILED" });
        self.n_failed += usize::from(!is_good);
    }

    fn forms(&self) -> &'static [Form] {
        if self.device == DeviceChoice::Cpu { &[Form::Exact] } else { &[Form::Exact, Form::Int8] }
    }

    fn case(&self, case: &Case) -> Case {
        self.n.map_or_else(|| case.clone(), |n| case.beginning(n))
    }

    fn load(&self, device: &DeviceChoice, cases: &[Case], form: Form) -> Result<Box<dyn Executor>> {
        let first = cases.first().context("the golden file has no cases")?;
        let n_pages = cases.iter().map(Case::n_pages).max().unwrap_or(1);
        let limits = Limits { n_pages, n_slots: 1, n_batch: N_BATCH, n_outputs: N_BATCH };
        let path = &first.model;
        let gguf = Gguf::open(path).with_context(|| path.display().to_string())?;
        let executor = engine::load_with(Arc::new(gguf), device, &KernelSource::Embedded, limits, form.options());
        executor.with_context(|| format!("{} on {device}", path.display()))
    }

    /// Blocks of every format; the loader's and the CPU's reading of them, whatever the device.
    fn dequant(&mut self, path: &Path) -> Result<()> {
        let bytes = fs::read(path).with_context(|| path.display().to_string())?;
        let golden: BTreeMap<String, Blocks> =
            serde_json::from_slice(&bytes).with_context(|| path.display().to_string())?;
        let ours = golden.iter().filter_map(|(name, blocks)| Some((name, blocks, GgmlType::from_id(blocks.type_id)?)));
        for (name, blocks, ty) in ours {
            let n_wrong = blocks.n_wrong(ty)?;
            let finding = format!("{n_wrong} of {} values differ in a bit (on the CPU)", blocks.values.len());
            self.say(n_wrong == 0, &format!("dequant.json {name}"), &finding);
        }
        Ok(())
    }

    /// A tiny model whose logits are known in full.
    fn full_logits(&mut self, case: &Case) -> Result<()> {
        let case = self.case(case);
        let Expected::All(expected) = &case.expected else { bail!("{}: not all logits", case.name) };
        for &form in self.forms() {
            let mut executor = self.load(&self.device, std::slice::from_ref(&case), form)?;
            let n_vocab = executor.config().n_vocab;
            let logits = case.logits(executor.as_mut(), usize::MAX)?;
            let distance = distance(&logits, expected, n_vocab)?;
            let report = case.compare(&logits, n_vocab);
            let what = format!("logits/{} {}", case.name, form.name());
            let worst = format!(
                "relative L2 {:.1e} at position {} of {}",
                distance.worst_relative_l2, distance.worst_position, distance.positions
            );
            // Written so that NaN fails.
            match form {
                Form::Exact => {
                    let is_good = distance.worst_relative_l2 <= MAX_RELATIVE_L2 && report.wrong_greedy.is_empty();
                    self.say(is_good, &what, &format!("{worst}, {}", greedy(&[(case.clone(), report)])));
                }
                Form::Int8 => {
                    let rows = logits.chunks_exact(n_vocab).zip(expected.chunks_exact(n_vocab));
                    let is_far = |distance: f64| distance.is_nan() || distance > MAX_INT8_RELATIVE_L2;
                    let far: Vec<bool> = rows.map(|(a, b)| is_far(relative_l2(a, b))).collect();
                    let n_far = far.iter().filter(|far| **far).count();
                    let n_ties = if n_far == 0 { 0 } else { self.near_ties(&case, &far)? };
                    let is_good = distance.worst_relative_l2 <= MAX_INT8_RELATIVE_L2;
                    let ties = if n_far == 0 {
                        String::new()
                    } else {
                        format!(", {n_ties} of {n_far} beyond {MAX_INT8_RELATIVE_L2} where experts are near equals")
                    };
                    self.say(is_good, &what, &format!("{worst}{ties}, {}", closeness(&distance)));
                }
            }
        }
        Ok(())
    }

    /// How many of the positions that are `far` off have a router that, in f32, chose between near equals.
    fn near_ties(&self, case: &Case, far: &[bool]) -> Result<usize> {
        let mut truth = self.load(&DeviceChoice::Cpu, std::slice::from_ref(case), Form::Exact)?;
        let mut n = 0;
        for (position, far) in far.iter().enumerate() {
            case.step(truth.as_mut(), position)?;
            let lead = truth.take_narrowest_choice();
            n += usize::from(*far && lead.is_some_and(|lead| lead <= NEAR_TIE));
        }
        Ok(n)
    }

    /// A trained model's prompts.
    fn top(&mut self, data: &Path, file: &TopFile) -> Result<()> {
        let cases = golden::read_top(&data.join(file.file), &file.model)?;
        let cases: Vec<Case> = cases.iter().map(|case| self.case(case)).collect();
        for &form in self.forms() {
            let mut executor = self.load(&self.device, &cases, form)?;
            let what = format!("{} {}", file.file, form.name());
            match form {
                Form::Exact => self.top_exact(&what, executor.as_mut(), cases.clone())?,
                Form::Int8 => {
                    let mut truth = self.load(&DeviceChoice::Cpu, &cases, Form::Exact)?;
                    let n_vocab = truth.config().n_vocab;
                    let mut distance = Distance::default();
                    for case in &cases {
                        let wanted = case.logits(truth.as_mut(), usize::MAX)?;
                        // One by one, which is the decode path.
                        add(&mut distance, &case.logits(executor.as_mut(), 1)?, &wanted, n_vocab)?;
                    }
                    let is_good = distance.mean_kl <= file.max_kl && distance.top1_agreement >= file.min_top1;
                    let bounds = format!("at most {}, at least {:.1} %", file.max_kl, 100.0 * file.min_top1);
                    self.say(is_good, &what, &format!("{} ({bounds})", closeness(&distance)));
                }
            }
        }
        Ok(())
    }

    fn top_exact(&mut self, what: &str, executor: &mut dyn Executor, cases: Vec<Case>) -> Result<()> {
        let mut reports = Vec::new();
        for case in cases {
            let report = case.run(executor, usize::MAX)?;
            reports.push((case, report));
        }
        let larger = |a: f64, b: f64| if a.is_nan() || a > b { a } else { b };
        let worst = reports.iter().map(|(_, report)| report.worst_error).fold(0.0, larger);
        let is_right = reports.iter().all(|(_, report)| report.wrong_greedy.is_empty());
        let finding = format!("{worst:.1e} off at most in the ten largest logits, {}", greedy(&reports));
        self.say(worst <= MAX_LOGIT_ERROR && is_right, what, &finding);
        Ok(())
    }
}

fn distance(logits: &[f32], expected: &[f32], n_vocab: usize) -> Result<Distance> {
    let mut distance = Distance::default();
    add(&mut distance, logits, expected, n_vocab)?;
    Ok(distance)
}

fn add(distance: &mut Distance, logits: &[f32], expected: &[f32], n_vocab: usize) -> Result<()> {
    if logits.len() != expected.len() {
        bail!("{} logits, the golden file has {}", logits.len(), expected.len());
    }
    for (ours, expected) in logits.chunks_exact(n_vocab).zip(expected.chunks_exact(n_vocab)) {
        distance.add(ours, expected);
    }
    Ok(())
}

fn closeness(distance: &Distance) -> String {
    format!("mean KL {:.5}, top-1 {:.1} %", distance.mean_kl, 100.0 * distance.top1_agreement)
}

fn greedy(reports: &[(Case, Report)]) -> String {
    let n: usize = reports.iter().map(|(case, _)| case.greedy.len()).sum();
    let n_wrong: usize = reports.iter().map(|(_, report)| report.wrong_greedy.len()).sum();
    format!("greedy {} of {n}", n - n_wrong)
}

/// Blocks of one format with their values.
#[derive(Deserialize)]
struct Blocks {
    type_id: u32,
    blocks_hex: Vec<String>,
    values: Vec<f32>,
}

impl Blocks {
    fn n_wrong(&self, ty: GgmlType) -> Result<usize> {
        let digits = self.blocks_hex.iter().flat_map(|block| block.chars());
        let digits: Option<Vec<u8>> = digits.map(|c| c.to_digit(16).map(|digit| digit as u8)).collect();
        let digits = digits.context("dequant.json: not a hexadecimal digit")?;
        let bytes: Vec<u8> = digits.as_chunks::<2>().0.iter().map(|[high, low]| high << 4 | low).collect();
        let n_blocks = bytes.len() / ty.block_bytes();
        if !bytes.len().is_multiple_of(ty.block_bytes()) || n_blocks * ty.block_elems() != self.values.len() {
            bail!("dequant.json: {} bytes are not {} values of {ty}", bytes.len(), self.values.len());
        }
        let mut ours = vec![f32::NAN; self.values.len()];
        dequantize_row(ty, &bytes, &mut ours);
        Ok(ours.iter().zip(&self.values).filter(|(a, b)| a.to_bits() != b.to_bits()).count())
    }
}
