//! The router, and joining the experts.

use host::backend::RouterRule;
use host::gpu::Device;
use host::gpu::ops::{self, SharedOut};

use super::{Output, Random, assert_close, assert_same_bits, input, on_devices, sigmoid, wide};

/// The definition: stable order by falling logit, so that the lowest index comes first among equals.
fn expected(logits: &[f64], n_used: usize, rule: RouterRule) -> (Vec<u32>, Vec<f64>) {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let chosen = &order[..n_used];
    let over = match rule {
        RouterRule::SoftmaxChosen => chosen,
        RouterRule::SoftmaxAll => &order,
    };
    let max = logits[order[0]];
    let sum: f64 = over.iter().map(|&i| (logits[i] - max).exp()).sum();
    (chosen.iter().map(|&i| i as u32).collect(), chosen.iter().map(|&i| (logits[i] - max).exp() / sum).collect())
}

fn check<D: Device>(device: &D, logits: &[f32], bias: Option<&[f32]>, n_expert: usize, n_used: usize) {
    let rows = logits.len() / n_expert;
    for rule in [RouterRule::SoftmaxChosen, RouterRule::SoftmaxAll] {
        let run = || {
            let (ids, weights) = (Output::<D, u32>::new(device, rows * n_used), Output::new(device, rows * n_used));
            let (logits, bias) = (input(device, logits), bias.map(|b| input(device, b)));
            let bias = bias.as_ref().map(|b| b.slice());
            let (n, k) = (n_expert as u32, n_used as u32);
            ops::softmax_topk(device, logits.slice(), bias, ids.slice(), weights.slice(), n, k, rule).unwrap();
            (ids.read(device), weights.read(device))
        };
        let (ids, weights): (Vec<u32>, Vec<f32>) = run();
        for row in 0..rows {
            // The kernel adds the bias in f32, which may make equals: so does the oracle.
            let biased: Vec<f32> =
                (0..n_expert).map(|i| logits[row * n_expert + i] + bias.map_or(0.0, |b| b[i])).collect();
            let (e_ids, e_weights) = expected(&wide(&biased), n_used, rule);
            assert_eq!(ids[row * n_used..][..n_used], e_ids, "row {row}, {rule:?}");
            let row_weights = &weights[row * n_used..][..n_used];
            assert_close("softmax_topk", row_weights, &e_weights, |i| 2e-6 * e_weights[i] + 1e-30);
        }
        let again = run();
        assert_same_bits("ids", &ids, &again.0);
        assert_same_bits("weights", &weights, &again.1);
    }
}

#[test]
fn the_largest_logits_are_chosen_and_weighed() {
    fn checks<D: Device>(device: &D) {
        for (rows, n_expert, n_used) in [(1, 1, 1), (3, 6, 3), (5, 32, 4), (2, 33, 32), (9, 256, 8), (1, 1024, 10)] {
            let mut random = Random::new(n_expert as u64);
            let logits: Vec<f32> = random.units(rows * n_expert).iter().map(|x| 8.0 * x).collect();
            check(device, &logits, None, n_expert, n_used);
            let bias = random.units(n_expert);
            check(device, &logits, Some(&bias), n_expert, n_used);
        }
    }
    on_devices!(checks);
}

#[test]
fn equal_logits_choose_the_lowest_index() {
    fn checks<D: Device>(device: &D) {
        check(device, &[5.0; 4], None, 4, 2);
        check(device, &[1.0; 100], None, 100, 32);
        // Few distinct values over many lanes.
        let logits: Vec<f32> = (0..512).map(|i| (i * 7 % 3) as f32).collect();
        check(device, &logits, None, 256, 8);
    }
    on_devices!(checks);
}

/// A broken row still names experts that exist, so that what follows stays in bounds.
#[test]
fn a_row_of_nan_names_distinct_experts() {
    fn checks<D: Device>(device: &D) {
        for logits in [[f32::NAN; 40], [f32::NEG_INFINITY; 40]] {
            let (ids, weights) = (Output::<D, u32>::new(device, 8), Output::<D, f32>::new(device, 8));
            let rule = RouterRule::SoftmaxChosen;
            ops::softmax_topk(device, input(device, &logits).slice(), None, ids.slice(), weights.slice(), 40, 8, rule)
                .unwrap();
            assert_eq!(ids.read(device), [0, 1, 2, 3, 4, 5, 6, 7]);
            assert_eq!(weights.read(device), [0.125; 8]);
        }
    }
    on_devices!(checks);
}

#[test]
fn experts_are_added_by_weight() {
    fn checks<D: Device>(device: &D) {
        let shapes = [(1usize, 1usize, 1usize), (3, 8, 257), (2, 4, 2880), (5, 17, 300)];
        for (i, (rows, n_used, cols)) in shapes.into_iter().enumerate() {
            let mut random = Random::new(cols as u64);
            let (x, y) = (random.units(rows * cols), random.units(rows * n_used * cols));
            let weights = random.units(rows * n_used);
            let (shared, gate) = (random.units(rows * cols), random.units(rows));
            let (with_shared, with_gate) = (i % 2 == 1, i == 1);
            let out = Output::holding(device, &x);
            let (y_in, w_in) = (input(device, &y), input(device, &weights));
            let (shared_in, gate_in) = (input(device, &shared), input(device, &gate));
            let shared_out = SharedOut { y: shared_in.slice(), gate: with_gate.then_some(gate_in.slice()) };
            let shared_out = with_shared.then_some(shared_out);
            let (n, k) = (n_used as u32, cols as u32);
            ops::moe_weighted_acc(device, out.slice(), y_in.slice(), w_in.slice(), shared_out, n, k).unwrap();
            let expected: Vec<f64> = (0..rows * cols)
                .map(|i| {
                    let (row, col) = (i / cols, i % cols);
                    let routes = row * n_used..(row + 1) * n_used;
                    let scale = if with_gate { sigmoid(f64::from(gate[row])) } else { 1.0 };
                    let shared = if with_shared { scale * f64::from(shared[i]) } else { 0.0 };
                    let routed = routes.map(|r| f64::from(weights[r]) * f64::from(y[r * cols + col])).sum::<f64>();
                    f64::from(x[i]) + routed + shared
                })
                .collect();
            // At most n_used + 2 roundings of sums below n_used + 2, and those of a sigmoid.
            let bound = 6e-8 * ((n_used + 2) * (n_used + 2) + 8) as f64;
            assert_close("moe_weighted_acc", &out.read(device), &expected, |_| bound);
        }
    }
    on_devices!(checks);
}
