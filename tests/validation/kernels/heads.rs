//! From projections to attention: bias, norm and rotation of heads, and the cache's writes.

#![expect(unsafe_code, reason = "launches whose page tables live on the device")]

use gpu_kernels::kernels::rope::RopeParams;
use half::f16;
use host::backend::PAGE_TOKENS;
use host::gpu::ops::{self, Heads, KvSlice, Placement};
use host::gpu::{Buffer, Device};

use super::{Output, Random, assert_close, assert_same_bits, input, on_devices};

struct Case {
    n_head: usize,
    n_head_kv: usize,
    head_dim: usize,
    n_rot: usize,
    adjacent: bool,
    gated: bool,
    biases: bool,
    norms: bool,
    half: bool,
}

/// Positions and spans of the rows, and the pages of two spans; page 5 is nobody's.
const POS: [u32; 5] = [0, 63, 64, 130, 100_001];
const SPAN: [u32; 5] = [1, 1, 1, 0, 2];
const MAX_PAGES: usize = 1 << 11;
const N_PAGES: usize = 7;

fn page_table() -> Vec<u32> {
    let mut table = vec![u32::MAX; 3 * MAX_PAGES];
    (table[2], table[MAX_PAGES], table[MAX_PAGES + 1]) = (4, 3, 0);
    table[2 * MAX_PAGES + 100_001 / PAGE_TOKENS as usize] = 6;
    table
}

struct Operands {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    biases: [Vec<f32>; 3],
    norms: [Vec<f32>; 2],
    inv_freq: Vec<f64>,
}

/// Runs the kernel: queries, and the caches with NaN where nothing was written.
fn run<D: Device>(device: &D, case: &Case, x: &Operands) -> (Vec<f32>, [Vec<f32>; 2]) {
    let Case { n_head, n_head_kv, head_dim, .. } = *case;
    let (rows, kv_dim) = (POS.len(), n_head_kv * head_dim);
    let (pos, span, table) = (input(device, &POS), input(device, &SPAN), input(device, &page_table()));
    let (first, span_rows) = (input(device, &[3u32, 0, 4]), input(device, &[1u32, 3, 1]));
    let short = input(device, &[0u32, 1, 2, 3, 4]);
    let at = Placement {
        pos: pos.slice(),
        span: span.slice(),
        page_table: table.slice(),
        max_pages: MAX_PAGES as u32,
        first: first.slice(),
        span_rows: span_rows.slice(),
        short: short.slice(),
    };
    let (k, v) = (input(device, &x.k), input(device, &x.v));
    let (biases, norms) = (x.biases.each_ref().map(|b| input(device, b)), x.norms.each_ref().map(|w| input(device, w)));
    let turns = input(device, &ops::turns(x.inv_freq.iter().copied()));
    // Without gates the queries are worked on in place, as in a model.
    let q_out = if case.gated { Output::new(device, rows * n_head * head_dim) } else { Output::holding(device, &x.q) };
    let q_in: Buffer<D, f32> = input(device, &x.q);
    let op = Heads {
        q: if case.gated { q_in.slice() } else { q_out.slice() },
        gated: case.gated,
        k: k.slice(),
        v: v.slice(),
        biases: biases.each_ref().map(|b| case.biases.then(|| b.slice())),
        norms: norms.each_ref().map(|w| case.norms.then(|| w.slice())),
        eps: 1e-5,
        rope: RopeParams {
            n_head: n_head as u32,
            head_dim: head_dim as u32,
            n_rot: case.n_rot as u32,
            adjacent: u32::from(case.adjacent),
            magnitude: 1.25,
        },
        turns: turns.slice(),
        n_head_kv: n_head_kv as u32,
        at,
        dependent: true,
    };
    let len = N_PAGES * PAGE_TOKENS as usize * kv_dim;
    if case.half {
        let caches = [Output::<D, u16>::new(device, len), Output::<D, u16>::new(device, len)];
        let kv = (KvSlice::F16(caches[0].slice()), KvSlice::F16(caches[1].slice()));
        // SAFETY: the table names a page for every position.
        unsafe { ops::attention_heads(device, &op, q_out.slice(), kv).unwrap() };
        let wide = |cache: &Output<D, u16>| cache.read(device).iter().map(|x| f16::from_bits(*x).to_f32()).collect();
        (q_out.read(device), caches.each_ref().map(wide))
    } else {
        let caches = [Output::<D, f32>::new(device, len), Output::<D, f32>::new(device, len)];
        let kv = (KvSlice::F32(caches[0].slice()), KvSlice::F32(caches[1].slice()));
        // SAFETY: as above.
        unsafe { ops::attention_heads(device, &op, q_out.slice(), kv).unwrap() };
        (q_out.read(device), caches.each_ref().map(|cache| cache.read(device)))
    }
}

/// The definition of one head, in f64.
fn head(case: &Case, x: &[f32], bias: &[f32], norm: Option<&[f32]>, turn: Option<(u32, &[f64])>) -> Vec<f64> {
    let bias = |i: usize| if case.biases { f64::from(bias[i]) } else { 0.0 };
    let mut x: Vec<f64> = x.iter().enumerate().map(|(i, &x)| f64::from(x) + bias(i)).collect();
    if let Some(norm) = norm {
        let scale = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + 1e-5).sqrt();
        x.iter_mut().zip(norm).for_each(|(x, &w)| *x *= scale * f64::from(w));
    }
    for (i, freq) in turn.iter().flat_map(|(_, freqs)| freqs.iter().enumerate()) {
        let pos = turn.map_or(0, |(pos, _)| pos);
        let (a, b) = if case.adjacent { (2 * i, 2 * i + 1) } else { (i, i + case.n_rot / 2) };
        let (sin, cos) = (f64::from(pos) * freq).sin_cos();
        (x[a], x[b]) = ((x[a] * cos - x[b] * sin) * 1.25, (x[a] * sin + x[b] * cos) * 1.25);
    }
    x
}

fn check<D: Device>(device: &D, case: &Case) {
    let Case { n_head, n_head_kv, head_dim, .. } = *case;
    let (rows, kv_dim, q_dim) = (POS.len(), n_head_kv * head_dim, n_head * head_dim);
    let mut random = Random::new((head_dim + n_head) as u64);
    let q_stride = if case.gated { 2 * head_dim } else { head_dim };
    let x = Operands {
        q: random.units(rows * n_head * q_stride),
        k: random.units(rows * kv_dim),
        v: random.units(rows * kv_dim),
        biases: [random.units(q_dim), random.units(kv_dim), random.units(kv_dim)],
        norms: [random.units(head_dim), random.units(head_dim)],
        inv_freq: (0..case.n_rot / 2).map(|i| 1e7f64.powf(-2.0 * i as f64 / case.n_rot as f64)).collect(),
    };
    let (q, caches) = run(device, case, &x);
    let turn = |row: usize| Some((POS[row], &*x.inv_freq));
    let norm = |i: usize| case.norms.then_some(&*x.norms[i]);
    // Values, with bias, are at most 2, normed perhaps 4; sines are off by 4e-7 (angles within [−π, π)), sums of squares
    // and the root by a few units in the last place.
    let bound = 8e-6;
    let mut wanted = vec![];
    for row in 0..rows {
        for h in 0..n_head {
            let (q, bias) = (&x.q[(row * n_head + h) * q_stride..][..head_dim], &x.biases[0][h * head_dim..]);
            wanted.extend(head(case, q, bias, norm(0), turn(row)));
        }
    }
    assert_close("queries", &q, &wanted, |_| bound);

    let len = N_PAGES * PAGE_TOKENS as usize * kv_dim;
    let table = page_table();
    for (i, (what, from)) in [("keys", &x.k), ("values", &x.v)].into_iter().enumerate() {
        let mut wanted = vec![f64::NAN; len];
        for row in 0..rows {
            let page = table[SPAN[row] as usize * MAX_PAGES + (POS[row] / PAGE_TOKENS) as usize] as usize;
            let to = (page * PAGE_TOKENS as usize + (POS[row] % PAGE_TOKENS) as usize) * kv_dim;
            for h in 0..n_head_kv {
                let (from, bias) = (&from[row * kv_dim + h * head_dim..][..head_dim], &x.biases[i + 1][h * head_dim..]);
                let (norm, turn) = if i == 0 { (norm(1), turn(row)) } else { (None, None) };
                wanted[to + h * head_dim..][..head_dim].copy_from_slice(&head(case, from, bias, norm, turn));
            }
        }
        assert!(caches[i].iter().zip(&wanted).all(|(a, b)| a.is_nan() == b.is_nan()), "{what} went elsewhere");
        let there = |x: &f64| !x.is_nan();
        let found: Vec<f32> = caches[i].iter().copied().filter(|x| !x.is_nan()).collect();
        let wanted: Vec<f64> = wanted.into_iter().filter(there).collect();
        let rounding = |x: f64| if case.half { x.abs() / 2048.0 + 1e-7 } else { 0.0 };
        assert_close(what, &found, &wanted, |i| bound + rounding(wanted[i]));
    }
    let (again, caches_again) = run(device, case, &x);
    assert_same_bits("queries", &q, &again);
    for (first, again) in caches.iter().zip(&caches_again) {
        assert_same_bits("caches", first, again);
    }
}

/// The models' forms: plain, biased, normed, gated; each pairing, a whole head or part of it.
#[test]
fn heads_are_biased_normed_and_turned() {
    fn checks<D: Device>(device: &D) {
        let case = |n_head, n_head_kv, head_dim, n_rot, form: [bool; 5]| {
            let [adjacent, gated, biases, norms, half] = form;
            check(device, &Case { n_head, n_head_kv, head_dim, n_rot, adjacent, gated, biases, norms, half });
        };
        let (yes, no) = (true, false);
        case(4, 2, 256, 64, [no, yes, no, yes, yes]); // Qwen3.5 and 3.6
        case(3, 1, 64, 64, [yes, no, no, no, no]); // Llama
        case(4, 1, 128, 128, [no, no, no, yes, yes]); // Qwen3
        case(7, 1, 128, 128, [no, no, yes, no, no]); // Qwen2
        case(8, 1, 64, 64, [no, no, yes, no, yes]); // gpt-oss
        case(1, 1, 256, 256, [yes, yes, yes, yes, no]);
        case(2, 2, 20, 0, [no, no, yes, yes, no]);
    }
    on_devices!(checks);
}
