//! Mixtures of experts for routes grouped by expert, a few to each: against their definition, and to the bits of the
//! operations one by one.

use cuda_std::U32x4;
use gpu_kernels::blocks::GgmlType;
use gpu_kernels::kernels::grouped::{TILE, TILE_SIZE};
use gpu_kernels::kernels::matmul::TILES;
use gpu_kernels::params::Activations;
use host::backend::{GatedAct, RouterRule};
use host::gpu::ops::{
    self, ExpertDown, ExpertDownGrouped, Experts, GateUpGrouped, Matvec, OpError, RouteGroups, SharedDown,
    SharedDownGrouped, SharedGateUp, SharedOut, few_routes, max_tiles, takes_gate_up_grouped, takes_topk_groups,
};
use host::gpu::{Buffer, Device};

use super::ffn::{Known, Q8Output, activated, known, quantised_types};
use super::matvec::{Input, dot, tolerance};
use super::{Output, Random, Weights, assert_close, assert_same_bits, devices, input};

/// Routes and the same by expert.
struct Grouped<D: Device> {
    ids: Vec<u32>,
    ids_d: Buffer<D, u32>,
    order: Buffer<D, u32>,
    tiles: Buffer<D, U32x4>,
}

impl<D: Device> Grouped<D> {
    /// Experts of a token differ. Half of the tokens choose among the first few, so that experts have from none to more
    /// routes than a tile.
    fn new(device: &D, random: &mut Random, tokens: u32, n_used: u32, n_expert: u32) -> Self {
        let mut ids = Vec::new();
        for t in 0..tokens {
            let among = if t % 2 == 0 { n_used + 1 } else { n_expert };
            ids.extend(random.permutation(among.min(n_expert)).into_iter().take(n_used as usize));
        }
        let routes = tokens * n_used;
        let grouped = Grouped {
            ids_d: input(device, &ids),
            order: device.alloc(routes as usize).expect("memory"),
            tiles: device.alloc(max_tiles(routes, n_expert) as usize).expect("memory"),
            ids,
        };
        let experts = Experts { ids: grouped.ids_d.slice(), ids_stride: n_used, n_used, shared_x: true };
        ops::route_groups(device, &experts, tokens, n_expert, grouped.groups()).expect("route_groups");
        grouped
    }

    fn groups(&self) -> RouteGroups<'_> {
        RouteGroups { order: self.order.slice(), tiles: self.tiles.slice(), tile: TILE_SIZE }
    }
}

/// Tokens and experts of a token: all lengths of tiles, and tokens that are no multiple of them.
const SIZES: [(u32, u32); 3] = [(9, 2), (11, 3), (6, 1)];
const N_EXPERT: u32 = 7;

/// Types of shared experts that the kernels for `ty` take.
fn shared_types(ty: GgmlType) -> [Option<GgmlType>; 3] {
    [None, Some(ty), Some(GgmlType::Q8_0)]
}

/// The sum of a row times activations, with a bias, and how far off it may be.
fn sum(w: &Known<impl Device>, row: usize, cols: u32, x: &[f64], bias: Option<&[f32]>) -> (f64, f64) {
    let (sum, size) = dot(&w.values[row * cols as usize..][..cols as usize], x);
    let bias = bias.map_or(0.0, |bias| f64::from(bias[row]));
    (sum + bias, tolerance(cols) * (size + bias.abs()))
}

devices! {
    fn experts_are_chosen_and_grouped_in_one_launch(device) {
        let shapes = [(1u32, 1u32, 1u32), (9, 256, 8), (32, 6, 3), (33, 40, 5), (64, 256, 8), (64, 33, 32)];
        for (rows, n_expert, n_used) in shapes {
            let mut random = Random::new(u64::from(rows));
            // Few distinct values, so that some are equal; some experts are more popular.
            let mut logit = |i: u32| random.below(64) as f32 / 8.0 - (i % n_expert) as f32 / 64.0;
            let logits: Vec<f32> = (0..rows * n_expert).map(&mut logit).collect();
            let bias = random.units(n_expert as usize);
            let (logits, bias) = (input(device, &logits), input(device, &bias));
            let routes = rows * n_used;
            let n_tiles = (routes / TILE + n_expert).min(routes) as usize;
            for (rule, bias) in [(RouterRule::SoftmaxChosen, None), (RouterRule::SoftmaxAll, Some(bias.slice()))] {
                let outputs = || {
                    let n = routes as usize;
                    let (ids, weights) = (Output::<_, u32>::new(device, n), Output::<_, f32>::new(device, n));
                    let n_tiles = max_tiles(routes, n_expert) as usize;
                    (ids, weights, Output::<_, u32>::new(device, n), Output::<_, U32x4>::new(device, n_tiles))
                };
                let (ids, weights, order, tiles) = outputs();
                let groups = RouteGroups { order: order.slice(), tiles: tiles.slice(), tile: TILE_SIZE };
                ops::topk_groups(device, logits.slice(), bias, ids.slice(), weights.slice(), n_expert, n_used, rule, groups)
                    .expect("topk_groups");
                let (ids_1, weights_1, order_1, tiles_1) = outputs();
                ops::softmax_topk(device, logits.slice(), bias, ids_1.slice(), weights_1.slice(), n_expert, n_used, rule)
                    .expect("softmax_topk");
                let groups = RouteGroups { order: order_1.slice(), tiles: tiles_1.slice(), tile: TILE_SIZE };
                let experts = Experts { ids: ids_1.slice(), ids_stride: n_used, n_used, shared_x: true };
                ops::route_groups(device, &experts, rows, n_expert, groups).expect("route_groups");

                let what = format!("topk_groups, {rows} rows, {n_used} of {n_expert}");
                assert_eq!(ids.read(device), ids_1.read(device), "{what}");
                assert_same_bits(&what, &weights.read(device), &weights_1.read(device));
                assert_eq!(order.read(device), order_1.read(device), "{what}");
                let filled = |tiles: Vec<U32x4>| -> Vec<_> {
                    tiles[..n_tiles].iter().map(|tile| if tile.z > 0 { tile.to_array() } else { [0; 4] }).collect()
                };
                assert_eq!(filled(tiles.read(device)), filled(tiles_1.read(device)), "{what}");
            }
        }
        assert!(takes_topk_groups(64, 256, 8) && !takes_topk_groups(65, 256, 8) && !takes_topk_groups(0, 256, 8));
        assert!(!takes_topk_groups(9, 257, 8) && !takes_topk_groups(9, 40, 33) && !takes_topk_groups(9, 4, 5));
        // 65 rows of one logit: more than there are bits.
        let (logits, ids) = (input(device, &[0.0f32; 65]), input(device, &[0u32; 65]));
        let (weights, order) = (input(device, &[0.0f32; 65]), input(device, &[0u32; 65]));
        let tiles = device.alloc::<U32x4>(17).expect("memory");
        let groups = RouteGroups { order: order.slice(), tiles: tiles.slice(), tile: TILE_SIZE };
        let rule = RouterRule::SoftmaxChosen;
        let refused = ops::topk_groups(device, logits.slice(), None, ids.slice(), weights.slice(), 1, 1, rule, groups);
        assert!(matches!(refused, Err(OpError::Operand { .. })));
    }

    fn gate_and_up_of_grouped_routes_in_one_launch(device) {
        let mut random = Random::new(31);
        for (i, ty) in quantised_types().enumerate() {
            for (k, shared_ty) in shared_types(ty).into_iter().enumerate() {
                let (tokens, n_used) = SIZES[(i + k) % SIZES.len()];
                let (rows, cols, shared_rows) = ([32u32, 96][k % 2], [256u32, 768, 512][i % 3], [64u32, 32][i % 2]);
                let (act, with_bias) = if k == 1 { (GatedAct::SwiGluOai, true) } else { (GatedAct::SwiGlu, false) };
                let shape = [N_EXPERT, rows, cols];
                let (gate, up) = (known(device, &mut random, ty, shape), known(device, &mut random, ty, shape));
                let shared = shared_ty.map(|ty| [0; 2].map(|_| known(device, &mut random, ty, [1, shared_rows, cols])));
                let x = Input::new(device, &random.units((tokens * cols) as usize), cols);
                let biases = [0; 2].map(|_| random.units((N_EXPERT * rows) as usize));
                let [gate_bias, up_bias] = [0, 1].map(|i: usize| input(device, &biases[i]));
                let grouped = Grouped::new(device, &mut random, tokens, n_used, N_EXPERT);
                let routes = tokens * n_used;
                let (h, shared_h) = (Q8Output::new(device, routes, rows), Q8Output::new(device, tokens, shared_rows));
                let op = GateUpGrouped {
                    gate: gate.weights.matrix(),
                    up: up.weights.matrix(),
                    gate_bias: with_bias.then_some(gate_bias.slice()),
                    up_bias: with_bias.then_some(up_bias.slice()),
                    act,
                    groups: grouped.groups(),
                    n_used,
                    shared: shared.as_ref().map(|[gate, up]| SharedGateUp {
                        gate: gate.weights.matrix(), up: up.weights.matrix(), h: shared_h.view(),
                    }),
                    dependent: true,
                    tokens,
                };
                ops::gate_up_grouped(device, &op, x.q8(), h.view()).expect("gate_up_grouped");
                let what = format!("gate_up_grouped {ty} with {shared_ty:?}, {tokens} tokens, {n_used} x {rows} x {cols}");

                // By definition.
                let x_values = x.values(Activations::Q8);
                let x_values: Vec<&[f64]> = x_values.chunks(cols as usize).collect();
                let mut wanted = (Vec::new(), Vec::new());
                for (route, &id) in grouped.ids.iter().enumerate() {
                    let x = x_values[route / n_used as usize];
                    for row in (id * rows) as usize..((id + 1) * rows) as usize {
                        let (g, g_error) = sum(&gate, row, cols, x, with_bias.then_some(&biases[0]));
                        let (u, u_error) = sum(&up, row, cols, x, with_bias.then_some(&biases[1]));
                        let (value, error) = activated(act, g, u, [g_error, u_error]);
                        wanted.0.push(value);
                        wanted.1.push(error);
                    }
                }
                h.assert_quantised(device, &what, &wanted.0, &wanted.1);
                if let Some([gate, up]) = &shared {
                    let mut wanted = (Vec::new(), Vec::new());
                    for x in &x_values {
                        for row in 0..shared_rows as usize {
                            let ((g, g_error), (u, u_error)) = (sum(gate, row, cols, x, None), sum(up, row, cols, x, None));
                            let (value, error) = activated(act, g, u, [g_error, u_error]);
                            wanted.0.push(value);
                            wanted.1.push(error);
                        }
                    }
                    shared_h.assert_quantised(device, &format!("{what}, shared"), &wanted.0, &wanted.1);
                }

                // One operation after the other.
                let product = |w, experts, bias, n: u32| {
                    let y = Output::<_, f32>::new(device, n as usize);
                    ops::matvec_q8(device, &Matvec { experts, bias, ..Matvec::new(w, y.slice(), tokens) }, x.q8()).expect("matvec_q8");
                    y
                };
                let activate = |gate: &Output<_, f32>, up: &Output<_, f32>, n: u32, rows: u32| {
                    let (out, h) = (Output::<_, f32>::new(device, (n * rows) as usize), Q8Output::new(device, n, rows));
                    ops::gated_act_q8(device, Some(act), gate.slice(), up.slice(), out.slice(), h.view()).expect("act");
                    h
                };
                let experts = Some(Experts { ids: grouped.ids_d.slice(), ids_stride: n_used, n_used, shared_x: true });
                let gate = product(op.gate, experts, op.gate_bias, routes * rows);
                let up = product(op.up, experts, op.up_bias, routes * rows);
                h.assert_same_bits(device, &what, &activate(&gate, &up, routes, rows));
                if let Some(shared) = op.shared {
                    let gate = product(shared.gate, None, None, tokens * shared_rows);
                    let up = product(shared.up, None, None, tokens * shared_rows);
                    shared_h.assert_same_bits(device, &what, &activate(&gate, &up, tokens, shared_rows));
                }
            }
        }
    }

    fn experts_down_of_grouped_routes_and_their_sum(device) {
        let mut random = Random::new(32);
        for (i, ty) in quantised_types().enumerate() {
            for (k, shared_ty) in shared_types(ty).into_iter().enumerate() {
                let (tokens, n_used) = SIZES[(i + k) % SIZES.len()];
                let (rows, cols, shared_cols) = ([133u32, 37, 130][k], [512u32, 256, 768][i % 3], [256u32, 512][k % 2]);
                let w = known(device, &mut random, ty, [N_EXPERT, rows, cols]);
                let shared_w = shared_ty.map(|ty| known(device, &mut random, ty, [1, rows, shared_cols]));
                let routes = tokens * n_used;
                let h = Input::new(device, &random.units((routes * cols) as usize), cols);
                let shared_h = Input::new(device, &random.units((tokens * shared_cols) as usize), shared_cols);
                let grouped = Grouped::new(device, &mut random, tokens, n_used, N_EXPERT);
                let (weights, bias) = (random.units(routes as usize), random.units((N_EXPERT * rows) as usize));
                let (before, gate) = (random.units((tokens * rows) as usize), random.units(tokens as usize));
                let (with_bias, with_gate) = (k == 1, k != 1);
                let (weights_d, bias_d, gate_d) = (input(device, &weights), input(device, &bias), input(device, &gate));
                let y = Output::<_, f32>::new(device, (routes * rows) as usize);
                let shared_y = Output::<_, f32>::new(device, (tokens * rows) as usize);
                let op = ExpertDownGrouped {
                    w: w.weights.matrix(),
                    bias: with_bias.then_some(bias_d.slice()),
                    groups: grouped.groups(),
                    n_used,
                    shared: shared_w.as_ref().map(|w| SharedDownGrouped {
                        w: w.weights.matrix(), h: shared_h.q8(), y: shared_y.slice(),
                    }),
                    dependent: true,
                    tokens,
                };
                ops::expert_down_grouped(device, &op, h.q8(), y.slice()).expect("expert_down_grouped");
                let what = format!("expert_down_grouped {ty} with {shared_ty:?}, {tokens} tokens, {n_used} x {rows} x {cols}");

                // By definition.
                let h_values = h.values(Activations::Q8);
                let mut wanted = (Vec::new(), Vec::new());
                for (h, &id) in h_values.chunks(cols as usize).zip(&grouped.ids) {
                    for row in (id * rows) as usize..((id + 1) * rows) as usize {
                        let (value, error) = sum(&w, row, cols, h, with_bias.then_some(&bias));
                        wanted.0.push(value);
                        wanted.1.push(error);
                    }
                }
                assert_close(&what, &y.read(device), &wanted.0, |i| wanted.1[i]);
                if let Some(w) = &shared_w {
                    let mut wanted = (Vec::new(), Vec::new());
                    for h in shared_h.values(Activations::Q8).chunks(shared_cols as usize) {
                        for row in 0..rows as usize {
                            let (value, error) = sum(w, row, shared_cols, h, None);
                            wanted.0.push(value);
                            wanted.1.push(error);
                        }
                    }
                    assert_close(&format!("{what}, shared"), &shared_y.read(device), &wanted.0, |i| wanted.1[i]);
                }

                // Joined, they are what one launch for few tokens makes.
                let x = Output::holding(device, &before);
                let gate = with_gate.then_some(gate_d.slice());
                let shared = op.shared.map(|shared| SharedOut { y: shared.y, gate });
                ops::moe_weighted_acc(device, x.slice(), y.slice(), weights_d.slice(), shared, n_used, rows).expect("sum");
                let x_1 = Output::holding(device, &before);
                let one = ExpertDown {
                    w: op.w,
                    bias: op.bias,
                    ids: grouped.ids_d.slice(),
                    weights: weights_d.slice(),
                    n_used,
                    shared: op.shared.map(|shared| SharedDown { w: shared.w, h: shared.h, gate }),
                    dependent: true,
                    tokens,
                };
                ops::expert_down(device, &one, h.q8(), x_1.slice()).expect("expert_down");
                assert_same_bits(&what, &x.read(device), &x_1.read(device));
            }
        }
    }

    fn grouped_experts_refuse_bad_operands(device) {
        let of = |ty: GgmlType, shape: [u32; 3]| {
            let n = shape.iter().product::<u32>() as usize / ty.block_elems() * ty.block_bytes();
            Weights::new(device, ty, shape, &vec![0; n])
        };
        let (gate, up) = (of(GgmlType::Q4_0, [4, 32, 64]), of(GgmlType::Q4_0, [4, 32, 64]));
        let (one, other) = (of(GgmlType::Q8_0, [1, 32, 64]), of(GgmlType::Q5_0, [1, 32, 64]));
        let (one, other) = (one.matrix(), other.matrix());
        assert!(takes_gate_up_grouped(&gate.matrix(), &up.matrix(), Some((&one, &one))));
        assert!(!takes_gate_up_grouped(&gate.matrix(), &up.matrix(), Some((&other, &other))));
        assert!(!takes_gate_up_grouped(&gate.matrix(), &one, None));
        let x = Input::new(device, &[0.0; 128], 64);
        let grouped = Grouped::new(device, &mut Random::new(1), 2, 2, 4);
        let (h, shared_h) = (Q8Output::new(device, 4, 32), Q8Output::new(device, 2, 32));
        let op = GateUpGrouped {
            gate: gate.matrix(), up: up.matrix(), gate_bias: None, up_bias: None, act: GatedAct::SwiGlu,
            groups: grouped.groups(), n_used: 2, dependent: false, tokens: 2,
            shared: Some(SharedGateUp { gate: one, up: one, h: shared_h.view() }),
        };
        let run = |op: GateUpGrouped<'_>| ops::gate_up_grouped(device, &op, x.q8(), h.view());
        let refused = |op| matches!(run(op), Err(OpError::Operand { .. }));
        run(op).expect("the operands that the others are changed from");
        assert_eq!(run(GateUpGrouped { tokens: 0, ..op }).expect("nothing to do"), 0);
        assert!(refused(GateUpGrouped { tokens: 3, ..op }), "no room");
        assert!(refused(GateUpGrouped { n_used: 0, ..op }), "no routes");
        assert!(refused(GateUpGrouped { groups: RouteGroups { tile: TILES[0], ..op.groups }, ..op }), "other tiles");
        assert!(refused(GateUpGrouped { shared: Some(SharedGateUp { gate: one, up: one, h: h.view() }), ..op }), "overlap");
        let short = device.alloc_zeroed::<f32>(3).expect("memory");
        assert!(refused(GateUpGrouped { up_bias: Some(short.slice()), ..op }), "a short bias");
        let foreign = SharedGateUp { gate: other, up: other, h: shared_h.view() };
        assert!(matches!(run(GateUpGrouped { shared: Some(foreign), ..op }), Err(OpError::Type { .. })), "no such pair");

        let down = of(GgmlType::Q4_0, [4, 33, 64]);
        let shared_down = of(GgmlType::Q8_0, [1, 33, 64]);
        let h = Input::new(device, &[0.0; 256], 64);
        let (y, shared_y) = (device.alloc_zeroed::<f32>(4 * 33).expect("memory"), device.alloc_zeroed::<f32>(2 * 33).expect("memory"));
        let op = ExpertDownGrouped {
            w: down.matrix(), bias: None, groups: grouped.groups(), n_used: 2, dependent: false, tokens: 2,
            shared: Some(SharedDownGrouped { w: shared_down.matrix(), h: h.q8(), y: shared_y.slice() }),
        };
        let run = |op: ExpertDownGrouped<'_>| ops::expert_down_grouped(device, &op, h.q8(), y.slice());
        let refused = |op| matches!(run(op), Err(OpError::Operand { .. }));
        run(op).expect("the operands that the others are changed from");
        assert_eq!(run(ExpertDownGrouped { tokens: 0, ..op }).expect("nothing to do"), 0);
        assert!(refused(ExpertDownGrouped { tokens: 3, ..op }), "no room");
        assert!(refused(ExpertDownGrouped { bias: Some(short.slice()), ..op }), "a short bias");
        assert!(refused(ExpertDownGrouped { groups: RouteGroups { tile: TILES[0], ..op.groups }, ..op }), "other tiles");
        let own = SharedDownGrouped { w: shared_down.matrix(), h: h.q8(), y: y.slice() };
        assert!(refused(ExpertDownGrouped { shared: Some(own), ..op }), "overlap");
        let wide = SharedDownGrouped { w: one, h: h.q8(), y: shared_y.slice() };
        assert!(refused(ExpertDownGrouped { shared: Some(wide), ..op }), "other rows");
    }
}

#[test]
fn few_routes_are_as_many_as_experts_times_the_limit() {
    assert!(few_routes(512, 256, 2) && !few_routes(513, 256, 2));
    assert!(!few_routes(1, 256, 0) && few_routes(u32::MAX, u32::MAX, 1));
}
