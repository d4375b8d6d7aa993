//! Routing, and the products of experts.

use host::backend::{Backend, RouterRule};

use super::{Bench, Machine, assert_close, f32s, noise, sequence};

const COLS: usize = 32;

/// The experts that a row of logits goes to and their weights, read through operations that use them.
fn routed<M: Machine>(logits: &[f32], bias: Option<&[f32]>, n_used: usize, rule: RouterRule) -> (Vec<f32>, Vec<f32>) {
    let n_expert = logits.len();
    // Expert `e` maps the unit vector to rows of `e`.
    let experts: Vec<f32> = (0..n_expert * COLS * COLS).map(|i| (i / (COLS * COLS)) as f32).collect();
    let unit: Vec<f32> = (0..COLS).map(|i| if i == 0 { 1.0 } else { 0.0 }).collect();
    let mut tensors = vec![
        f32s("logits", &[n_expert, 1], logits),
        f32s("experts", &[COLS, COLS, n_expert], &experts),
        f32s("unit", &[COLS, 1], &unit),
        f32s(
            "slots",
            &[COLS, COLS],
            &(0..COLS * COLS).map(|i| if i % (COLS + 1) == 0 { 1.0 } else { 0.0 }).collect::<Vec<_>>(),
        ),
        f32s("zero", &[COLS, 1], &[0.0; COLS]),
    ];
    tensors.extend(bias.map(|bias| f32s("bias", &[n_expert], bias)));
    let mut bench = Bench::<M>::new(&tensors);
    let batch = bench.batch(&sequence(0, 1));
    let (logits, bias) = (bench.rows("logits"), bias.map(|_| bench.vector("bias")));
    let mut routes = bench.b.routes(1, n_used as u32).expect("allocated");
    bench.b.route(&mut routes, &logits, bias.as_ref(), rule, &batch).expect("routed");

    let (experts, unit) = (bench.matrix("experts"), bench.rows("unit"));
    let mut ids = bench.zeros(n_used, COLS);
    bench.b.expert_matmul(&mut ids, &experts, None, &unit, false, &routes, &batch).expect("multiplied");
    // Route `j` puts its weight into column `j`.
    let (slots, mut weights) =
        (bench.rows_at("slots", &(0..n_used as u32).collect::<Vec<_>>(), COLS), bench.rows("zero"));
    bench.b.moe_weighted_acc(&mut weights, &slots, &routes, &batch).expect("added");
    let ids = bench.read(&ids, n_used).iter().step_by(COLS).copied().collect();
    (ids, bench.read(&weights, 1)[..n_used].to_vec())
}

/// B26: softmax over all experts or over the chosen ones.
pub(super) fn routing_weights_follow_the_rule<M: Machine>() {
    for (rule, wanted) in [(RouterRule::SoftmaxChosen, [0.7311, 0.2689]), (RouterRule::SoftmaxAll, [0.6439, 0.2369])] {
        let (experts, weights) = routed::<M>(&[0.0, 2.0, -1.0, 1.0], None, 2, rule);
        assert_eq!(experts, [1.0, 3.0]);
        assert_close(&format!("{rule:?}"), &weights, &wanted, |_| 1e-4);
    }
    // As many experts as the reference model has.
    let logits = noise(1, 256);
    let (experts, weights) = routed::<M>(&logits, None, 8, RouterRule::SoftmaxChosen);
    let mut order: Vec<usize> = (0..256).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    assert_eq!(experts, order[..8].iter().map(|e| *e as f32).collect::<Vec<_>>());
    let sum: f64 = order[..8].iter().map(|e| f64::from(logits[*e]).exp()).sum();
    let wanted: Vec<f64> = order[..8].iter().map(|e| f64::from(logits[*e]).exp() / sum).collect();
    assert_close("eight of 256", &weights, &wanted, |_| 1e-6);
}

/// B26: on a tie the lowest index.
pub(super) fn equal_logits_choose_the_lowest_experts<M: Machine>() {
    let (experts, weights) = routed::<M>(&[5.0; 4], None, 2, RouterRule::SoftmaxChosen);
    assert_eq!((experts, weights), (vec![0.0, 1.0], vec![0.5, 0.5]));
    let (experts, _) = routed::<M>(&[1.0, 3.0, 3.0, 3.0, 2.0], None, 4, RouterRule::SoftmaxChosen);
    assert_eq!(experts, [1.0, 2.0, 3.0, 4.0]);
}

/// B26: the router's bias.
pub(super) fn the_router_bias_counts_before_the_choice<M: Machine>() {
    let bias = Some(&[0.0, 0.0, 3.0, 0.0][..]);
    let (experts, weights) = routed::<M>(&[2.0, 1.0, 0.0, -1.0], bias, 2, RouterRule::SoftmaxChosen);
    assert_eq!(experts, [2.0, 0.0]);
    assert_close("biased", &weights, &[0.7311, 0.2689], |_| 1e-4);
}

pub(super) fn expert_products_have_their_experts_weights_and_bias<M: Machine>() {
    let (n_expert, n_used, m, rows) = (5, 2, 7, 40);
    let (w, bias) = (noise(2, n_expert * rows * COLS), noise(3, n_expert * rows));
    let logits = noise(4, m * n_expert);
    for x_routed in [false, true] {
        let x_rows = if x_routed { m * n_used } else { m };
        let x = noise(5, x_rows * COLS);
        let mut bench = Bench::<M>::new(&[
            f32s("w", &[COLS, rows, n_expert], &w),
            f32s("bias", &[rows, n_expert], &bias),
            f32s("x", &[COLS, x_rows], &x),
            f32s("logits", &[n_expert, m], &logits),
        ]);
        let (stack, bias_vector) = (bench.matrix("w"), bench.vector("bias"));
        let (input, router) = (bench.rows("x"), bench.rows("logits"));
        let batch = bench.batch(&sequence(0, m));
        let mut routes = bench.b.routes(m as u32, n_used as u32).expect("allocated");
        bench.b.route(&mut routes, &router, None, RouterRule::SoftmaxChosen, &batch).expect("routed");
        let mut out = bench.zeros(m * n_used, rows);
        bench
            .b
            .expert_matmul(&mut out, &stack, Some(&bias_vector), &input, x_routed, &routes, &batch)
            .expect("multiplied");

        let mut wanted = Vec::new();
        for route in 0..m * n_used {
            let logits = &logits[route / n_used * n_expert..][..n_expert];
            let mut order: Vec<usize> = (0..n_expert).collect();
            order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
            let expert = order[route % n_used];
            let x = &x[(if x_routed { route } else { route / n_used }) * COLS..][..COLS];
            for r in 0..rows {
                let w = &w[(expert * rows + r) * COLS..][..COLS];
                let product: f64 = w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                wanted.push(product + f64::from(bias[expert * rows + r]));
            }
        }
        let bound = M::PRODUCT_ERROR * COLS as f64;
        assert_close(&format!("x_routed {x_routed}"), &bench.read(&out, m * n_used), &wanted, |_| bound);
    }
}
