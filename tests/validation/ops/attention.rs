//! Attention, its cache, its position embedding and its output gate.

use host::backend::{AttentionShape, Backend, CacheShape, LayerCache, PAGE_TOKENS, Pairing, Rope};

use super::{Bench, Machine, Made, assert_close, f32s, noise, sequence};

const HEAD_DIM: usize = 64;

/// B25: gates lie beside their heads' queries.
pub(super) fn queries_and_gates_are_interleaved_per_head<M: Machine>() {
    // Head 0 has gate +30, head 1 has −30.
    let q = noise(1, 2 * HEAD_DIM);
    let gates = [[30.0; HEAD_DIM], [-30.0; HEAD_DIM]];
    let qg = [&q[..HEAD_DIM], &gates[0], &q[HEAD_DIM..], &gates[1]].concat();
    let mut bench = Bench::<M>::new(&[f32s("qg", &[4 * HEAD_DIM, 1], &qg)]);
    let qg = bench.rows("qg");
    let batch = bench.batch(&sequence(0, 1));
    let (mut x, mut gate) = (bench.zeros(1, 2 * HEAD_DIM), bench.zeros(1, 2 * HEAD_DIM));
    bench.b.split_gate(&mut x, &mut gate, &qg, HEAD_DIM as u32, &batch).expect("split");
    assert_eq!(bench.read(&x, 1), q);
    assert_eq!(bench.read(&gate, 1), gates.concat());
    bench.b.sigmoid_mul(&mut x, &gate, &batch).expect("gated");
    let wanted: Vec<f64> = (0..2 * HEAD_DIM).map(|i| if i < HEAD_DIM { f64::from(q[i]) } else { 0.0 }).collect();
    assert_close("gated", &bench.read(&x, 1), &wanted, |i| if i < HEAD_DIM { 1e-6 } else { 1e-9 });
}

fn rope(n_rot: usize, pairing: Pairing, magnitude: f32) -> Rope {
    let inv_freq = (0..n_rot / 2).map(|i| 150_000f64.powf(-2.0 * i as f64 / n_rot as f64)).collect();
    Rope { n_rot: n_rot as u32, pairing, inv_freq, magnitude }
}

/// One row of `n_head` heads at `position`, before and after.
fn turned<M: Machine>(head_dim: usize, n_head: usize, rope: &Rope, position: usize) -> (Vec<f32>, Vec<f32>) {
    let x = noise(2, n_head * head_dim);
    let mut bench = Bench::<M>::new(&[f32s("x", &[x.len(), 1], &x)]);
    let mut out = bench.rows("x");
    let batch = bench.batch(&sequence(position, 1));
    bench.b.rope(&mut out, head_dim as u32, rope, &batch).expect("turned");
    (x, bench.read(&out, 1))
}

/// B25: only the first `rope.dimension_count` lanes turn.
pub(super) fn lanes_beyond_n_rot_do_not_turn<M: Machine>() {
    let rope = rope(64, Pairing::SplitHalf, 1.0);
    let (_, at_start) = turned::<M>(256, 2, &rope, 0);
    let (_, later) = turned::<M>(256, 2, &rope, 1000);
    for head in [0, 256] {
        assert_eq!(at_start[head + 64..head + 256], later[head + 64..head + 256]);
        assert_ne!(at_start[head..head + 64], later[head..head + 64]);
    }
}

pub(super) fn pairs_turn_by_position_times_frequency<M: Machine>() {
    for pairing in [Pairing::Adjacent, Pairing::SplitHalf] {
        for position in [0, 1, 63, 6000, 1_000_003] {
            let rope = rope(HEAD_DIM, pairing, 1.34657);
            let (x, found) = turned::<M>(HEAD_DIM, 3, &rope, position);
            let mut wanted: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
            for head in wanted.chunks_mut(HEAD_DIM) {
                for (i, inv_freq) in rope.inv_freq.iter().enumerate() {
                    let (a, b) = match pairing {
                        Pairing::Adjacent => (2 * i, 2 * i + 1),
                        Pairing::SplitHalf => (i, i + HEAD_DIM / 2),
                    };
                    let (sin, cos) = (position as f64 * inv_freq).sin_cos();
                    let (x, y, m) = (head[a], head[b], f64::from(rope.magnitude));
                    (head[a], head[b]) = ((x * cos - y * sin) * m, (x * sin + y * cos) * m);
                }
            }
            // Values are at most √2·1.35; sines and angles within [−π, π) are off by a few 1e-7, wherever the position.
            assert_close(&format!("{pairing:?} at {position}"), &found, &wanted, |_| 2e-6);
        }
    }
}

/// A sequence's keys and values in a cache, and the query heads that read them.
struct Case {
    shape: AttentionShape,
    /// `[rows, n_head_kv·head_dim]`.
    k: Vec<f32>,
    v: Vec<f32>,
    /// `[n_queries, n_head·head_dim]`, of the last positions.
    q: Vec<f32>,
    sinks: Option<Vec<f32>>,
}

impl Case {
    fn len(&self) -> usize {
        self.k.len() / (self.shape.n_head_kv * self.shape.head_dim) as usize
    }

    /// Writes NaN to all of the cache, then the keys and values, and attends.
    fn run<M: Machine>(&self) -> Vec<f32> {
        let (len, pages) = (self.len(), self.len() / PAGE_TOKENS as usize + 2);
        let capacity = pages * PAGE_TOKENS as usize;
        let (kv_dim, q_dim) = (self.k.len() / len, (self.shape.n_head * self.shape.head_dim) as usize);
        let n_queries = self.q.len() / q_dim;
        let mut tensors: Vec<Made> = vec![
            f32s("nan", &[kv_dim, capacity], &vec![f32::NAN; kv_dim * capacity]),
            f32s("k", &[kv_dim, len], &self.k),
            f32s("v", &[kv_dim, len], &self.v),
            f32s("q", &[q_dim, n_queries], &self.q),
        ];
        tensors.extend(self.sinks.as_ref().map(|sinks| f32s("sinks", &[sinks.len()], sinks)));
        let mut bench = Bench::<M>::new(&tensors);
        let layers = vec![LayerCache::Kv { kv_dim: kv_dim as u32 }];
        let shape = CacheShape { layers, n_pages: pages as u32, n_slots: 1 };
        let mut cache = bench.b.cache(&shape).expect("allocated");
        let nan = bench.rows("nan");
        let everywhere = bench.batch(&sequence(0, capacity));
        bench.b.kv_write(&mut cache, 0, &nan, &nan, &everywhere).expect("written");
        let (k, v, q) = (bench.rows("k"), bench.rows("v"), bench.rows("q"));
        let sinks = self.sinks.as_ref().map(|_| bench.vector("sinks"));
        let written = bench.batch(&sequence(0, len));
        bench.b.kv_write(&mut cache, 0, &k, &v, &written).expect("written");
        let batch = bench.batch(&sequence(len - n_queries, n_queries));
        let mut out = bench.zeros(n_queries, q_dim);
        bench.b.attention(&mut out, &q, &cache, 0, &self.shape, sinks.as_ref(), &batch).expect("attended");
        bench.read(&out, n_queries)
    }

    /// The definition, in f64.
    fn definition(&self) -> Vec<f64> {
        let AttentionShape { n_head, n_head_kv, head_dim, scale, window } = self.shape;
        let (n_head, n_head_kv, head_dim) = (n_head as usize, n_head_kv as usize, head_dim as usize);
        let n_queries = self.q.len() / (n_head * head_dim);
        let mut out = Vec::new();
        for (i, q) in self.q.chunks(head_dim).enumerate() {
            let (position, h) = (self.len() - n_queries + i / n_head, i % n_head);
            let first = window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
            let head = |x: &'_ [f32], t: usize| -> Vec<f64> {
                let at = (t * n_head_kv + h / (n_head / n_head_kv)) * head_dim;
                x[at..at + head_dim].iter().map(|x| f64::from(*x)).collect()
            };
            let score =
                |t| f64::from(scale) * head(&self.k, t).iter().zip(q).map(|(k, q)| k * f64::from(*q)).sum::<f64>();
            let scores: Vec<f64> = (first..=position).map(score).collect();
            let sink = self.sinks.as_ref().map(|sinks| f64::from(sinks[h]));
            let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().copied().chain(sink).map(|s| (s - max).exp()).sum();
            let mut head_out = vec![0.0; head_dim];
            for (t, s) in (first..).zip(&scores) {
                let p = (s - max).exp() / sum;
                head_out.iter_mut().zip(head(&self.v, t)).for_each(|(out, v)| *out += p * v);
            }
            out.extend(head_out);
        }
        out
    }
}

fn one_head(window: Option<u32>) -> AttentionShape {
    AttentionShape { n_head: 1, n_head_kv: 1, head_dim: HEAD_DIM as u32, scale: 0.125, window }
}

/// All scores equal `score`, all values 1, one query.
fn flat(len: usize, score: f32, sink: f32) -> Case {
    let (one, rows) = (vec![1.0; HEAD_DIM], len * HEAD_DIM);
    let k = vec![score / (0.125 * HEAD_DIM as f32); rows];
    Case { shape: one_head(None), k, v: vec![1.0; rows], q: one, sinks: Some(vec![sink]) }
}

/// B28: sinks.
pub(super) fn the_sink_joins_the_denominator_only<M: Machine>() {
    let cases = [
        (1, 0.0, 0.0, 0.5),
        (3, 0.0, 0.0, 0.75),
        (1, 0.0, 3f32.ln(), 0.25),
        (5, 0.0, f32::NEG_INFINITY, 1.0),
        (4, -1e4, 0.0, 0.0),
        (700, 0.0, 0.0, 700.0 / 701.0),
    ];
    for (len, score, sink, wanted) in cases {
        let found = flat(len, score, sink).run::<M>();
        assert_close(&format!("{len} keys, sink {sink}"), &found, &[wanted; HEAD_DIM], |_| 2e-6);
    }
}

/// B28: windows.
pub(super) fn a_window_hides_the_key_at_its_distance<M: Machine>() {
    for (window, len, sees_first) in [(Some(128), 128, true), (Some(128), 129, false), (None, 129, true)] {
        let (k, v) = (noise(3, len * HEAD_DIM), noise(4, len * HEAD_DIM));
        let case = |k, v| Case { shape: one_head(window), k, v, q: noise(5, HEAD_DIM), sinks: None };
        let before = case(k.clone(), v.clone()).run::<M>();
        let (mut other_k, mut other_v) = (k, v);
        other_k[..HEAD_DIM].fill(0.5);
        other_v[..HEAD_DIM].fill(50.0);
        let after = case(other_k, other_v).run::<M>();
        assert_eq!(before != after, sees_first, "window {window:?}, {len} positions");
    }
}

/// B31: what lies past the length does not count.
pub(super) fn nothing_beyond_the_length_is_read<M: Machine>() {
    for len in [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 640] {
        let (k, q) = (noise(6, len * HEAD_DIM), noise(7, HEAD_DIM));
        let case = Case { shape: one_head(None), k, v: vec![1.0; len * HEAD_DIM], q, sinks: None };
        assert_close(&format!("{len} positions"), &case.run::<M>(), &[1.0; HEAD_DIM], |_| 1e-5);
    }
}

pub(super) fn attention_equals_the_definition<M: Machine>() {
    for (n_head, n_head_kv, head_dim) in [(8, 2, 64), (3, 1, 64), (4, 4, 128), (4, 2, 256)] {
        for (len, n_queries, window, sinks) in
            [(1, 1, None, true), (70, 70, None, false), (131, 5, Some(16), true), (300, 1, None, true)]
        {
            let shape = AttentionShape { n_head, n_head_kv, head_dim, scale: 1.0 / (head_dim as f32).sqrt(), window };
            let (kv_dim, q_dim) = ((n_head_kv * head_dim) as usize, (n_head * head_dim) as usize);
            let case = Case {
                shape,
                k: noise(8, len * kv_dim),
                v: noise(9, len * kv_dim),
                q: noise(10, n_queries * q_dim).iter().map(|q| 3.0 * q).collect(),
                sinks: sinks.then(|| noise(11, n_head as usize)),
            };
            let what = format!("{n_head} heads of {head_dim}, {n_queries} queries of {len}, window {window:?}");
            assert_close(&what, &case.run::<M>(), &case.definition(), |_| 1e-5);
        }
    }
}
