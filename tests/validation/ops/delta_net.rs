//! The gated delta net and its recurrent state.

use host::backend::{Backend, CacheShape, DeltaNetShape, L2_NORM_EPS, LayerCache};

use super::{Bench, Machine, assert_close, f32s, noise, sequence};

fn shape(n_head_k: u32, n_head_v: u32, d_state: u32) -> DeltaNetShape {
    DeltaNetShape { n_head_k, n_head_v, d_state, d_conv: 4 }
}

fn cache_shape(shape: &DeltaNetShape, n_slots: u32) -> CacheShape {
    let (conv_dim, d_conv) = (shape.conv_dim(), shape.d_conv);
    let state = shape.n_head_v * shape.d_state * shape.d_state;
    CacheShape { layers: vec![LayerCache::Recurrent { conv_dim, d_conv, state }], n_pages: 1, n_slots }
}

/// Inputs of `rows` tokens.
struct Case {
    shape: DeltaNetShape,
    /// `[rows, conv_dim]`.
    qkv: Vec<f32>,
    /// `[rows, n_head_v]`.
    alpha: Vec<f32>,
    beta: Vec<f32>,
    /// `[n_head_v]`.
    dt_bias: Vec<f32>,
    a: Vec<f32>,
}

impl Case {
    fn random(shape: DeltaNetShape, rows: usize) -> Case {
        let heads = shape.n_head_v as usize;
        Case {
            qkv: noise(1, rows * shape.conv_dim() as usize),
            alpha: noise(2, rows * heads).iter().map(|x| 4.0 * x).collect(),
            beta: noise(3, rows * heads).iter().map(|x| 4.0 * x).collect(),
            dt_bias: noise(4, heads),
            a: noise(5, heads).iter().map(|x| -x.abs()).collect(),
            shape,
        }
    }

    /// Runs the tokens in batches that end at `ends`.
    fn run<M: Machine>(&self, ends: &[usize]) -> Vec<f32> {
        let (conv_dim, heads) = (self.shape.conv_dim() as usize, self.shape.n_head_v as usize);
        let rows = self.qkv.len() / conv_dim;
        let mut bench = Bench::<M>::new(&[
            f32s("qkv", &[conv_dim, rows], &self.qkv),
            f32s("alpha", &[heads, rows], &self.alpha),
            f32s("beta", &[heads, rows], &self.beta),
            f32s("dt", &[heads], &self.dt_bias),
            f32s("a", &[heads], &self.a),
        ]);
        let mut cache = bench.b.cache(&cache_shape(&self.shape, 1)).expect("allocated");
        let (dt_bias, a) = (bench.vector("dt"), bench.vector("a"));
        let mut all = Vec::new();
        let mut start = 0;
        for &end in ends {
            let ids: Vec<u32> = (start as u32..end as u32).collect();
            let [qkv, alpha, beta] = [("qkv", conv_dim), ("alpha", heads), ("beta", heads)]
                .map(|(name, cols)| bench.rows_at(name, &ids, cols));
            let batch = bench.batch(&sequence(start, ids.len()));
            let mut out = bench.zeros(ids.len(), self.shape.d_inner() as usize);
            let (dt_bias, a) = (Some(&dt_bias), Some(&a));
            bench
                .b
                .ssm_delta_net(&mut out, &qkv, &alpha, &beta, dt_bias, a, &mut cache, 0, &self.shape, &batch)
                .expect("run");
            all.extend(bench.read(&out, ids.len()));
            start = end;
        }
        all
    }

    /// The definition, in f64.
    fn definition(&self) -> Vec<f64> {
        let (n_head_k, heads) = (self.shape.n_head_k as usize, self.shape.n_head_v as usize);
        let d = self.shape.d_state as usize;
        let mut states = vec![vec![0.0; d * d]; heads];
        let mut out = Vec::new();
        for (m, qkv) in self.qkv.chunks(self.shape.conv_dim() as usize).enumerate() {
            let head = |i: usize| -> Vec<f64> { qkv[i * d..][..d].iter().map(|x| f64::from(*x)).collect() };
            let unit = |x: Vec<f64>| -> Vec<f64> {
                let norm = (x.iter().map(|x| x * x).sum::<f64>() + f64::from(L2_NORM_EPS)).sqrt();
                x.into_iter().map(|x| x / norm).collect()
            };
            for (h, state) in states.iter_mut().enumerate() {
                let (q, k) = (unit(head(h % n_head_k)), unit(head(n_head_k + h % n_head_k)));
                let v = head(2 * n_head_k + h);
                let at = m * heads + h;
                let g = (1.0 + f64::from(self.alpha[at] + self.dt_bias[h]).exp()).ln() * f64::from(self.a[h]);
                let beta = 1.0 / (1.0 + (-f64::from(self.beta[at])).exp());
                for (row, v) in state.chunks_mut(d).zip(v) {
                    row.iter_mut().for_each(|s| *s *= g.exp());
                    let seen: f64 = row.iter().zip(&k).map(|(s, k)| s * k).sum();
                    row.iter_mut().zip(&k).for_each(|(s, k)| *s += beta * (v - seen) * k);
                    out.push(row.iter().zip(&q).map(|(s, q)| s * q).sum::<f64>() / (d as f64).sqrt());
                }
            }
        }
        out
    }
}

/// B23: converters permute the value heads.
pub(super) fn value_head_h_goes_with_key_head_h_mod_n_head_k<M: Machine>() {
    let d = 64;
    let unit = |lane: usize| (0..d).map(move |i| if i == lane { 1.0 } else { 0.0 });
    // q0 = e0, q1 = e1, k0 = k1 = e0, all values 1; decay 1 and step size 1.
    let qkv = unit(0).chain(unit(1)).chain(unit(0)).chain(unit(0)).chain(std::iter::repeat_n(1.0, 4 * d)).collect();
    let shape = shape(2, 4, d as u32);
    let case = Case { shape, qkv, alpha: vec![0.0; 4], beta: vec![40.0; 4], dt_bias: vec![0.0; 4], a: vec![0.0; 4] };
    let wanted: Vec<f64> = [1.0, 0.0, 1.0, 0.0].iter().flat_map(|o| vec![o / (d as f64).sqrt(); d]).collect();
    assert_close("one step", &case.run::<M>(&[1]), &wanted, |_| 1e-6);
}

pub(super) fn the_delta_rule_equals_the_definition<M: Machine>() {
    for (shape, rows, ends) in [
        (shape(2, 4, 64), 9, vec![9]),
        (shape(2, 4, 64), 9, vec![1, 2, 7, 9]),
        (shape(3, 3, 128), 5, vec![4, 5]),
        (shape(16, 32, 128), 3, vec![2, 3]),
    ] {
        let case = Case::random(shape, rows);
        // And a token so small that the epsilon of the norms shows.
        let conv_dim = shape.conv_dim() as usize;
        let qkv = case.qkv.iter().enumerate().map(|(i, x)| if i / conv_dim == 1 { 1e-3 * x } else { *x }).collect();
        let case = Case { qkv, ..case };
        // Some gates so extreme that a careless softplus overflows.
        let case = Case { dt_bias: case.dt_bias.iter().map(|b| if *b > 0.9 { 100.0 } else { *b }).collect(), ..case };
        assert_close(&format!("{shape:?}, batches to {ends:?}"), &case.run::<M>(&ends), &case.definition(), |_| 2e-6);
    }
}

/// Runs a convolution over `x` in batches that end at `ends`; after the first of them slot 0 goes to slot 1 and
/// back, with other tokens in between.
fn convolved<M: Machine>(shape: &DeltaNetShape, x: &[f32], w: &[f32], ends: &[usize], detour: bool) -> Vec<f32> {
    let conv_dim = shape.conv_dim() as usize;
    let tensors = [f32s("x", &[conv_dim, x.len() / conv_dim], x), f32s("w", &[shape.d_conv as usize, conv_dim], w)];
    let mut bench = Bench::<M>::new(&tensors);
    let taps = bench.vector("w");
    let mut cache = bench.b.cache(&cache_shape(shape, 2)).expect("allocated");
    let mut all = Vec::new();
    let mut start = 0;
    for &end in ends {
        let ids: Vec<u32> = (start as u32..end as u32).collect();
        let rows = bench.rows_at("x", &ids, conv_dim);
        let batch = bench.batch(&sequence(start, ids.len()));
        let mut out = bench.zeros(ids.len(), conv_dim);
        if detour && start > 0 {
            bench.b.copy_state(&mut cache, 0, 1).expect("copied");
            bench.b.ssm_conv1d(&mut out, &rows, &taps, &mut cache, 0, shape, &batch).expect("run");
            bench.b.copy_state(&mut cache, 1, 0).expect("copied");
        }
        bench.b.ssm_conv1d(&mut out, &rows, &taps, &mut cache, 0, shape, &batch).expect("run");
        all.extend(bench.read(&out, ids.len()));
        start = end;
    }
    all
}

pub(super) fn the_convolution_continues_across_batches<M: Machine>() {
    let shape = shape(2, 4, 32);
    let conv_dim = shape.conv_dim() as usize;
    let (rows, x, w) = (9, noise(6, 9 * conv_dim), noise(7, 4 * conv_dim));
    let value = |t: usize, c: usize| {
        let tap =
            |j: usize| (t + j).checked_sub(3).map_or(0.0, |t| f64::from(x[t * conv_dim + c]) * f64::from(w[c * 4 + j]));
        let sum: f64 = (0..4).map(tap).sum();
        sum / (1.0 + (-sum).exp())
    };
    let wanted: Vec<f64> = (0..rows * conv_dim).map(|i| value(i / conv_dim, i % conv_dim)).collect();
    for ends in [vec![9], vec![1, 2, 3, 4, 9], vec![2, 9]] {
        assert_close(&format!("batches to {ends:?}"), &convolved::<M>(&shape, &x, &w, &ends, false), &wanted, |_| 2e-6);
    }
}

pub(super) fn a_copied_state_continues_like_the_original<M: Machine>() {
    let shape = shape(2, 4, 32);
    let conv_dim = shape.conv_dim() as usize;
    let (x, w) = (noise(8, 7 * conv_dim), noise(9, 4 * conv_dim));
    let ends = [2, 4, 7];
    let (straight, detour) =
        (convolved::<M>(&shape, &x, &w, &ends, false), convolved::<M>(&shape, &x, &w, &ends, true));
    assert_eq!(straight, detour);
}

pub(super) fn the_gated_norm_is_per_head<M: Machine>() {
    let (d, heads, rows, eps) = (64, 3, 2, 1e-6);
    let (x, z, w) = (noise(10, rows * heads * d), noise(11, rows * heads * d), noise(12, d));
    let cols = heads * d;
    let tensors = [f32s("x", &[cols, rows], &x), f32s("z", &[cols, rows], &z), f32s("w", &[d], &w)];
    let mut bench = Bench::<M>::new(&tensors);
    let (mut out, gate, norm) = (bench.rows("x"), bench.rows("z"), bench.vector("w"));
    let batch = bench.batch(&sequence(0, rows));
    bench.b.ssm_gated_norm(&mut out, &gate, &norm, eps, &batch).expect("normed");
    let value = |i: usize| {
        let head = &x[i / d * d..][..d];
        let mean = head.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / d as f64;
        let z = f64::from(z[i]);
        f64::from(x[i]) / (mean + f64::from(eps)).sqrt() * f64::from(w[i % d]) * z / (1.0 + (-z).exp())
    };
    let wanted: Vec<f64> = (0..rows * cols).map(value).collect();
    assert_close("gated norm", &bench.read(&out, rows), &wanted, |_| 2e-6);
}
