//! The two halves of a feed-forward network in a launch each: against their definition, and to the bits of the
//! operations one by one.

use gpu_kernels::blocks::GgmlType;
use host::backend::{GatedAct, RouterRule};
use host::gpu::ops::{
    self, ExpertDown, Experts, GateUp, Matvec, NormGateUp, OpError, Q8, Routing, SharedAct, SharedDown,
    takes_expert_down, takes_gate_up, takes_norm_gate_up, takes_q8,
};
use host::gpu::{Buffer, Device};

use super::formats::{Value, dequantize, random_blocks};
use super::matvec::{Input, dot, tolerance};
use super::{EPS, Output, Random, Weights, assert_close, assert_same_bits, devices, input, sigmoid, wide};
use gpu_kernels::params::Activations;

pub(super) fn quantised_types() -> impl Iterator<Item = GgmlType> {
    GgmlType::ALL.iter().copied().filter(|ty| takes_q8(*ty))
}

/// Weights on a device, and their values.
pub(super) struct Known<D: Device> {
    pub(super) weights: Weights<D>,
    pub(super) values: Vec<Value>,
}

pub(super) fn known<D: Device>(device: &D, random: &mut Random, ty: GgmlType, shape: [u32; 3]) -> Known<D> {
    let file = random_blocks(random, ty, shape.iter().product::<u32>() as usize);
    Known { weights: Weights::new(device, ty, shape, &file), values: dequantize(ty, &file) }
}

/// Quantised results, poisoned and guarded.
pub(super) struct Q8Output<D: Device> {
    qs: Output<D, i8>,
    d: Output<D, f32>,
    s: Output<D, f32>,
    cols: u32,
}

impl<D: Device> Q8Output<D> {
    pub(super) fn new(device: &D, rows: u32, cols: u32) -> Self {
        let n = (rows * cols) as usize;
        Q8Output { qs: Output::new(device, n), d: Output::new(device, n / 16), s: Output::new(device, n / 16), cols }
    }

    pub(super) fn view(&self) -> Q8<'_> {
        Q8 { qs: self.qs.slice(), d: self.d.slice(), s: self.s.slice(), cols: self.cols }
    }

    pub(super) fn assert_same_bits(&self, device: &D, what: &str, other: &Self) {
        assert_same_bits(what, &self.qs.read(device), &other.qs.read(device));
        assert_same_bits(what, &self.d.read(device), &other.d.read(device));
        assert_same_bits(what, &self.s.read(device), &other.s.read(device));
    }

    /// Compares with what was quantised: half a step of a block, and `error` of each element.
    #[track_caller]
    pub(super) fn assert_quantised(&self, device: &D, what: &str, want: &[f64], error: &[f64]) {
        let (qs, d, s) = (self.qs.read(device), self.d.read(device), self.s.read(device));
        let got: Vec<f32> = qs.iter().enumerate().map(|(i, &q)| f32::from(q) * d[i / 16]).collect();
        let in_block = |i: usize| error[i / 16 * 16..][..16].iter().copied().fold(0.0, f64::max);
        assert_close(what, &got, want, |i| 0.5001 * f64::from(d[i / 16]) + 2.0 * in_block(i));
        for (i, block) in want.chunks(16).enumerate() {
            let max = block.iter().map(|x| x.abs()).fold(0.0, f64::max);
            let error = (f64::from(d[i]) * 127.0 - max).abs();
            assert!(error <= 2.0 * in_block(16 * i) + max * 4.0 * EPS, "{what}: scale {i} is {}, of {max}", d[i]);
        }
        for (i, sixteen) in qs.chunks(16).enumerate() {
            let sum: i32 = sixteen.iter().map(|&q| i32::from(q)).sum();
            assert_eq!(s[i], d[i] * sum as f32, "{what}: sum {i}");
        }
    }
}

/// The gated activation, and how much an error of its arguments can grow: slopes are below 1.1 of the other's size.
fn activation(act: GatedAct, gate: f64, up: f64) -> f64 {
    match act {
        GatedAct::SwiGlu => gate * sigmoid(gate) * up,
        GatedAct::SwiGluOai => {
            let (gate, up) = (gate.min(7.0), up.clamp(-7.0, 7.0));
            gate * sigmoid(1.702 * gate) * (up + 1.0)
        }
    }
}

/// What `act` makes of sums that are off by `errors`, and how far off that may be.
pub(super) fn activated(act: GatedAct, gate: f64, up: f64, errors: [f64; 2]) -> (f64, f64) {
    let value = activation(act, gate, up);
    let slopes = 1.2 * (up.abs() + 1.0) * errors[0] + (gate.abs() + 1.0) * errors[1];
    // Its own roundings, an exponential and a quotient among them.
    (value, slopes + 16.0 * EPS * (value.abs() + (gate * (up.abs() + 1.0)).abs()))
}

/// The chosen experts and their weights, by definition.
fn route(logits: &[f64], n_used: usize, rule: RouterRule) -> Vec<(usize, f64)> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    order.truncate(n_used);
    let over: Vec<usize> = if rule == RouterRule::SoftmaxAll { (0..logits.len()).collect() } else { order.clone() };
    let sum: f64 = over.iter().map(|i| (logits[*i] - logits[order[0]]).exp()).sum();
    order.iter().map(|&i| (i, (logits[i] - logits[order[0]]).exp() / sum)).collect()
}

devices! {
    fn gate_and_up_of_routed_experts_in_one_launch(device) {
        let mut random = Random::new(21);
        for (i, ty) in quantised_types().enumerate() {
            let (n_expert, n_used, tokens) = ([5u32, 40, 256][i % 3], [2u32, 3][i % 2], [1u32, 3][i % 2]);
            let (rows, cols, shared_cols) = ([32u32, 96][i % 2], [256u32, 768, 512][i % 3], 160u32);
            let (act, rule) = if i % 2 == 0 {
                (GatedAct::SwiGlu, RouterRule::SoftmaxChosen)
            } else {
                (GatedAct::SwiGluOai, RouterRule::SoftmaxAll)
            };
            let shape = [n_expert, rows, cols];
            let (gate, up) = (known(device, &mut random, ty, shape), known(device, &mut random, ty, shape));
            let x = Input::new(device, &random.units((tokens * cols) as usize), cols);
            let logits = random.units((tokens * n_expert) as usize);
            let router_bias = random.units(n_expert as usize);
            let biases = [random.units((n_expert * rows) as usize), random.units((n_expert * rows) as usize)];
            let shared = [random.units((tokens * shared_cols) as usize), random.units((tokens * shared_cols) as usize)];
            let with_bias = i % 2 == 1;

            let upload = |x: &[f32]| -> Buffer<_, f32> { input(device, x) };
            let (logits_d, router_bias_d) = (upload(&logits), upload(&router_bias));
            let (gate_bias_d, up_bias_d) = (upload(&biases[0]), upload(&biases[1]));
            let (shared_gate_d, shared_up_d) = (upload(&shared[0]), upload(&shared[1]));
            let routes = tokens * n_used;
            let (ids, weights) = (Output::<_, u32>::new(device, routes as usize), Output::<_, f32>::new(device, routes as usize));
            let h = Q8Output::new(device, routes, rows);
            let shared_h = Q8Output::new(device, tokens, shared_cols);
            let op = GateUp {
                gate: gate.weights.matrix(),
                up: up.weights.matrix(),
                gate_bias: with_bias.then_some(gate_bias_d.slice()),
                up_bias: with_bias.then_some(up_bias_d.slice()),
                act,
                routing: Some(Routing {
                    logits: logits_d.slice(),
                    bias: with_bias.then_some(router_bias_d.slice()),
                    rule,
                    ids: ids.slice(),
                    weights: weights.slice(),
                    n_used,
                    shared: Some(SharedAct { gate: shared_gate_d.slice(), up: shared_up_d.slice(), h: shared_h.view() }),
                    next: Some(gate.weights.matrix()),
                }),
                dependent: true,
                tokens,
            };
            ops::gate_up(device, &op, x.q8(), h.view()).expect("gate_up");
            let what = format!("gate_up {ty}, {tokens} tokens, {n_used} of {n_expert} x {rows} x {cols}");

            // By definition.
            let (got_ids, got_weights) = (ids.read(device), weights.read(device));
            let mut wanted = (Vec::new(), Vec::new());
            for t in 0..tokens as usize {
                let logits: Vec<f64> = (0..n_expert as usize)
                    .map(|e| f64::from(logits[t * n_expert as usize + e] + if with_bias { router_bias[e] } else { 0.0 }))
                    .collect();
                for (j, (expert, weight)) in route(&logits, n_used as usize, rule).into_iter().enumerate() {
                    let at = t * n_used as usize + j;
                    assert_eq!(got_ids[at] as usize, expert, "{what}: route {at}");
                    assert!((f64::from(got_weights[at]) - weight).abs() < 1e-5, "{what}: weight {at}");
                    let x = &x.values(Activations::Q8)[t * cols as usize..][..cols as usize];
                    for r in 0..rows as usize {
                        let row = expert * rows as usize + r;
                        let of = |w: &Known<_>, bias: &[f32]| {
                            let (sum, size) = dot(&w.values[row * cols as usize..][..cols as usize], x);
                            let bias = if with_bias { f64::from(bias[row]) } else { 0.0 };
                            (sum + bias, tolerance(cols) * (size + bias.abs()))
                        };
                        let ((g, g_error), (u, u_error)) = (of(&gate, &biases[0]), of(&up, &biases[1]));
                        let (value, error) = activated(act, g, u, [g_error, u_error]);
                        wanted.0.push(value);
                        wanted.1.push(error);
                    }
                }
            }
            h.assert_quantised(device, &what, &wanted.0, &wanted.1);
            let wanted: (Vec<f64>, Vec<f64>) = wide(&shared[0])
                .iter()
                .zip(wide(&shared[1]))
                .map(|(&g, u)| activated(act, g, u, [0.0; 2]))
                .unzip();
            shared_h.assert_quantised(device, &format!("{what}, shared"), &wanted.0, &wanted.1);

            // One operation after the other.
            let ids_1 = Output::<_, u32>::new(device, routes as usize);
            let weights_1 = Output::<_, f32>::new(device, routes as usize);
            let bias = op.routing.and_then(|routing| routing.bias);
            ops::softmax_topk(device, logits_d.slice(), bias, ids_1.slice(), weights_1.slice(), n_expert, n_used, rule)
                .expect("softmax_topk");
            assert_eq!(got_ids, ids_1.read(device), "{what}");
            assert_same_bits(&what, &got_weights, &weights_1.read(device));
            let experts = Some(Experts { ids: ids_1.slice(), ids_stride: n_used, n_used, shared_x: true });
            let product = |w, bias| {
                let y = Output::<_, f32>::new(device, (routes * rows) as usize);
                let op = Matvec { experts, bias, ..Matvec::new(w, y.slice(), tokens) };
                ops::matvec_q8(device, &op, x.q8()).expect("matvec_q8");
                y
            };
            let (gate_1, up_1) = (product(op.gate, op.gate_bias), product(op.up, op.up_bias));
            let (out, h_1) = (Output::<_, f32>::new(device, (routes * rows) as usize), Q8Output::new(device, routes, rows));
            ops::gated_act_q8(device, Some(act), gate_1.slice(), up_1.slice(), out.slice(), h_1.view()).expect("act");
            h.assert_same_bits(device, &what, &h_1);
        }
    }

    /// Against the definition, and to the bits of the norm and the network one by one.
    fn norm_gate_and_up_of_a_dense_network_in_one_launch(device) {
        let mut random = Random::new(23);
        for (i, ty) in quantised_types().enumerate() {
            // More units than the emulated device has blocks at once, one left over; a row longer than a lane of the norm
            // has in registers.
            let (rows, cols) = ([288u32, 32][i % 2], [512u32, 1280, 256, 4352][i % 4]);
            let rows = if cols > 4000 { 32 } else { rows };
            let act = [GatedAct::SwiGlu, GatedAct::SwiGluOai][i % 2];
            let shape = [1, rows, cols];
            let (gate, up) = (known(device, &mut random, ty, shape), known(device, &mut random, ty, shape));
            let (x, norm) = (random.units(cols as usize), random.units(cols as usize));
            let (x, norm) = (input(device, &x), input(device, &norm));
            let (h, again) = (Q8Output::new(device, 1, rows), Q8Output::new(device, 1, rows));
            let (gate_w, up_w) = (gate.weights.matrix(), up.weights.matrix());
            let (y, normed) = (Output::<_, f32>::new(device, cols as usize), Q8Output::new(device, 1, cols));
            let eps = 1e-3;
            assert!(takes_norm_gate_up(&gate_w, &up_w));
            let op =
                NormGateUp { x: x.slice(), norm: norm.slice(), eps, gate: gate_w, up: up_w, act, dependent: true };
            ops::norm_gate_up(device, &op, h.view()).expect("norm_gate_up");

            let what = format!("norm_gate_up {ty} {rows} x {cols}");
            ops::rms_norm_q8(device, x.slice(), norm.slice(), y.slice(), normed.view(), eps).expect("rms_norm_q8");
            let one = GateUp {
                gate: gate_w,
                up: up_w,
                gate_bias: None,
                up_bias: None,
                act,
                routing: None,
                dependent: true,
                tokens: 1,
            };
            ops::gate_up(device, &one, normed.view(), again.view()).expect("gate_up");
            h.assert_same_bits(device, &what, &again);

            let (qs, d) = (normed.qs.read(device), normed.d.read(device));
            let values: Vec<f64> =
                qs.iter().enumerate().map(|(i, &q)| f64::from(q) * f64::from(d[i / 16])).collect();
            let rows_of = gate.values.chunks(cols as usize).zip(up.values.chunks(cols as usize));
            let wanted: (Vec<f64>, Vec<f64>) = rows_of
                .map(|(gate, up)| {
                    let ((g, g_size), (u, u_size)) = (dot(gate, &values), dot(up, &values));
                    activated(act, g, u, [g_size, u_size].map(|size| tolerance(cols) * size))
                })
                .unzip();
            h.assert_quantised(device, &what, &wanted.0, &wanted.1);
        }
    }

    fn norm_gate_up_refuses_what_one_launch_cannot_do(device) {
        let of = |ty: GgmlType, rows: u32, cols: u32| {
            Weights::new(device, ty, [1, rows, cols], &vec![0; (rows * cols) as usize / ty.block_elems() * ty.block_bytes()])
        };
        let (gate, up, odd) = (of(GgmlType::Q8_0, 32, 64), of(GgmlType::Q8_0, 32, 64), of(GgmlType::Q8_0, 48, 64));
        let (other, long) = (of(GgmlType::Q4_0, 32, 64), of(GgmlType::Q8_0, 32, 96));
        let (x, norm) = (input(device, &[1.0; 64]), input(device, &[1.0; 64]));
        let h = Q8Output::new(device, 1, 32);
        let op = NormGateUp {
            x: x.slice(),
            norm: norm.slice(),
            eps: 1e-6,
            gate: gate.matrix(),
            up: up.matrix(),
            act: GatedAct::SwiGlu,
            dependent: false,
        };
        let run = |op: NormGateUp<'_>, h: Q8<'_>| {
            matches!(ops::norm_gate_up(device, &op, h), Err(OpError::Operand { .. }))
        };
        ops::norm_gate_up(device, &op, h.view()).expect("the operation that the others are changed from");
        assert!(run(NormGateUp { up: other.matrix(), ..op }, h.view()), "another type");
        assert!(run(NormGateUp { up: long.matrix(), ..op }, h.view()), "another shape");
        assert!(run(NormGateUp { gate: odd.matrix(), up: odd.matrix(), ..op }, h.view()), "half a unit");
        assert!(run(NormGateUp { gate: long.matrix(), up: long.matrix(), ..op }, h.view()), "a short row");
        assert!(run(op, Q8Output::new(device, 1, 64).view()), "more results than rows");
    }

    fn gate_and_up_of_a_dense_network_in_one_launch(device) {
        let mut random = Random::new(22);
        for (i, ty) in quantised_types().enumerate() {
            let (rows, cols, tokens) = ([96u32, 32][i % 2], [512u32, 1280, 256][i % 3], [1u32, 2][i % 2]);
            let shape = [1, rows, cols];
            let (gate, up) = (known(device, &mut random, ty, shape), known(device, &mut random, ty, shape));
            let x = Input::new(device, &random.units((tokens * cols) as usize), cols);
            let h = Q8Output::new(device, tokens, rows);
            let op = GateUp {
                gate: gate.weights.matrix(),
                up: up.weights.matrix(),
                gate_bias: None,
                up_bias: None,
                act: GatedAct::SwiGlu,
                routing: None,
                dependent: true,
                tokens,
            };
            ops::gate_up(device, &op, x.q8(), h.view()).expect("gate_up");
            let mut wanted = (Vec::new(), Vec::new());
            for x in x.values(Activations::Q8).chunks(cols as usize) {
                for (gate, up) in gate.values.chunks(cols as usize).zip(up.values.chunks(cols as usize)) {
                    let ((g, g_size), (u, u_size)) = (dot(gate, x), dot(up, x));
                    let errors = [g_size, u_size].map(|size| tolerance(cols) * size);
                    let (value, error) = activated(op.act, g, u, errors);
                    wanted.0.push(value);
                    wanted.1.push(error);
                }
            }
            h.assert_quantised(device, &format!("gate_up {ty} {tokens} x {rows} x {cols}"), &wanted.0, &wanted.1);
        }
    }

    fn experts_down_and_their_sum_in_one_launch(device) {
        let mut random = Random::new(23);
        for (i, ty) in quantised_types().enumerate() {
            for (k, shared_ty) in [None, Some(ty), Some(GgmlType::Q8_0)].into_iter().enumerate() {
                let (n_expert, rows) = (6u32, 37u32);
                let (tokens, n_used) = ([1u32, 2, 5][(i + k) % 3], [3u32, 8, 17, 1][(i + k) % 4]);
                let (cols, shared_cols) = ([512u32, 256, 2304][i % 3], [512u32, 256][k % 2]);
                let w = known(device, &mut random, ty, [n_expert, rows, cols]);
                let shared_w = shared_ty.map(|ty| known(device, &mut random, ty, [1, rows, shared_cols]));
                let routes = tokens * n_used;
                let h = Input::new(device, &random.units((routes * cols) as usize), cols);
                let shared_h = Input::new(device, &random.units((tokens * shared_cols) as usize), shared_cols);
                // 9 is past the end and stands for the last expert.
                let ids: Vec<u32> = (0..routes).map(|j| [3, 9, 0, 5, 1, 2, 4][(j as usize * 3 + k) % 7]).collect();
                let weights = random.units(routes as usize);
                let bias = random.units((n_expert * rows) as usize);
                let before = random.units((tokens * rows) as usize);
                let gate = random.units(tokens as usize);
                let (with_bias, with_gate) = (k != 1, k != 1);
                let (ids_d, weights_d, bias_d, gate_d) =
                    (input(device, &ids), input(device, &weights), input(device, &bias), input(device, &gate));
                let x = Output::holding(device, &before);
                let op = ExpertDown {
                    w: w.weights.matrix(),
                    bias: with_bias.then_some(bias_d.slice()),
                    ids: ids_d.slice(),
                    weights: weights_d.slice(),
                    n_used,
                    shared: shared_w.as_ref().map(|w| SharedDown {
                        w: w.weights.matrix(),
                        h: shared_h.q8(),
                        gate: with_gate.then_some(gate_d.slice()),
                    }),
                    dependent: true,
                    tokens,
                };
                assert!(takes_expert_down(ty, shared_ty));
                ops::expert_down(device, &op, h.q8(), x.slice()).expect("expert_down");
                let got: Vec<f32> = x.read(device);
                let what = format!("expert_down {ty} with {shared_ty:?}, {tokens} tokens, {n_used} x {rows} x {cols}");

                // By definition.
                let (mut wanted, mut sizes) = (Vec::new(), Vec::new());
                for t in 0..tokens as usize {
                    for r in 0..rows as usize {
                        let mut sum = f64::from(before[t * rows as usize + r]);
                        let mut size = sum.abs();
                        for j in t * n_used as usize..(t + 1) * n_used as usize {
                            let row = (ids[j].min(n_expert - 1) * rows) as usize + r;
                            let x = &h.values(Activations::Q8)[j * cols as usize..][..cols as usize];
                            let (dot, dot_size) = dot(&w.values[row * cols as usize..][..cols as usize], x);
                            let bias = if with_bias { f64::from(bias[row]) } else { 0.0 };
                            sum += f64::from(weights[j]) * (dot + bias);
                            size += f64::from(weights[j]).abs() * (dot_size + bias.abs());
                        }
                        if let Some(w) = &shared_w {
                            let x = &shared_h.values(Activations::Q8)[t * shared_cols as usize..][..shared_cols as usize];
                            let (dot, dot_size) = dot(&w.values[r * shared_cols as usize..][..shared_cols as usize], x);
                            let scale = if with_gate { sigmoid(f64::from(gate[t])) } else { 1.0 };
                            sum += scale * dot;
                            size += scale * dot_size;
                        }
                        wanted.push(sum);
                        sizes.push(size);
                    }
                }
                let bound = tolerance(cols) + 2.0 * f64::from(n_used) * EPS;
                assert_close(&what, &got, &wanted, |i| bound * sizes[i]);

                // One operation after the other.
                let y = Output::<_, f32>::new(device, (routes * rows) as usize);
                let experts = Some(Experts { ids: op.ids, ids_stride: n_used, n_used, shared_x: false });
                let each = Matvec { experts, bias: op.bias, ..Matvec::new(op.w, y.slice(), tokens) };
                ops::matvec_q8(device, &each, h.q8()).expect("matvec_q8");
                let x = Output::holding(device, &before);
                ops::moe_weighted_acc(device, x.slice(), y.slice(), op.weights, None, n_used, rows).expect("moe_weighted_acc");
                if let Some(shared) = op.shared {
                    let y = Output::<_, f32>::new(device, (tokens * rows) as usize);
                    ops::matvec_q8(device, &Matvec::new(shared.w, y.slice(), tokens), shared.h).expect("matvec_q8");
                    match shared.gate {
                        Some(gate) => ops::sigmoid_scale_acc(device, x.slice(), y.slice(), gate),
                        None => ops::add(device, x.slice(), y.slice()),
                    }
                    .expect("the shared expert");
                }
                assert_same_bits(&what, &got, &x.read(device));
            }
        }
    }

    fn halves_of_a_network_refuse_bad_operands(device) {
        let of = |ty: GgmlType, shape: [u32; 3]| {
            let n = shape.iter().product::<u32>() as usize / ty.block_elems() * ty.block_bytes();
            Weights::new(device, ty, shape, &vec![0; n])
        };
        let (experts, others) = (of(GgmlType::Q8_0, [4, 32, 64]), of(GgmlType::Q8_0, [4, 32, 64]));
        let (q4_0, odd, f32s) = (
            of(GgmlType::Q4_0, [4, 32, 64]), of(GgmlType::Q8_0, [4, 33, 64]), of(GgmlType::F32, [4, 32, 64]),
        );
        assert!(takes_gate_up(&experts.matrix(), &others.matrix()));
        assert!(!takes_gate_up(&experts.matrix(), &q4_0.matrix()) && !takes_gate_up(&f32s.matrix(), &f32s.matrix()));
        assert!(!takes_gate_up(&odd.matrix(), &odd.matrix()));
        let x = Input::new(device, &[0.0; 128], 64);
        let (logits, weights) = (device.alloc_zeroed::<f32>(8).expect("memory"), device.alloc_zeroed::<f32>(4).expect("memory"));
        let ids = device.alloc_zeroed::<u32>(4).expect("memory");
        let h = Q8Output::new(device, 4, 32);
        let routing = Routing {
            logits: logits.slice(), bias: None, rule: RouterRule::SoftmaxChosen, ids: ids.slice(),
            weights: weights.slice(), n_used: 2, shared: None, next: None,
        };
        let op = GateUp {
            gate: experts.matrix(), up: others.matrix(), gate_bias: None, up_bias: None, act: GatedAct::SwiGlu,
            routing: Some(routing), dependent: false, tokens: 2,
        };
        let refused = |op: GateUp<'_>| matches!(ops::gate_up(device, &op, x.q8(), h.view()), Err(OpError::Operand { .. }));
        let routed = |routing| GateUp { routing: Some(routing), ..op };
        assert!(!refused(op), "the operands that the others are changed from");
        assert_eq!(ops::gate_up(device, &GateUp { tokens: 0, ..op }, x.q8(), h.view()).expect("nothing to do"), 0);
        assert!(refused(GateUp { tokens: 3, ..op }), "no room");
        assert!(refused(GateUp { up: q4_0.matrix(), ..op }), "two types");
        assert!(refused(GateUp { routing: None, ..op }), "experts without routing");
        assert!(refused(GateUp { gate_bias: Some(logits.slice()), ..op }), "a short bias");
        assert!(refused(routed(Routing { n_used: 5, ..routing })), "more than there are");
        assert!(refused(routed(Routing { n_used: 0, ..routing })), "none");
        assert!(refused(routed(Routing { weights: logits.slice(), ..routing })), "results overlap inputs");
        assert!(refused(routed(Routing { bias: Some(weights.slice().part(..3).expect("inside")), ..routing })), "router bias");
        let shared = SharedAct { gate: logits.slice(), up: logits.slice(), h: h.view() };
        assert!(refused(routed(Routing { shared: Some(shared), ..routing })), "a shared expert without its rows");
        let two = of(GgmlType::Q8_0, [2, 64, 32]);
        assert!(refused(routed(Routing { next: Some(two.matrix()), ..routing })), "another number of experts");

        let down = of(GgmlType::Q4_0, [4, 33, 64]);
        let one = of(GgmlType::Q8_0, [1, 33, 64]);
        let x = device.alloc_zeroed::<f32>(33).expect("memory");
        let h = Input::new(device, &[0.0; 128], 64);
        let op = ExpertDown {
            w: down.matrix(), bias: None, ids: ids.slice(), weights: weights.slice(), n_used: 2,
            shared: Some(SharedDown { w: one.matrix(), h: h.q8(), gate: None }), dependent: false, tokens: 1,
        };
        let run = |op: ExpertDown<'_>| ops::expert_down(device, &op, h.q8(), x.slice());
        let refused = |op| matches!(run(op), Err(OpError::Operand { .. }));
        run(op).expect("the operands that the others are changed from");
        assert_eq!(run(ExpertDown { tokens: 0, ..op }).expect("nothing to do"), 0);
        assert!(refused(ExpertDown { tokens: 2, ..op }), "no room in x");
        assert!(refused(ExpertDown { n_used: 33, ..op }) && refused(ExpertDown { n_used: 0, ..op }), "numbers of experts");
        assert!(refused(ExpertDown { n_used: 3, ..op }), "no rows of h");
        assert!(refused(ExpertDown { weights: x.slice(), ..op }), "overlap");
        assert!(refused(ExpertDown { bias: Some(weights.slice()), ..op }), "a short bias");
        let wide = SharedDown { w: down.matrix(), h: h.q8(), gate: None };
        assert!(refused(ExpertDown { shared: Some(wide), w: down.matrix(), ..op }), "a shared expert of four");
        let foreign = of(GgmlType::Q5_0, [1, 33, 64]);
        let foreign = SharedDown { w: foreign.matrix(), h: h.q8(), gate: None };
        assert!(matches!(run(ExpertDown { shared: Some(foreign), ..op }), Err(OpError::Type { .. })), "no such pair");
        assert!(!takes_expert_down(GgmlType::Q4_0, Some(GgmlType::Q5_0)) && !takes_expert_down(GgmlType::F32, None));
    }
}
