//! The gated delta net: convolution, recurrence with its final state, gated norm; and all three in one launch.

#![expect(unsafe_code, reason = "launches whose spans live on the device")]

use host::backend::DeltaNetShape;
use host::gpu::ops::{self, Decay, DeltaStep, MAX_STEP_ROWS, Q8, Spans};
use host::gpu::{Buffer, Device};

use super::{EPS, Output, Random, assert_close, assert_same_bits, input, on_devices, sigmoid, wide};

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

/// A sequence that goes on, one that begins, one with a single token, one that is longer than any tile and begun two
/// tokens ago; slots out of order, one unused.
fn batch() -> Batch {
    Batch { spans: vec![[2, 0, 9, 17], [0, 9, 6, 0], [4, 15, 1, 4], [1, 16, 37, 2]], n_slots: 5 }
}

/// More spans than a warp has lanes, of no row to three.
fn many_spans() -> Batch {
    let mut first = 0;
    let spans = (0..70).map(|i| {
        let rows = i * 7 % 4;
        first += rows;
        [69 - i, first - rows, rows, i % 5]
    });
    Batch { spans: spans.collect(), n_slots: 70 }
}

/// Rows of the ring of a convolution's inputs.
const RING: usize = 8;

/// The definition of the convolution, in f64: outputs and final rings.
fn convolved(channels: usize, batch: &Batch, x: &[f32], w: &[f32], before: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let (mut out, mut ring) = (vec![0.0; x.len()], wide(before));
    for &[slot, first, rows, start] in &batch.spans {
        for c in 0..channels {
            let at = |pos: u32| (slot as usize * RING + pos as usize % RING) * channels + c;
            // The inputs at positions start − 3 and on.
            let old = |back| start.checked_sub(back).map_or(0.0, |pos| f64::from(before[at(pos)]));
            let mut seen = vec![old(3), old(2), old(1)];
            for row in 0..rows {
                let i = (first + row) as usize * channels + c;
                seen.push(f64::from(x[i]));
                let taps = seen[seen.len() - 4..].iter().zip(&w[c * 4..][..4]);
                let sum: f64 = taps.map(|(x, &w)| x * f64::from(w)).sum();
                out[i] = sum * sigmoid(sum);
                ring[at(start + row)] = f64::from(x[i]);
            }
        }
    }
    (out, ring)
}

#[test]
fn the_convolution_keeps_its_inputs_in_a_ring() {
    fn check<D: Device>(device: &D) {
        let shape = DeltaNetShape { n_head_k: 1, n_head_v: 3, d_state: 36, d_conv: 4 };
        for batch in [batch(), many_spans()] {
            let c = shape.conv_dim() as usize;
            let mut random = Random::new(11);
            let (x, w) = (random.units(batch.rows() * c), random.units(c * 4));
            let before = random.units(batch.n_slots * RING * c);
            let (out, ring) = convolved(c, &batch, &x, &w, &before);
            let arrays = batch.upload(device);
            let (x_in, w_in) = (input(device, &x), input(device, &w));
            let (out_dev, ring_dev) = (Output::new(device, x.len()), Output::holding(device, &before));
            let (x, w, ring_at, out_at) = (x_in.slice(), w_in.slice(), ring_dev.slice(), out_dev.slice());
            // SAFETY: rows and slots are those of the batch.
            unsafe { ops::ssm_conv1d(device, x, w, ring_at, spans(&arrays), out_at, &shape) }.unwrap();
            // Four products below 1.
            assert_close("ssm_conv1d", &out_dev.read(device), &out, |i| 4e-7 + 1e-6 * out[i].abs());
            assert_close("ssm_conv1d ring", &ring_dev.read(device), &ring, |_| 0.0);
        }
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

    fn expected(&self, batch: &Batch) -> (Vec<f64>, Vec<f64>) {
        self.expected_of(batch, &wide(&self.qkv))
    }

    /// The definition, token by token, in f64: outputs and final states for these queries, keys and values.
    fn expected_of(&self, batch: &Batch, qkv: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let DeltaNetShape { n_head_k, n_head_v, d_state, .. } = self.shape;
        let (hk, hv, d) = (n_head_k as usize, n_head_v as usize, d_state as usize);
        let conv = self.shape.conv_dim() as usize;
        let mut states: Vec<f64> = self.state.iter().map(|&x| f64::from(x)).collect();
        let mut out = vec![0.0; batch.rows() * hv * d];
        let normalised = |x: &[f64]| -> Vec<f64> {
            let norm = (x.iter().map(|x| x.powi(2)).sum::<f64>() + 1e-6).sqrt();
            x.iter().map(|x| x / norm).collect()
        };
        for &[slot, first, rows, start] in &batch.spans {
            for h in 0..hv {
                let s = &mut states[(slot as usize * hv + h) * d * d..][..d * d];
                if start == 0 {
                    s.fill(0.0);
                }
                for row in first as usize..(first + rows) as usize {
                    let x = &qkv[row * conv..][..conv];
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
                        let delta = step * (v[r] - sk);
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
        let (rows, n_spans) = (batch.rows() as u32, batch.spans.len() as u32);
        let chunks = Output::new(device, ops::chunk_elems(&self.shape, rows, n_spans));
        // SAFETY: rows and slots are those of the batch.
        unsafe {
            ops::ssm_delta_net(
                device,
                qkv.slice(),
                (alpha.slice(), beta.slice()),
                decay,
                state.slice(),
                chunks.slice(),
                spans(&arrays),
                out.slice(),
                &self.shape,
            )
            .unwrap();
        }
        let _: Vec<f32> = chunks.read(device); // its guards
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
        let heads = [(2, 4, 64, true), (1, 1, 64, false), (1, 2, 128, true)];
        for ((n_head_k, n_head_v, d_state, optional), batch) in heads.into_iter().zip([batch(), many_spans(), batch()])
        {
            let shape = DeltaNetShape { n_head_k, n_head_v, d_state, d_conv: 4 };
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

/// Thousands of tokens in one span, as a prefill has them, where each forgets nearly all before it, nearly nothing, and
/// anything between.
#[test]
fn the_delta_rule_over_many_tokens() {
    fn check<D: Device>(device: &D) {
        let shape = DeltaNetShape { n_head_k: 1, n_head_v: 1, d_state: 64, d_conv: 4 };
        for (what, rows, alpha) in [("strong", 1021, 20.0), ("weak", 4096, -12.0), ("mixed", 515, 0.0)] {
            let batch = Batch { spans: vec![[0, 0, rows, 0]], n_slots: 1 };
            let mut delta = Delta::random(shape, &batch, &mut Random::new(77), true);
            delta.alpha.iter_mut().for_each(|x| *x += alpha);
            let (actual, expected) = (delta.run(device, &batch), delta.expected(&batch));
            for (part, actual, expected) in [("out", actual.0, expected.0), ("state", actual.1, expected.1)] {
                let scale = expected.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
                assert_close(&format!("{what} decay, {part}"), &actual, &expected, |_| 1e-4 * scale);
            }
        }
    }
    on_devices!(check);
}

/// `x / rms(x)·w·SiLU(z)` for every head, in f64.
fn gated_norm(x: &[f64], z: &[f32], w: &[f32]) -> Vec<f64> {
    let d = w.len();
    let value = |i: usize| {
        let mean = x[i / d * d..][..d].iter().map(|x| x.powi(2)).sum::<f64>() / d as f64;
        let z = f64::from(z[i]);
        x[i] / (mean + 1e-6).sqrt() * f64::from(w[i % d]) * z * sigmoid(z)
    };
    (0..x.len()).map(value).collect()
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
            let expected = gated_norm(&wide(&x), &z, &w);
            assert_close("ssm_gated_norm", &out.read(device), &expected, |i| 2e-6 * expected[i].abs());
        }
    }
    on_devices!(check);
}

/// All three at once, for spans of as few tokens as that takes: one that goes on, one that begins and is as long as any
/// may be, one of a single first token, one whose ring wraps around.
#[test]
fn a_step_does_what_its_three_parts_do() {
    fn check<D: Device>(device: &D) {
        let spans = vec![[2, 0, 1, 17], [0, 1, MAX_STEP_ROWS, 0], [4, 6, 1, 0], [1, 7, 3, 2], [5, 10, 4, 6]];
        let batch = Batch { spans, n_slots: 6 };
        for (n_head_k, n_head_v, d_state, optional) in [(2, 4, 64, true), (1, 1, 64, false), (1, 3, 128, true)] {
            let shape = DeltaNetShape { n_head_k, n_head_v, d_state, d_conv: 4 };
            let step = Step::random(shape, &batch, &mut Random::new(u64::from(d_state + n_head_k)), optional);
            let (wanted, actual) = (step.expected(&batch), step.run(device, &batch, true));
            // A norm of outputs that are off by the delta rule's bound, times weights and gates of at most 1; outputs
            // are as large as their roots of mean squares.
            let rms = |i: usize| step.rms(&wanted.delta, i);
            let bound = EPS * 32.0 * f64::from(d_state).sqrt();
            assert_close("step", &actual.out, &wanted.out, |i| 2e-6 + bound / rms(i));
            assert_close("step state", &actual.state, &wanted.state, |_| bound);
            assert_close("step ring", &actual.ring, &wanted.ring, |_| 0.0);
            // What is quantised is the output itself, in blocks of 16.
            for (block, qs) in actual.out.chunks(16).zip(actual.qs.chunks(16)) {
                let largest = block.iter().fold(0.0f32, |max, x| max.max(x.abs()));
                for (x, q) in block.iter().zip(qs) {
                    let scaled = x / largest * 127.0;
                    assert!((scaled - f32::from(*q)).abs() <= 0.501, "{x} of {largest} is {q}");
                }
            }
            let plain = step.run(device, &batch, false);
            assert_same_bits("step without int8", &actual.out, &plain.out);
            assert_same_bits("state without int8", &actual.state, &plain.state);
        }
    }
    on_devices!(check);
}

/// Inputs of a step.
struct Step {
    /// Its `qkv` are what is convolved.
    delta: Delta,
    conv1d: Vec<f32>,
    ring: Vec<f32>,
    z: Vec<f32>,
    norm: Vec<f32>,
}

/// What a step gives. `delta` is the output before the norm.
struct Stepped<T> {
    out: Vec<T>,
    state: Vec<T>,
    ring: Vec<T>,
    qs: Vec<i8>,
    delta: Vec<f64>,
}

impl Step {
    fn random(shape: DeltaNetShape, batch: &Batch, random: &mut Random, optional: bool) -> Self {
        let conv_dim = shape.conv_dim() as usize;
        Step {
            delta: Delta::random(shape, batch, random, optional),
            conv1d: random.units(4 * conv_dim),
            ring: random.units(batch.n_slots * RING * conv_dim),
            z: random.units(batch.rows() * shape.d_inner() as usize),
            norm: random.units(shape.d_state as usize),
        }
    }

    fn rms(&self, delta: &[f64], i: usize) -> f64 {
        let d = self.norm.len();
        (delta[i / d * d..][..d].iter().map(|x| x.powi(2)).sum::<f64>() / d as f64 + 1e-6).sqrt()
    }

    fn expected(&self, batch: &Batch) -> Stepped<f64> {
        let channels = self.delta.shape.conv_dim() as usize;
        let (qkv, ring) = convolved(channels, batch, &self.delta.qkv, &self.conv1d, &self.ring);
        let (delta, state) = self.delta.expected_of(batch, &qkv);
        Stepped { out: gated_norm(&delta, &self.z, &self.norm), state, ring, qs: Vec::new(), delta }
    }

    fn run<D: Device>(&self, device: &D, batch: &Batch, quantised: bool) -> Stepped<f32> {
        let Delta { shape, qkv, alpha, beta, dt_bias, a, state } = &self.delta;
        let arrays = batch.upload(device);
        let [qkv, alpha, beta, conv1d, z, norm] =
            [qkv, alpha, beta, &self.conv1d, &self.z, &self.norm].map(|values| input(device, values));
        let [dt_bias, a] = [dt_bias, a].map(|values| values.as_ref().map(|x| input(device, x)));
        let (n, cols) = (self.z.len(), shape.d_inner());
        let (out, ring, state) =
            (Output::new(device, n), Output::holding(device, &self.ring), Output::holding(device, state));
        let (qs, scales, sums) =
            (Output::<D, i8>::new(device, n), Output::<D, f32>::new(device, n / 16), Output::new(device, n / 16));
        let q8 = Q8 { qs: qs.slice(), d: scales.slice(), s: sums.slice(), cols };
        let op = DeltaStep {
            qkv: qkv.slice(),
            z: z.slice(),
            alpha: alpha.slice(),
            beta: beta.slice(),
            conv1d: conv1d.slice(),
            decay: Decay { dt_bias: dt_bias.as_ref().map(Buffer::slice), a: a.as_ref().map(Buffer::slice) },
            norm: norm.slice(),
            eps: 1e-6,
            ring: ring.slice(),
            state: state.slice(),
            spans: spans(&arrays),
            out: out.slice(),
            q8: quantised.then_some(q8),
            dependent: false,
        };
        // SAFETY: rows and slots are those of the batch.
        unsafe { ops::ssm_delta_step(device, &op, shape) }.unwrap();
        if quantised {
            let (values, scales, sums) = (qs.read(device), scales.read(device), sums.read(device));
            for (i, sum) in sums.iter().enumerate() {
                let exact: i32 = values[16 * i..][..16].iter().map(|q| i32::from(*q)).sum();
                assert_eq!(*sum, scales[i] * exact as f32, "sum {i}");
            }
        }
        let (out, state, ring) = (out.read(device), state.read(device), ring.read(device));
        Stepped { out, state, ring, qs: qs.read(device), delta: Vec::new() }
    }
}

/// One operand after the other is not as the kernel wants it.
#[test]
fn a_step_refuses_what_its_kernel_cannot_take() {
    let device = host::gpu::Emulated::new();
    let shape = DeltaNetShape { n_head_k: 1, n_head_v: 2, d_state: 64, d_conv: 4 };
    let batch = Batch { spans: vec![[0, 0, 1, 0]], n_slots: 1 };
    let arrays = batch.upload(&device);
    let floats = |n: usize| input(&device, &vec![0.5f32; n]);
    let (qkv, z, gates, conv1d, norm) = (floats(256), floats(128), floats(2), floats(1024), floats(64));
    let (ring, state, out) = (floats(RING * 256), floats(2 * 64 * 64), floats(128));
    let good = DeltaStep {
        qkv: qkv.slice(),
        z: z.slice(),
        alpha: gates.slice(),
        beta: gates.slice(),
        conv1d: conv1d.slice(),
        decay: Decay { dt_bias: None, a: None },
        norm: norm.slice(),
        eps: 1e-6,
        ring: ring.slice(),
        state: state.slice(),
        spans: spans(&arrays),
        out: out.slice(),
        q8: None,
        dependent: false,
    };
    // SAFETY: one row, one slot.
    let run = |op: &DeltaStep<'_>, shape: &DeltaNetShape| unsafe { ops::ssm_delta_step(&device, op, shape) };
    run(&good, &shape).expect("all is well");
    let bad = [
        ("z", DeltaStep { z: norm.slice(), ..good }),
        ("alpha", DeltaStep { alpha: norm.slice(), ..good }),
        ("conv1d", DeltaStep { conv1d: qkv.slice(), ..good }),
        ("norm", DeltaStep { norm: z.slice(), ..good }),
        ("ring", DeltaStep { ring: ring.part(..1024).expect("inside"), ..good }),
        ("state", DeltaStep { state: state.part(..4096).expect("inside"), ..good }),
        ("dt_bias", DeltaStep { decay: Decay { dt_bias: Some(norm.slice()), a: None }, ..good }),
        ("out", DeltaStep { out: z.slice(), ..good }),
        ("out", DeltaStep { out: state.part(..128).expect("inside"), ..good }),
    ];
    for (name, op) in bad {
        let error = run(&op, &shape).expect_err(name).to_string();
        assert!(error.contains(name), "{error}");
    }
    let shape = DeltaNetShape { d_state: 32, n_head_v: 6, ..shape };
    assert!(run(&good, &shape).expect_err("no such kernel").to_string().contains("d_state"));
}
