//! Whole models through the GPU backend, against another engine's logits.
//!
//! On the emulated device a few positions, always; on a GPU all of them, with `ZINC_GPU=1`. Then a machine
//! without a usable GPU fails.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use host::backend::{Batch, PAGE_TOKENS, Span};
use host::cpu::CpuBackend;
use host::cuda::{CudaDevice, KernelSource, Selector};
use host::gguf::Gguf;
use host::gpu::{Activations, BackendOptions, Device, Emulated, GpuBackend, KvType};
use host::model::distance::Distance;
use host::model::golden::{self, Case, Expected};
use host::model::{Executor, Limits, Session};

/// With f32 activations and keys. The golden engine differs from itself by 8e-7 between batched and stepwise runs.
const TOLERANCE: f64 = 1e-4;
/// Of the int8 activations, loosely: one product in 32-element blocks is off by about 2⁻⁸ relative, and errors of
/// layers add up like noise. What it means for the next token is measured beside it.
const INT8_TOLERANCE: f64 = 0.1;

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

fn tiny_cases() -> Vec<Case> {
    golden::read_manifest(&root().join("tests/data/logits")).expect("golden logits")
}

/// The GPU, where one is asked for.
fn gpu() -> Option<Arc<CudaDevice>> {
    if std::env::var_os("ZINC_GPU").is_none_or(|value| value != "1") {
        println!("skipped: ZINC_GPU=1 is not set");
        return None;
    }
    let device = CudaDevice::open(&Selector::default(), &KernelSource::Embedded);
    Some(Arc::new(device.expect("ZINC_GPU=1 is set, so there is a GPU")))
}

fn emulated() -> Arc<Emulated> {
    Arc::new(Emulated::new())
}

fn options(activations: Activations) -> BackendOptions {
    BackendOptions { activations, staging_bytes: 1 << 20, ..BackendOptions::exact() }
}

fn session<D: Device>(
    device: &Arc<D>,
    options: BackendOptions,
    model: &Path,
    limits: Limits,
) -> Session<GpuBackend<D>> {
    let gguf = Gguf::open(model).expect("the golden model opens");
    Session::new(GpuBackend::new(Arc::clone(device), options), &gguf, limits).expect("the golden model loads")
}

/// The expected logits of a position.
fn expected(case: &Case, position: usize) -> &[f32] {
    let Expected::All(logits) = &case.expected else { panic!("{}: full logits", case.name) };
    let n_vocab = logits.len() / case.tokens.len();
    &logits[position * n_vocab..][..n_vocab]
}

/// `‖a − b‖ / ‖b‖`.
fn relative_l2(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
    let difference = squares(&mut a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    (difference / squares(&mut b.iter().copied().map(f64::from))).sqrt()
}

/// Two sequences, in one batch and then token by token: the case from its beginning with its pages out of order,
/// and beside it the same a few tokens longer. Calls `check` with the golden position of every row of logits.
fn two_sequences<D: Device>(session: &mut Session<GpuBackend<D>>, case: &Case, mut check: impl FnMut(usize, &[f32])) {
    let pages = [vec![2], vec![1]];
    let mut done = [0usize, 0];
    let mut logits = Vec::new();
    for rows in [[5, 3], [1, 1], [1, 1], [1, 1]] {
        let mut batch = Batch::default();
        let mut positions = Vec::new();
        for slot in 0..2 {
            let tokens = done[slot]..done[slot] + rows[slot];
            batch.tokens.extend(&case.tokens[tokens.clone()]);
            let (start, rows) = (tokens.start as u32, rows[slot] as u32);
            batch.spans.push(Span { slot: slot as u32, start, rows, pages: pages[slot].clone() });
            positions.extend(tokens.clone());
            done[slot] = tokens.end;
        }
        batch.outputs = (0..batch.tokens.len() as u32).collect();
        session.forward(&batch, &mut logits).expect("the model runs");
        let n_vocab = session.config().n_vocab;
        for (position, logits) in positions.iter().zip(logits.chunks_exact(n_vocab)) {
            check(*position, logits);
        }
    }
}

fn beginnings_are_golden<D: Device>(device: &Arc<D>, activations: Activations, tolerance: f64) {
    let cases = tiny_cases();
    assert_eq!(cases.len(), 6);
    for case in cases {
        let limits = Limits { n_pages: 3, n_slots: 2, n_batch: 8, n_outputs: 8 };
        let mut session = session(device, options(activations), &case.model, limits);
        let mut worst: f64 = 0.0;
        two_sequences(&mut session, &case, |position, logits| {
            let error = relative_l2(logits, expected(&case, position));
            assert!(error < tolerance, "{} at {position}: {error:e}", case.name);
            worst = worst.max(error);
        });
        println!("{}: {worst:.1e}", case.name);
    }
}

#[test]
fn models_on_the_emulated_gpu_begin_with_the_golden_logits() {
    beginnings_are_golden(&emulated(), Activations::F32, TOLERANCE);
}

#[test]
fn int8_activations_stay_near_the_golden_logits() {
    beginnings_are_golden(&emulated(), Activations::Int8, INT8_TOLERANCE);
}

/// Several operations in one kernel give the bits that they give one by one.
fn fusing_changes_no_bit<D: Device>(device: &Arc<D>) {
    for case in &tiny_cases() {
        let run = |fuse: bool| {
            let limits = Limits { n_pages: 3, n_slots: 2, n_batch: 8, n_outputs: 8 };
            let options = BackendOptions { fuse, kv: KvType::F16, ..options(Activations::Int8) };
            let mut session = session(device, options, &case.model, limits);
            let mut all = Vec::new();
            two_sequences(&mut session, case, |_, logits| all.extend(logits.iter().map(|x| x.to_bits())));
            all
        };
        let (with, without) = (run(true), run(false));
        assert!(!with.is_empty());
        let first = with.iter().zip(&without).position(|(a, b)| a != b);
        assert_eq!((first, with.len()), (None, without.len()), "{}", case.name);
    }
}

#[test]
fn fusing_changes_no_bit_on_the_emulated_gpu() {
    fusing_changes_no_bit(&emulated());
}

#[test]
fn fusing_changes_no_bit_on_the_gpu() {
    if let Some(device) = gpu() {
        fusing_changes_no_bit(&device);
    }
}

/// A captured step is replayed with other tokens, positions and pages than it was captured with.
fn graphs_change_no_bit<D: Device>(device: &Arc<D>) {
    let case = &tiny_cases()[0];
    let run = |graphs: bool| {
        let limits = Limits { n_pages: 3, n_slots: 2, n_batch: 8, n_outputs: 8 };
        let options = BackendOptions { graphs, ..options(Activations::Int8) };
        let mut session = session(device, options, &case.model, limits);
        let mut all = Vec::new();
        two_sequences(&mut session, case, |_, logits| all.extend(logits.iter().map(|x| x.to_bits())));
        all
    };
    let (with, without) = (run(true), run(false));
    assert!(!with.is_empty());
    assert!(with == without, "a replayed step differs from a launched one");
}

#[test]
fn graphs_change_no_bit_on_the_emulated_gpu() {
    graphs_change_no_bit(&emulated());
}

#[test]
fn graphs_change_no_bit_on_the_gpu() {
    if let Some(device) = gpu() {
        graphs_change_no_bit(&device);
    }
}

/// The same batch from position 0 again and again: eager, captured, replayed.
fn tokens_chosen_on_the_device_have_the_largest_logits<D: Device>(device: &Arc<D>) {
    let cases = tiny_cases();
    let case = cases.iter().find(|case| case.name == "qwen35moe").expect("the case");
    let limits = Limits { n_pages: 1, n_slots: 1, n_batch: 4, n_outputs: 4 };
    let mut session = session(device, options(Activations::Int8), &case.model, limits);
    let span = Span { slot: 0, start: 0, rows: 4, pages: vec![0] };
    let batch = Batch { tokens: case.tokens[..4].to_vec(), spans: vec![span], outputs: vec![0, 2, 3] };
    let n_vocab = session.config().n_vocab;
    let (mut logits, mut ids) = (Vec::new(), Vec::new());
    for n_tokens in [n_vocab, n_vocab - 1, 7, 1] {
        session.forward(&batch, &mut logits).expect("the model runs");
        let largest = |row: &[f32]| (0..n_tokens).fold(0, |best, i| if row[i] > row[best] { i } else { best }) as u32;
        let wanted: Vec<u32> = logits.chunks_exact(n_vocab).map(largest).collect();
        for _ in 0..3 {
            let done = session.forward_argmax(&batch, n_tokens as u32, &mut ids);
            done.expect("a GPU chooses").expect("the model runs");
            assert_eq!(ids, wanted, "of {n_tokens}");
        }
    }
    assert!(session.forward_argmax(&batch, n_vocab as u32 + 1, &mut ids).is_none(), "there are fewer logits");
}

#[test]
fn the_emulated_gpu_chooses_tokens() {
    tokens_chosen_on_the_device_have_the_largest_logits(&emulated());
}

#[test]
fn the_gpu_chooses_tokens() {
    if let Some(device) = gpu() {
        tokens_chosen_on_the_device_have_the_largest_logits(&device);
    }
}

#[test]
fn every_position_on_the_gpu_is_golden() {
    let Some(device) = gpu() else { return };
    for case in tiny_cases() {
        for chunk in [usize::MAX, 7, 1] {
            let limits = Limits { n_pages: case.n_pages(), n_slots: 1, n_batch: 64, n_outputs: 64 };
            let mut session = session(&device, options(Activations::F32), &case.model, limits);
            let report = case.run(&mut session, chunk).expect("the model runs");
            println!("{} in chunks of {chunk}: {:.1e}", case.name, report.worst_error);
            assert!(report.worst_error < TOLERANCE, "{} in chunks of {chunk}: {report:?}", case.name);
            assert_eq!(report.wrong_greedy, [0; 0], "{} in chunks of {chunk}", case.name);
        }
    }
    beginnings_are_golden(&device, Activations::Int8, INT8_TOLERANCE);
}

/// The default forms, int8 activations and f16 keys, against the CPU's f32: no farther than llama.cpp's quantised
/// path is from the same truth.
fn default_forms_are_near_the_truth(device: &Arc<CudaDevice>, file: &str, model: &Path, max_kl: f64, min_top: f64) {
    let cases = golden::read_top(&root().join("tests/data").join(file), model).expect("golden file");
    let n_pages = cases.iter().map(|case| case.tokens.len() as u32).max().expect("there are cases");
    let limits = Limits { n_pages: n_pages.div_ceil(PAGE_TOKENS), n_slots: 1, n_batch: 64, n_outputs: 64 };
    let gguf = Arc::new(Gguf::open(model).expect("the model opens"));
    let mut truth = Session::new(CpuBackend::new(Arc::clone(&gguf)), &gguf, limits).expect("it loads");
    let mut ours = session(device, BackendOptions::default(), model, limits);
    let n_vocab = ours.config().n_vocab;
    let mut distance = Distance::default();
    for case in &cases {
        let (wanted, found) = (case.logits(&mut truth, 64), case.logits(&mut ours, 1));
        let (wanted, found) = (wanted.expect("it runs"), found.expect("it runs"));
        for (found, wanted) in found.chunks(n_vocab).zip(wanted.chunks(n_vocab)) {
            distance.add(found, wanted);
        }
    }
    let (n, kl, top) = (distance.positions, distance.mean_kl, distance.top1_agreement);
    println!("{file}: {n} positions, mean KL {kl:.5}, top-1 {:.2} %", top * 100.0);
    assert!(kl <= max_kl && top >= min_top, "{file}: mean KL {kl}, at most {max_kl}; top-1 {top}, at least {min_top}");
}

#[test]
fn zinc_tiny_on_the_gpu_is_as_near_as_quantised_llama_cpp() {
    let Some(device) = gpu() else { return };
    let model = root().join("models/zinc-tiny-qwen35moe.gguf");
    default_forms_are_near_the_truth(&device, "zinc-tiny.json", &model, 0.0041, 0.969);
}

#[test]
fn smollm2_on_the_gpu_is_as_near_as_quantised_llama_cpp() {
    let Some(device) = gpu() else { return };
    let cache = std::env::var_os("ZINC_CACHE").map_or_else(|| root().join(".cache"), PathBuf::from);
    let model = cache.join("SmolLM2-135M-Instruct.Q4_1.gguf");
    if !model.exists() {
        let why = format!("{} is not there; `cargo xtask setup` fetches it", model.display());
        assert!(std::env::var_os("ZINC_REQUIRE").is_none(), "{why}");
        println!("skipped: {why}");
        return;
    }
    default_forms_are_near_the_truth(&device, "smollm2.json", &model, 0.0029, 0.964);
}
