//! Paged attention: cache writes, splits, windows, sinks.

#![expect(unsafe_code, reason = "launches whose page tables live on the device")]

use half::f16;
use host::backend::{AttentionShape, PAGE_TOKENS};
use host::gpu::ops::{self, Attention, AttentionOut, KvSlice, MIN_SPAN_ROWS, Partials, Placement, Q8, Split};
use host::gpu::{Buffer, Device};

use super::{Output, Random, assert_close, assert_same_bits, input, on_devices, sigmoid, wide};

/// One sequence's query rows and the keys that it has.
struct Sequence {
    /// Positions of the query rows, the last of them the sequence's last.
    rows: Vec<u32>,
}

struct Case {
    shape: AttentionShape,
    sequences: Vec<Sequence>,
    n_split: u32,
    sinks: Option<Vec<f32>>,
    half: bool,
}

/// A case's inputs on the device. Pages are dealt in random order, and everything beyond a sequence's length
/// is NaN: one such key in a softmax spoils the row.
struct Setup<D: Device> {
    q: Vec<f32>,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    pos: Vec<u32>,
    span: Vec<u32>,
    page_table: Vec<u32>,
    max_pages: u32,
    first: Vec<u32>,
    span_rows: Vec<u32>,
    short: Vec<u32>,
    cache: (Cache<D>, Cache<D>),
}

enum Cache<D: Device> {
    F32(Buffer<D, f32>),
    F16(Buffer<D, u16>),
}

impl<D: Device> Cache<D> {
    fn slice(&self) -> KvSlice<'_> {
        match self {
            Cache::F32(b) => KvSlice::F32(b.slice()),
            Cache::F16(b) => KvSlice::F16(b.slice()),
        }
    }
}

fn setup<D: Device>(device: &D, case: &Case, random: &mut Random) -> Setup<D> {
    let shape = case.shape;
    let kv_dim = (shape.n_head_kv * shape.head_dim) as usize;
    let length = |s: &Sequence| s.rows.last().unwrap() + 1;
    let pages_of = |s: &Sequence| length(s).div_ceil(PAGE_TOKENS);
    let max_pages = case.sequences.iter().map(pages_of).max().unwrap() + 1;
    let n_pages: u32 = case.sequences.iter().map(pages_of).sum::<u32>() + 1;
    let mut free = random.permutation(n_pages);
    let mut page_table = vec![u32::MAX; case.sequences.len() * max_pages as usize];
    let (mut pos, mut span, mut keys, mut values) = (vec![], vec![], vec![], vec![]);
    let (mut first, mut span_rows, mut short) = (vec![], vec![], vec![]);
    for (s, sequence) in case.sequences.iter().enumerate() {
        for page in 0..pages_of(sequence) as usize {
            page_table[s * max_pages as usize + page] = free.pop().unwrap();
        }
        let (from, n) = (pos.len() as u32, sequence.rows.len() as u32);
        first.push(from);
        span_rows.push(n);
        short.extend((from..from + n).filter(|_| n < MIN_SPAN_ROWS));
        pos.extend(&sequence.rows);
        span.extend(vec![s as u32; sequence.rows.len()]);
        keys.push(random.units(length(sequence) as usize * kv_dim));
        values.push(random.units(length(sequence) as usize * kv_dim));
    }
    let fill = |of: &[Vec<f32>]| {
        let mut all = vec![f32::NAN; n_pages as usize * PAGE_TOKENS as usize * kv_dim];
        for (s, rows) in of.iter().enumerate() {
            for (t, row) in rows.chunks(kv_dim).enumerate() {
                let page = page_table[s * max_pages as usize + t / PAGE_TOKENS as usize] as usize;
                let token = page * PAGE_TOKENS as usize + t % PAGE_TOKENS as usize;
                all[token * kv_dim..][..kv_dim].copy_from_slice(row);
            }
        }
        if case.half {
            let bits: Vec<u16> = all.iter().map(|&x| f16::from_f32(x).to_bits()).collect();
            Cache::F16(input(device, &bits))
        } else {
            Cache::F32(input(device, &all))
        }
    };
    let cache = (fill(&keys), fill(&values));
    if case.half {
        for x in keys.iter_mut().chain(&mut values).flatten() {
            *x = f16::from_f32(*x).to_f32();
        }
    }
    let q = random.units(pos.len() * (shape.n_head * shape.head_dim) as usize);
    Setup { q, keys, values, pos, span, page_table, max_pages, first, span_rows, short, cache }
}

/// The result, and as `quantize_q8` gives it.
struct Found {
    out: Vec<f32>,
    q8: (Vec<i8>, Vec<f32>, Vec<f32>),
}

fn run<D: Device>(device: &D, case: &Case, setup: &Setup<D>) -> Vec<f32> {
    run_gated(device, case, setup, None).out
}

/// Rows that are not split have few heads a block, as in a model.
fn split(n: u32) -> Split {
    if n == 1 { Split { n, block_heads: 2 } } else { Split::new(n) }
}

/// With `pairs` of queries and gates.
fn run_gated<D: Device>(device: &D, case: &Case, setup: &Setup<D>, pairs: Option<&[f32]>) -> Found {
    let heads = setup.pos.len() * case.shape.n_head as usize;
    let n_split = case.n_split as usize;
    let part = Output::<D, f32>::new(device, heads * n_split * case.shape.head_dim as usize);
    let max_sum = Output::<D, f32>::new(device, heads * n_split * 2);
    let n = setup.q.len();
    let out = Output::new(device, n);
    let (qs, d, s) = (Output::new(device, n), Output::new(device, n / 16), Output::new(device, n / 16));
    let (q, pos, span) = (input(device, &setup.q), input(device, &setup.pos), input(device, &setup.span));
    let (first, span_rows) = (input(device, &setup.first), input(device, &setup.span_rows));
    let (page_table, short) = (input(device, &setup.page_table), input(device, &setup.short));
    let sinks = case.sinks.as_ref().map(|s| input(device, s));
    let pairs = pairs.map(|pairs| input(device, pairs));
    let op = Attention {
        q: ops::Queries::Ready(q.slice()),
        kv: (setup.cache.0.slice(), setup.cache.1.slice()),
        at: Placement {
            pos: pos.slice(),
            span: span.slice(),
            page_table: page_table.slice(),
            max_pages: setup.max_pages,
            first: first.slice(),
            span_rows: span_rows.slice(),
            short: short.slice(),
        },
        partials: Partials { out: part.slice(), max_sum: max_sum.slice(), split: split(case.n_split) },
        sinks: sinks.as_ref().map(Buffer::slice),
        shape: case.shape,
        dependent: true,
    };
    let cols = case.shape.n_head * case.shape.head_dim;
    let q8_wanted = pairs.is_some() && setup.short.len() == setup.pos.len();
    let q8 = q8_wanted.then(|| Q8 { qs: qs.slice(), d: d.slice(), s: s.slice(), cols });
    let to = AttentionOut { out: out.slice(), pairs: pairs.as_ref().map(Buffer::slice), q8 };
    // SAFETY: the page table names pages of the caches for every position.
    unsafe { ops::attention(device, &op, to).unwrap() };
    Found { out: out.read(device), q8: (qs.read(device), d.read(device), s.read(device)) }
}

/// The definition, in f64: softmax over the visible keys and the sink. With each output, `max_j scale·Σ|q·k[j]|`.
fn expected<D: Device>(case: &Case, setup: &Setup<D>) -> (Vec<f64>, Vec<f64>) {
    let AttentionShape { n_head, n_head_kv, head_dim, scale, window } = case.shape;
    let (d, kv_dim) = (head_dim as usize, (n_head_kv * head_dim) as usize);
    let (mut out, mut sizes) = (vec![], vec![]);
    for (row, (&pos, &span)) in setup.pos.iter().zip(&setup.span).enumerate() {
        let first = window.map_or(0, |w| (pos + 1).saturating_sub(w)) as usize;
        for head in 0..n_head as usize {
            let q = &setup.q[(row * n_head as usize + head) * d..][..d];
            let at = |t: usize| t * kv_dim + head / (n_head / n_head_kv) as usize * d;
            let (keys, values) = (&setup.keys[span as usize], &setup.values[span as usize]);
            let products = |t: usize| {
                q.iter().zip(&keys[at(t)..][..d]).map(|(&q, &k)| f64::from(q) * f64::from(k) * f64::from(scale))
            };
            let scores: Vec<f64> = (first..=pos as usize).map(|t| products(t).sum()).collect();
            let size = (first..=pos as usize).map(|t| products(t).map(f64::abs).sum::<f64>()).fold(0.0, f64::max);
            let sink = case.sinks.as_ref().map_or(f64::NEG_INFINITY, |s| f64::from(s[head]));
            let max = scores.iter().copied().fold(sink, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let sum: f64 = weights.iter().sum::<f64>() + (sink - max).exp();
            for e in 0..d {
                let weighted = |(i, w): (usize, &f64)| w * f64::from(values[at(first + i) + e]);
                out.push(weights.iter().enumerate().map(weighted).sum::<f64>() / sum);
                sizes.push(size);
            }
        }
    }
    (out, sizes)
}

/// Half a unit in the last place of f16, relative.
const F16_EPS: f64 = 1.0 / 2048.0;

fn check<D: Device>(device: &D, case: &Case) {
    let setup = setup(device, case, &mut Random::new(u64::from(case.shape.head_dim + case.n_split)));
    let actual = run(device, case, &setup);
    // Values are at most 1 and weights sum to 1; a score's error is that of a dot product of head_dim terms
    // below 1 times the scale, and moves its weight by as much; the sum over keys adds a tree's error.
    let exact = 1e-7 * (f64::from(case.shape.head_dim) * f64::from(case.shape.scale) + 16.0);
    // With f16, queries are rounded: a score moves by up to F16_EPS·scale·Σ|q·k|, its weight by as much relatively, and
    // the sum of weights too. Weights are rounded once more.
    let rounding = |size: f64| if case.half { F16_EPS * (2.0 * size + 1.0) } else { 0.0 };
    let (expected, sizes) = expected(case, &setup);
    let what = if case.half { "attention f16" } else { "attention" };
    assert_close(what, &actual, &expected, |i| exact + rounding(sizes[i]));
    assert_same_bits("attention", &actual, &run(device, case, &setup));
}

fn shape(n_head: u32, n_head_kv: u32, head_dim: u32, window: Option<u32>) -> AttentionShape {
    AttentionShape { n_head, n_head_kv, head_dim, scale: 1.0 / (head_dim as f32).sqrt(), window }
}

fn sequences(lengths: &[u32]) -> Vec<Sequence> {
    lengths.iter().map(|&n| Sequence { rows: vec![n - 1] }).collect()
}

/// Lengths around the lane groups, chunks, pages and splits; one row a sequence, many sequences.
#[test]
fn lengths_around_every_boundary() {
    fn checks<D: Device>(device: &D) {
        let lengths = [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 193, 257, 321];
        for (head_dim, n_head, n_head_kv) in [(64, 4, 2), (128, 4, 1), (256, 4, 1)] {
            for (n_split, half) in [(1, false), (3, false), (1, true), (3, true), (128, true)] {
                let shape = shape(n_head, n_head_kv, head_dim, None);
                check(device, &Case { shape, sequences: sequences(&lengths), n_split, sinks: None, half });
            }
        }
    }
    on_devices!(checks);
}

/// One block takes eight heads of a key head: fewer, as many, and more.
#[test]
fn query_heads_for_each_key_head() {
    fn checks<D: Device>(device: &D) {
        for (n_head, n_head_kv) in [(2, 2), (4, 2), (3, 1), (8, 2), (7, 1), (8, 1), (16, 2), (9, 1), (16, 1)] {
            for (n_split, half) in [(2, false), (2, true), (1, true)] {
                let shape = shape(n_head, n_head_kv, 64, None);
                let sequences = sequences(&[70, 200]);
                check(device, &Case { shape, sequences, n_split, sinks: None, half });
            }
        }
    }
    on_devices!(checks);
}

/// More splits than keys leaves some empty, which are not to be read. Windows end within chunks and across pages.
#[test]
fn empty_splits_windows_and_sinks() {
    fn checks<D: Device>(device: &D) {
        for window in [None, Some(1), Some(16), Some(17), Some(100), Some(128)] {
            for (n_split, half) in [(7, false), (7, true), (1, true)] {
                let case = Case {
                    shape: shape(8, 2, 64, window),
                    sequences: vec![
                        Sequence { rows: (0..5).collect() },
                        Sequence { rows: vec![126, 127, 128] },
                        Sequence { rows: vec![15, 16] },
                        Sequence { rows: vec![263] },
                    ],
                    n_split,
                    sinks: Some(vec![0.0, 1.5, -3.0, f32::NEG_INFINITY, 30.0, 0.1, -0.1, 2.0]),
                    half,
                };
                check(device, &case);
            }
        }
    }
    on_devices!(checks);
}

/// With q = 0 every key weighs the same, so the sink's share can be written down.
#[test]
fn the_sink_takes_its_share_of_the_denominator() {
    fn checks<D: Device>(device: &D) {
        let shares = [(1, 0.0, 0.5), (3, 0.0, 0.75), (1, 3f32.ln(), 0.25), (2, f32::NEG_INFINITY, 1.0)];
        for (length, sink, share) in shares {
            let case = Case {
                shape: shape(1, 1, 64, None),
                sequences: sequences(&[length]),
                n_split: 2,
                sinks: Some(vec![sink]),
                half: false,
            };
            let mut setup = setup(device, &case, &mut Random::new(3));
            setup.q.fill(0.0);
            let ones = |b: &Cache<D>| match b {
                Cache::F32(b) => device.upload(b.slice(), &vec![1.0; b.len()]).unwrap(),
                Cache::F16(_) => unreachable!("the case is f32"),
            };
            ones(&setup.cache.0);
            ones(&setup.cache.1);
            assert_close("share", &run(device, &case, &setup), &[share; 64], |_| 1e-6);
        }
    }
    on_devices!(checks);
}

/// Whole prompts and later chunks of them, at and around the sizes of tiles and pages, beside sequences of few rows.
#[test]
fn many_rows_of_a_sequence_go_through_tiles() {
    fn checks<D: Device>(device: &D) {
        let forms = [
            (64, 8, 1, None),
            (64, 2, 2, Some(16)),
            (64, 7, 1, Some(70)),
            (128, 4, 1, None),
            (128, 16, 1, Some(1)),
            (256, 8, 1, None),
            (256, 2, 1, Some(33)),
        ];
        for (i, (head_dim, n_head, n_head_kv, window)) in forms.into_iter().enumerate() {
            let sinks = (i % 3 == 0).then(|| (0..n_head).map(|h| h as f32 - 2.0).collect());
            let rows = |rows: std::ops::Range<u32>| Sequence { rows: rows.collect() };
            let sequences = vec![rows(0..64), rows(130..131), rows(33..98), rows(5..68), rows(63..130), rows(0..3)];
            let shape = shape(n_head, n_head_kv, head_dim, window);
            check(device, &Case { shape, sequences, n_split: 3, sinks, half: true });
        }
    }
    on_devices!(checks);
}

/// Tiles are gated as splits are.
#[test]
fn tiles_are_gated() {
    fn checks<D: Device>(device: &D) {
        let sequences = vec![Sequence { rows: (0..70).collect() }, Sequence { rows: vec![40] }];
        let case = Case { shape: shape(2, 1, 64, None), sequences, n_split: 1, sinks: None, half: true };
        let setup = setup(device, &case, &mut Random::new(5));
        let pairs: Vec<f32> = Random::new(6).units(2 * setup.q.len()).iter().map(|x| 6.0 * x).collect();
        let found = run_gated(device, &case, &setup, Some(&pairs)).out;
        let gates = pairs.chunks(64).skip(1).step_by(2).flatten();
        let gated = run(device, &case, &setup).into_iter().zip(gates);
        let wanted: Vec<f64> = gated.map(|(x, &gate)| f64::from(x) * sigmoid(f64::from(gate))).collect();
        assert_close("gated", &found, &wanted, |i| 1e-6 * wanted[i].abs() + 1e-9);
    }
    on_devices!(checks);
}

/// The gate is the second of each pair; the int8 form is that of the gated result.
#[test]
fn results_are_gated_and_quantised() {
    fn checks<D: Device>(device: &D) {
        let forms = [(64, 3, 1), (128, 2, 1), (256, 2, 2)];
        for ((head_dim, n_head, n_head_kv), n_split) in forms.into_iter().flat_map(|form| [(form, 1), (form, 2)]) {
            let case = Case {
                shape: shape(n_head, n_head_kv, head_dim, None),
                sequences: sequences(&[3, 150]),
                n_split,
                sinks: None,
                half: true,
            };
            let setup = setup(device, &case, &mut Random::new(5));
            let pairs: Vec<f32> = Random::new(6).units(2 * setup.q.len()).iter().map(|x| 6.0 * x).collect();
            let found = run_gated(device, &case, &setup, Some(&pairs));
            let d = head_dim as usize;
            let gates = pairs.chunks(d).skip(1).step_by(2).flatten();
            let gated = run(device, &case, &setup).into_iter().zip(gates);
            let wanted: Vec<f64> = gated.map(|(x, &gate)| f64::from(x) * sigmoid(f64::from(gate))).collect();
            assert_close("gated", &found.out, &wanted, |i| 1e-6 * wanted[i].abs() + 1e-9);
            let (qs, scales, sums) = &found.q8;
            for (block, x) in found.out.chunks(16).enumerate() {
                let max = x.iter().fold(0.0f32, |max, x| max.max(x.abs()));
                assert_eq!(scales[block], max / 127.0);
                for (i, x) in x.iter().enumerate() {
                    let back = f64::from(qs[16 * block + i]) * f64::from(scales[block]);
                    assert!((back - f64::from(*x)).abs() <= 0.501 * f64::from(scales[block]));
                }
            }
            let sum = |(qs, scale): (&[i8], &f32)| qs.iter().map(|&q| i32::from(q)).sum::<i32>() as f32 * scale;
            let wanted: Vec<f32> = qs.chunks(16).zip(scales).map(sum).collect();
            assert_close("sums", sums, &wide(&wanted), |_| 1e-6);
        }
    }
    on_devices!(checks);
}

/// What a block makes of all keys is what the merge makes of one split, to the bit: with sinks, gates and the int8 form.
#[test]
fn one_split_needs_no_merge() {
    fn checks<D: Device>(device: &D) {
        for (head_dim, n_head, n_head_kv) in [(64, 3, 1), (128, 8, 2), (256, 10, 1)] {
            let found = |n_split| {
                let sinks = (0..n_head).map(|head| head as f32 - 1.0).collect();
                let shape = shape(n_head, n_head_kv, head_dim, None);
                // A split has 64 keys at least: the second of two is empty.
                let sequences = sequences(&[1, 17, 64]);
                let case = Case { shape, sequences, n_split, sinks: Some(sinks), half: true };
                let setup = setup(device, &case, &mut Random::new(7));
                let pairs: Vec<f32> = Random::new(8).units(2 * setup.q.len()).iter().map(|x| 6.0 * x).collect();
                run_gated(device, &case, &setup, Some(&pairs))
            };
            let (alone, merged) = (found(1), found(2));
            assert_same_bits("attention", &alone.out, &merged.out);
            assert_eq!(alone.q8.0, merged.q8.0, "integers");
            assert_same_bits("scales", &alone.q8.1, &merged.q8.1);
            assert_same_bits("sums", &alone.q8.2, &merged.q8.2);
        }
    }
    on_devices!(checks);
}

#[test]
fn keys_and_values_go_to_their_pages() {
    fn checks<D: Device>(device: &D) {
        for (kv_dim, half) in [(64usize, false), (200, true), (1, false)] {
            let (pos, span) = ([63u32, 64, 5, 200], [1u32, 1, 0, 0]);
            let page_table = [4u32, u32::MAX, u32::MAX, 0, 2, 3, u32::MAX, u32::MAX];
            let mut random = Random::new(9);
            let (k, v) = (random.units(4 * kv_dim), random.units(4 * kv_dim));
            let len = 5 * PAGE_TOKENS as usize * kv_dim;
            let (pos_in, span_in, table) = (input(device, &pos), input(device, &span), input(device, &page_table));
            let (first, span_rows) = (input(device, &[0u32, 2]), input(device, &[2u32, 2]));
            let short = input(device, &[0u32, 1, 2, 3]);
            let at = Placement {
                pos: pos_in.slice(),
                span: span_in.slice(),
                page_table: table.slice(),
                max_pages: 4,
                first: first.slice(),
                span_rows: span_rows.slice(),
                short: short.slice(),
            };
            let (k_in, v_in) = (input(device, &k), input(device, &v));
            let expected = |x: &[f32]| {
                let mut all = vec![f32::NAN; len];
                for row in 0..4 {
                    let page = page_table[(span[row] * 4 + pos[row] / PAGE_TOKENS) as usize];
                    let to = (page * PAGE_TOKENS + pos[row] % PAGE_TOKENS) as usize * kv_dim;
                    all[to..to + kv_dim].copy_from_slice(&x[row * kv_dim..][..kv_dim]);
                }
                all
            };
            let same = |a: f32, b: f32| a == b || (a.is_nan() && b.is_nan());
            // SAFETY: the table names one of five pages for every position.
            unsafe {
                if half {
                    let (kc, vc) = (Output::<D, u16>::new(device, len), Output::<D, u16>::new(device, len));
                    let to = (KvSlice::F16(kc.slice()), KvSlice::F16(vc.slice()));
                    ops::kv_cache_write(device, k_in.slice(), v_in.slice(), at, to, kv_dim as u32).unwrap();
                    for (cache, x) in [(kc, &k), (vc, &v)] {
                        for (a, e) in cache.read(device).iter().zip(expected(x)) {
                            assert!(same(f16::from_bits(*a).to_f32(), f16::from_f32(e).to_f32()));
                        }
                    }
                } else {
                    let (kc, vc) = (Output::<D, f32>::new(device, len), Output::<D, f32>::new(device, len));
                    let to = (KvSlice::F32(kc.slice()), KvSlice::F32(vc.slice()));
                    ops::kv_cache_write(device, k_in.slice(), v_in.slice(), at, to, kv_dim as u32).unwrap();
                    for (cache, x) in [(kc, &k), (vc, &v)] {
                        assert!(cache.read(device).iter().zip(expected(x)).all(|(&a, e)| same(a, e)));
                    }
                }
            }
        }
    }
    on_devices!(checks);
}
