//! The gated delta net: convolution, recurrence with its final state, gated norm.

#![expect(unsafe_code, reason = "launches whose spans live on the device")]

use host::backend::DeltaNetShape;
use host::gpu::ops::{self, Decay, Spans};
use host::gpu::{Buffer, Device};

use super::{EPS, Output, Random, assert_close, assert_same_bits, input, on_devices, sigmoid};

/// Spans of a batch: slot, first row, rows, start.
struct Batch {
    spans: Vec<[u32; 4]>,
    n_slots: usize,
}

impl Batch {
    fn rows(&self) -> usize {
        self.spans.iter().map(|s| s[2] as usize).sum()
    }
    /// The four arrays on the device.
    fn upload<D: Device>(&self, device: &D) -> [Buffer<D, u32>; 4] {
        [0, 1, 2, 3].map(|field| input(device, &self.spans.iter().map(|s| s[field]).collect::<Vec<_>>()))
    }
}

fn spans<D: Device>(arrays: &[Buffer<D, u32>; 4]) -> Spans<'_> {
    let [slot, first, rows, start] = arrays;
    Spans { slot: slot.slice(), first: first.slice(), rows: rows.slice(), start: start.slice() }
}

/// A sequence that goes on, one that begins, one with a single token; slots out of order, one unused.
fn batch() -> Batch {
    Batch { spans: vec![[2, 0, 9, 17], [0, 9, 6, 0], [3, 15, 1, 4]], n_slots: 4 }
}

#[test]
fn the_convolution_rolls_its_state() {
    fn check<D: Device>(device: &D) {
        let shape = DeltaNetShape { n_head_k: 1, n_head_v: 3, d_state: 33, d_conv: 4 };
        let (c, batch) = (shape.conv_dim() as usize, batch());
        let mut random = Random::new(11);
        let (x, w) = (random.units(batch.rows() * c), random.units(c * 4));
        let before = random.units(batch.n_slots * 3 * c);

        let (mut out, mut state) = (vec![0.0; x.len()], before.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
        for &[slot, first, rows, start] in &batch.spans {
            for ch in 0..c {
                let at = |j: usize| (slot as usize * 3 + j) * c + ch;
                let mut seen: Vec<f64> =
                    (0..3).map(|j| if start == 0 { 0.0 } else { f64::from(before[at(j)]) }).collect();
                for row in first..first + rows {
                    seen.push(f64::from(x[row as usize * c + ch]));
                    let taps = seen[seen.len() - 4..].iter().zip(&w[ch * 4..][..4]);
                    let sum: f64 = taps.map(|(x, &w)| x * f64::from(w)).sum();
                    out[row as usize * c + ch] = sum * sigmoid(sum);
                }
                for j in 0..3 {
                    state[at(j)] = seen[seen.len() - 3 + j];
                }
            }
        }
        let arrays = batch.upload(device);
        let (x_in, w_in) = (input(device, &x), input(device, &w));
        let (out_dev, state_dev) = (Output::new(device, x.len()), Output::holding(device, &before));
        // SAFETY: rows and slots are those of the batch.
        unsafe {
            ops::ssm_conv1d(
                device,
                x_in.slice(),
                w_in.slice(),
                state_dev.slice(),
                spans(&arrays),
                out_dev.slice(),
                &shape,
            )
            .unwrap();
        }
        // Four products below 1.
        assert_close("ssm_conv1d", &out_dev.read(device), &out, |i| 4e-7 + 1e-6 * out[i].abs());
        assert_close("ssm_conv1d state", &state_dev.read(device), &state, |_| 0.0);
    }
    on_devices!(check);
}

struct Delta {
    shape: DeltaNetShape,
    qkv: Vec<f32>,
    alpha: Vec<f32>,
    beta: Vec<f32>,
    dt_bias: Option<Vec<f32>>,
    a: Option<Vec<f32>>,
    state: Vec<f32>,
}

impl Delta {
    fn random(shape: DeltaNetShape, batch: &Batch, random: &mut Random, optional: bool) -> Self {
        let (rows, heads, d) = (batch.rows(), shape.n_head_v as usize, shape.d_state as usize);
        Delta {
            shape,
            qkv: random.units(rows * shape.conv_dim() as usize),
            // Strong and weak decay: g from about −8 to 0.
            alpha: random.units(rows * heads).iter().map(|x| 6.0 * x - 3.0).collect(),
            beta: random.units(rows * heads).iter().map(|x| 3.0 * x).collect(),
            dt_bias: optional.then(|| random.units(heads)),
            a: optional.then(|| random.units(heads).iter().map(|x| -1.05 - x).collect()),
            state: random.units(batch.n_slots * heads * d * d),
        }
    }

    /// The definition, token by token, in f64: outputs and final states.
    fn expected(&self, batch: &Batch) -> (Vec<f64>, Vec<f64>) {
        let DeltaNetShape { n_head_k, n_head_v, d_state, .. } = self.shape;
        let (hk, hv, d) = (n_head_k as usize, n_head_v as usize, d_state as usize);
        let conv = self.shape.conv_dim() as usize;
        let mut states: Vec<f64> = self.state.iter().map(|&x| f64::from(x)).collect();
        let mut out = vec![0.0; batch.rows() * hv * d];
        let normalised = |x: &[f32]| -> Vec<f64> {
            let norm = (x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() + 1e-6).sqrt();
            x.iter().map(|&x| f64::from(x) / norm).collect()
        };
        for &[slot, first, rows, start] in &batch.spans {
            for h in 0..hv {
                let s = &mut states[(slot as usize * hv + h) * d * d..][..d * d];
                if start == 0 {
                    s.fill(0.0);
                }
                for row in first as usize..(first + rows) as usize {
                    let x = &self.qkv[row * conv..][..conv];
                    let q: Vec<f64> = normalised(&x[h % hk * d..][..d]).iter().map(|q| q / (d as f64).sqrt()).collect();
                    let k = normalised(&x[(hk + h % hk) * d..][..d]);
                    let v = &x[(2 * hk + h) * d..][..d];
                    let bias = self.dt_bias.as_ref().map_or(0.0, |b| f64::from(b[h]));
                    let rate = self.a.as_ref().map_or(-1.0, |a| f64::from(a[h]));
                    let decay = ((f64::from(self.alpha[row * hv + h]) + bias).exp().ln_1p() * rate).exp();
                    let step = sigmoid(f64::from(self.beta[row * hv + h]));
                    for (r, s) in s.chunks_mut(d).enumerate() {
                        s.iter_mut().for_each(|s| *s *= decay);
                        let sk: f64 = s.iter().zip(&k).map(|(s, k)| s * k).sum();
                        let delta = step * (f64::from(v[r]) - sk);
                        s.iter_mut().zip(&k).for_each(|(s, k)| *s += delta * k);
                        out[(row * hv + h) * d + r] = s.iter().zip(&q).map(|(s, q)| s * q).sum();
                    }
                }
            }
        }
        (out, states)
    }

    fn run<D: Device>(&self, device: &D, batch: &Batch) -> (Vec<f32>, Vec<f32>) {
        let arrays = batch.upload(device);
        let qkv = input(device, &self.qkv);
        let (alpha, beta) = (input(device, &self.alpha), input(device, &self.beta));
        let dt_bias = self.dt_bias.as_ref().map(|x| input(device, x));
        let a = self.a.as_ref().map(|x| input(device, x));
        let decay = Decay { dt_bias: dt_bias.as_ref().map(Buffer::slice), a: a.as_ref().map(Buffer::slice) };
        let out = Output::new(device, batch.rows() * self.shape.d_inner() as usize);
        let state = Output::holding(device, &self.state);
        // SAFETY: rows and slots are those of the batch.
        unsafe {
            ops::ssm_delta_net(
                device,
                qkv.slice(),
                (alpha.slice(), beta.slice()),
                decay,
                state.slice(),
                spans(&arrays),
                out.slice(),
                &self.shape,
            )
            .unwrap();
        }
        (out.read(device), state.read(device))
    }
}

/// Rows of the state stay near 1 in size (keys are unit vectors); an output is a dot product with a query of
/// length 1/√d. Each token adds the rounding of two dot products and an update, and decay forgets old ones.
fn assert_delta(what: &str, (out, state): &(Vec<f32>, Vec<f32>), (e_out, e_state): &(Vec<f64>, Vec<f64>), d: u32) {
    let bound = EPS * 4.0 * f64::from(d).sqrt() * 8.0;
    assert_close(what, out, e_out, |_| bound);
    assert_close(&format!("{what} state"), state, e_state, |_| bound);
}

#[test]
fn the_delta_rule_and_its_final_state() {
    fn check<D: Device>(device: &D) {
        for (n_head_k, n_head_v, d_state, optional) in [(2, 4, 64, true), (1, 1, 64, false), (1, 2, 128, true)] {
            let shape = DeltaNetShape { n_head_k, n_head_v, d_state, d_conv: 4 };
            let batch = batch();
            let delta = Delta::random(shape, &batch, &mut Random::new(u64::from(d_state)), optional);
            let actual = delta.run(device, &batch);
            assert_delta("delta net", &actual, &delta.expected(&batch), d_state);
            let again = delta.run(device, &batch);
            assert_same_bits("delta net", &actual.0, &again.0);
            assert_same_bits("delta net state", &actual.1, &again.1);
        }
    }
    on_devices!(check);
}

/// Hundreds of tokens in one span, as a prefill has them.
#[test]
fn the_delta_rule_over_many_tokens() {
    fn check<D: Device>(device: &D) {
        let shape = DeltaNetShape { n_head_k: 1, n_head_v: 1, d_state: 64, d_conv: 4 };
        let batch = Batch { spans: vec![[0, 0, 300, 0]], n_slots: 1 };
        let delta = Delta::random(shape, &batch, &mut Random::new(77), true);
        assert_delta("long delta net", &delta.run(device, &batch), &delta.expected(&batch), 64);
    }
    on_devices!(check);
}

#[test]
fn the_gated_norm_is_per_head() {
    fn check<D: Device>(device: &D) {
        for (heads, d) in [(1usize, 1usize), (3, 31), (5, 64), (9, 128), (4, 129)] {
            let mut random = Random::new(d as u64);
            let (x, z, w) = (random.units(heads * d), random.units(heads * d), random.units(d));
            let out = Output::holding(device, &x);
            ops::ssm_gated_norm(device, out.slice(), input(device, &z).slice(), input(device, &w).slice(), 1e-6)
                .unwrap();
            let expected: Vec<f64> = (0..heads * d)
                .map(|i| {
                    let head = &x[i / d * d..][..d];
                    let mean = head.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / d as f64;
                    let z = f64::from(z[i]);
                    f64::from(x[i]) / (mean + 1e-6).sqrt() * f64::from(w[i % d]) * z * sigmoid(z)
                })
                .collect();
            assert_close("ssm_gated_norm", &out.read(device), &expected, |i| 2e-6 * expected[i].abs());
        }
    }
    on_devices!(check);
}
