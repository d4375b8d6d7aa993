//! Whole models through the GPU backend, against another engine's logits.
//!
//! On the emulated device a few positions, always; on a GPU all of them, with `ZINC_GPU=1`. Then a machine
//! without a usable GPU fails.

use std::path::Path;
use std::sync::Arc;

use host::backend::{Batch, Choose, Draw, PAGE_TOKENS, Span};
use host::cpu::CpuBackend;
use host::cuda::{CudaDevice, KernelSource, Selector};
use host::gguf::Gguf;
use host::gpu::{Activations, BackendOptions, Device, Emulated, GpuBackend, KvType};
use host::model::distance::Distance;
use host::model::golden::{self, Case, Expected};
use host::model::{Executor, Limits, Session};

use crate::checkout;

/// With f32 activations and keys. The golden engine differs from itself by 8e-7 between batched and stepwise runs.
const TOLERANCE: f64 = 1e-4;
/// Of the int8 activations, loosely: one product in 32-element blocks is off by about 2⁻⁸ relative, and errors of
/// layers add up like noise. What it means for the next token is measured beside it.
const INT8_TOLERANCE: f64 = 0.1;

fn tiny_cases() -> Vec<Case> {
    golden::read_manifest(&checkout::path("tests/data/logits")).expect("golden logits")
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
    BackendOptions { activations, staging_bytes: 1 << 20, norm_cols: 0, ..BackendOptions::exact() }
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
/// and beside it the same, a few tokens shorter. Calls `check` with the golden position of every row of logits.
fn two_sequences<D: Device>(session: &mut Session<GpuBackend<D>>, case: &Case, mut check: impl FnMut(usize, &[f32])) {
    let pages = [vec![2], vec![1]];
    let mut done = [0usize, 0];
    let mut logits = Vec::new();
    for rows in [[6, 2], [1, 3], [1, 1], [1, 1], [1, 1]] {
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

/// With int8 activations a router may choose the other of two near equals, in models as small and random as these: one
/// position may be off by what an expert contributes, most may not.
fn beginnings_are_golden<D: Device>(device: &Arc<D>, activations: Activations, tolerance: f64) {
    let cases = tiny_cases();
    assert_eq!(cases.len(), 6);
    for case in cases {
        let limits = Limits { n_pages: 3, n_slots: 2, n_batch: 8, n_outputs: 8 };
        let mut session = session(device, options(activations), &case.model, limits);
        let mut errors = Vec::new();
        two_sequences(&mut session, &case, |position, logits| {
            errors.push(relative_l2(logits, expected(&case, position)));
        });
        errors.sort_by(f64::total_cmp);
        let (median, worst) = (errors[errors.len() / 2], errors[errors.len() - 1]);
        println!("{}: median {median:.1e}, worst {worst:.1e}", case.name);
        let most = if activations == Activations::F32 { tolerance } else { 0.3 };
        assert!(median < tolerance && worst < most, "{}: {median:e}, {worst:e}", case.name);
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

/// Logits of every position, the sequence cut into chunks of at most so many rows.
fn in_chunks<D: Device>(
    device: &Arc<D>,
    case: &Case,
    (n, chunk): (usize, usize),
    options: BackendOptions,
) -> Vec<Vec<f32>> {
    let limits = Limits { n_pages: 1, n_slots: 1, n_batch: chunk as u32, n_outputs: chunk as u32 };
    let mut session = session(device, options, &case.model, limits);
    let n_vocab = session.config().n_vocab;
    let (mut all, mut logits) = (Vec::new(), Vec::new());
    for start in (0..n).step_by(chunk) {
        let rows = chunk.min(n - start) as u32;
        let span = Span { slot: 0, start: start as u32, rows, pages: vec![0] };
        let tokens = case.tokens[start..start + rows as usize].to_vec();
        session
            .forward(&Batch { tokens, spans: vec![span], outputs: (0..rows).collect() }, &mut logits)
            .expect("it runs");
        all.extend(logits.chunks_exact(n_vocab).map(<[f32]>::to_vec));
    }
    all
}

/// Rows in tiles, experts by groups and rows one by one: the same arithmetic in another order. Rounding may move an
/// activation to the next of its 255 integers, and that a router's choice between two near equals, which the positions
/// after it remember: hence the tolerances. A wrong row, scale or expert table is wrong everywhere, and by about 1.
fn tiles_agree_with_single_rows<D: Device>(device: &Arc<D>) {
    for case in tiny_cases() {
        let n = case.tokens.len().min(20);
        let single = in_chunks(device, &case, (n, 1), options(Activations::Int8));
        for chunk in [n, 9, 5] {
            let tiled = in_chunks(device, &case, (n, chunk), options(Activations::Int8));
            let mut errors: Vec<f64> = tiled.iter().zip(&single).map(|(a, b)| relative_l2(a, b)).collect();
            assert_eq!(errors.len(), n);
            errors.sort_by(f64::total_cmp);
            let (median, worst) = (errors[n / 2], errors[n - 1]);
            println!("{} in chunks of {chunk}: median {median:.1e}, worst {worst:.1e}", case.name);
            assert!(median < 2e-2 && worst < 0.3, "{} in chunks of {chunk}: {median:e}, {worst:e}", case.name);
        }
    }
}

/// Rows by the products of warpgroups, whose activations are bf16, and rows one by one, whose are int8: both are near
/// what the model gives in f32, the former nearer. Where an expert's choice falls differently, a position may be off by
/// what that expert contributes.
fn wide_products_are_golden<D: Device>(device: &Arc<D>) {
    if !device.properties().wgmma {
        println!("skipped: {} has no wgmma", device.properties().name);
        return;
    }
    for case in tiny_cases() {
        let n = case.tokens.len().min(24);
        let limits = Limits { n_pages: case.n_pages(), n_slots: 1, n_batch: n as u32, n_outputs: n as u32 };
        let run = |wide_rows: u32| {
            let options = BackendOptions { wide_rows, ..options(Activations::Int8) };
            let mut session = session(device, options, &case.model, limits);
            let n_vocab = session.config().n_vocab;
            let span = Span { slot: 0, start: 0, rows: n as u32, pages: (0..case.n_pages()).collect() };
            let outputs = (0..n as u32).collect();
            let batch = Batch { tokens: case.tokens[..n].to_vec(), spans: vec![span], outputs };
            let mut logits = Vec::new();
            session.forward(&batch, &mut logits).expect("the model runs");
            let rows = logits.chunks_exact(n_vocab).enumerate();
            let mut errors: Vec<f64> = rows.map(|(i, logits)| relative_l2(logits, expected(&case, i))).collect();
            errors.sort_by(f64::total_cmp);
            (logits, errors[n / 2], errors[n - 1])
        };
        let ((wide, median, worst), (int8, int8_median, _)) = (run(1), run(u32::MAX));
        println!("{}: median {median:.1e}, worst {worst:.1e}; int8 {int8_median:.1e}", case.name);
        assert!(median < INT8_TOLERANCE && worst < 0.3, "{}: {median:e}, {worst:e}", case.name);
        assert!(wide != int8, "{}: the same bits from other products", case.name);
    }
}

#[test]
fn wide_products_are_golden_on_the_emulated_gpu() {
    wide_products_are_golden(&emulated());
}

#[test]
fn wide_products_are_golden_on_the_gpu() {
    if let Some(device) = gpu() {
        wide_products_are_golden(&device);
    }
}

#[test]
fn tiles_agree_with_single_rows_on_the_emulated_gpu() {
    tiles_agree_with_single_rows(&emulated());
}

#[test]
fn tiles_agree_with_single_rows_on_the_gpu() {
    if let Some(device) = gpu() {
        tiles_agree_with_single_rows(&device);
    }
}

/// The experts of a step of several rows, by vectors and in tiles: what [`tiles_agree_with_single_rows`] says of either.
fn grouped_experts_agree_with_single_rows<D: Device>(device: &Arc<D>) {
    let with_experts = |case: &Case| ["qwen35moe", "gpt-oss", "qwen3moe"].contains(&case.name.as_str());
    let cases: Vec<Case> = tiny_cases().into_iter().filter(with_experts).collect();
    assert_eq!(cases.len(), 3);
    for case in cases {
        let n = case.tokens.len().min(22);
        let single = in_chunks(device, &case, (n, 1), options(Activations::Int8));
        let [vectors, tiles] = [u32::MAX, 0].map(|routes_per_expert| {
            let options = BackendOptions { routes_per_expert, ..options(Activations::Int8) };
            in_chunks(device, &case, (n, 11), options)
        });
        assert!(vectors != tiles, "{}: both took the same way", case.name);
        let mut errors: Vec<f64> = vectors.iter().zip(&single).map(|(a, b)| relative_l2(a, b)).collect();
        errors.sort_by(f64::total_cmp);
        let (median, worst) = (errors[n / 2], errors[n - 1]);
        println!("{}: median {median:.1e}, worst {worst:.1e}", case.name);
        assert!(median < 2e-2 && worst < 0.3, "{}: {median:e}, {worst:e}", case.name);
    }
}

#[test]
fn grouped_experts_agree_with_single_rows_on_the_emulated_gpu() {
    grouped_experts_agree_with_single_rows(&emulated());
}

#[test]
fn grouped_experts_agree_with_single_rows_on_the_gpu() {
    if let Some(device) = gpu() {
        grouped_experts_agree_with_single_rows(&device);
    }
}

/// Logits of two sequences of a case, and of a few tokens one by one, fused or not.
fn logits<D: Device>(device: &Arc<D>, case: &Case, options: BackendOptions) -> Vec<Vec<f32>> {
    let limits = Limits { n_pages: 3, n_slots: 2, n_batch: 8, n_outputs: 8 };
    let mut session = session(device, options, &case.model, limits);
    let mut all = Vec::new();
    two_sequences(&mut session, case, |_, logits| all.push(logits.to_vec()));
    all.extend(in_chunks(device, case, (5, 1), options));
    all
}

/// Several operations in one kernel have the arithmetic of the operations one by one, up to the order of some f32 sums.
/// Such a difference, of about 1e-7, may move an activation to the next of its integers, at few positions. A delta net
/// in one launch adds in another order throughout: there f32 activations show that it is nothing but rounding.
fn fusing_changes_nothing<D: Device>(device: &Arc<D>) {
    for case in tiny_cases() {
        let (name, delta_net) = (case.name.as_str(), case.name == "qwen35moe");
        let options = options(if delta_net { Activations::F32 } else { Activations::Int8 });
        // Of keys in f16, attention of a row alone in its sequence makes them ready itself.
        let options = BackendOptions { kv: if delta_net { KvType::F32 } else { KvType::F16 }, ..options };
        let [with, without] = [true, false].map(|fuse| logits(device, &case, BackendOptions { fuse, ..options }));
        assert!(!with.is_empty() && with.len() == without.len());
        let mut errors: Vec<f64> = with.iter().zip(&without).map(|(a, b)| relative_l2(a, b)).collect();
        errors.sort_by(f64::total_cmp);
        let (median, worst) = (errors[errors.len() / 2], errors[errors.len() - 1]);
        println!("{name}: median {median:.1e}, worst {worst:.1e}");
        let (most, limit) = if delta_net { (1e-5, 1e-5) } else { (1e-6, 3e-2) };
        assert!(median <= most && worst <= limit, "{name}: fused differs by {median:e}, {worst:e}");
    }
}

#[test]
fn fusing_changes_nothing_on_the_emulated_gpu() {
    fusing_changes_nothing(&emulated());
}

#[test]
fn fusing_changes_nothing_on_the_gpu() {
    if let Some(device) = gpu() {
        fusing_changes_nothing(&device);
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

/// B31: a captured graph keeps nothing of the step it was captured at.
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
            session.submit(&batch, &greedy(n_tokens)).expect("the model runs");
            session.collect(&mut ids).expect("the device chooses");
            assert_eq!(ids, wanted, "of {n_tokens}");
        }
    }
    assert!(session.submit(&batch, &greedy(n_vocab + 1)).is_err(), "there are fewer logits");
    assert!(session.collect(&mut ids).is_err(), "nothing was submitted");
}

fn greedy(n_tokens: usize) -> Choose {
    Choose { n_tokens: n_tokens as u32, ..Choose::default() }
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

/// Steps of two sequences, one across a page border, whose tokens the device chooses: given by the host, or fed.
fn decode<D: Device>(session: &mut Session<GpuBackend<D>>, fed: bool, draws: &[Draw]) -> Vec<u32> {
    const N_STEPS: u32 = 6;
    let n_tokens = session.config().n_vocab as u32;
    let (mut all, mut ids) = (Vec::new(), vec![3, 5]);
    for step in 0..N_STEPS {
        let span = |slot: u32, start: u32, pages: &[u32]| {
            let n_pages = (start + 1).div_ceil(PAGE_TOKENS) as usize;
            Span { slot, start, rows: 1, pages: pages[..n_pages].to_vec() }
        };
        // From one step on the sequences change places.
        let mut spans = vec![span(0, 61 + step, &[2, 0]), span(1, 9 + step, &[1])];
        let swapped = step >= 4;
        if swapped {
            spans.swap(0, 1);
        }
        let order = if step == 4 { [1, 0] } else { [0, 1] };
        let draws = draws.iter().map(|d| Draw { uniform: d.uniform.wrapping_mul(u64::from(step) * 2 + 1), ..*d });
        let draws: Vec<Draw> = if swapped { draws.rev().collect() } else { draws.collect() };
        let feeds = fed && step > 0;
        let tokens = if feeds { vec![0; 2] } else { order.map(|i: u32| ids[i as usize]).to_vec() };
        let from = if feeds { order.map(Some).to_vec() } else { Vec::new() };
        let batch = Batch { tokens, spans, outputs: vec![0, 1] };
        session.submit(&batch, &Choose { n_tokens, draws, fed: from }).expect("the model runs");
        // A step ahead of the reading, where it can be.
        if !fed || step > 0 {
            session.collect(&mut ids).expect("the device chooses");
            all.extend(&ids);
        }
    }
    if fed {
        session.collect(&mut ids).expect("the device chooses");
        all.extend(&ids);
    }
    all
}

fn feeding_changes_no_token<D: Device>(device: &Arc<D>) {
    let hot = Draw { temperature: 2.0, top_k: 50, top_p: 0.95, min_p: 0.01, uniform: 0x1234_5678_9abc_def1 };
    let cases = tiny_cases();
    let case = cases.iter().find(|case| case.name == "qwen35moe").expect("the case");
    for draws in [vec![], vec![Draw::GREEDY, hot]] {
        let run = |graphs: bool, fed: bool| {
            let limits = Limits { n_pages: 3, n_slots: 2, n_batch: 2, n_outputs: 2 };
            let options = BackendOptions { graphs, ..options(Activations::Int8) };
            decode(&mut session(device, options, &case.model, limits), fed, &draws)
        };
        let given = run(false, false);
        assert_eq!(given.len(), 12);
        for graphs in [false, true] {
            assert_eq!(run(graphs, true), given, "graphs {graphs}, {draws:?}");
        }
    }
}

#[test]
fn feeding_changes_no_token_on_the_emulated_gpu() {
    feeding_changes_no_token(&emulated());
}

#[test]
fn feeding_changes_no_token_on_the_gpu() {
    if let Some(device) = gpu() {
        feeding_changes_no_token(&device);
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
    let cases = golden::read_top(&checkout::path("tests/data").join(file), model).expect("golden file");
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
    let model = checkout::zinc_tiny();
    default_forms_are_near_the_truth(&device, "zinc-tiny.json", &model, 0.0041, 0.969);
}

#[test]
fn smollm2_on_the_gpu_is_as_near_as_quantised_llama_cpp() {
    let Some(device) = gpu() else { return };
    let Some(model) = checkout::fetched("SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
    default_forms_are_near_the_truth(&device, "smollm2.json", &model, 0.0029, 0.964);
}
