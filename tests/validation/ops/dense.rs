//! Norms, products and element-wise operations.

use std::collections::BTreeMap;

use gpu_kernels::blocks::GgmlType;
use host::backend::{Backend, GatedAct};
use host::cpu::dequant::dequantize_row;
use serde::Deserialize;

use super::{Bench, Machine, Made, assert_close, f32s, noise, sequence};

/// `w·x / sqrt(mean(x²) + eps)`.
fn rms_norm(x: &[f32], w: &[f32], eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
    x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w) / (mean + eps).sqrt()).collect()
}

pub(super) fn norms_divide_by_the_root_of_mean_square_plus_eps<M: Machine>() {
    const EPS: f32 = 1e-6;
    for (rows, cols) in [(1, 64), (3, 576), (2, 2880)] {
        // One row is so small that eps decides.
        let mut x = noise(1, rows * cols);
        x[..cols].iter_mut().for_each(|x| *x *= 1e-4);
        let w = noise(2, cols);
        let mut bench =
            Bench::<M>::new(&[f32s("x", &[cols, rows], &x), f32s("w", &[cols], &w), f32s("h", &[32], &w[..32])]);
        let (mut input, w_norm, w_heads) = (bench.rows("x"), bench.vector("w"), bench.vector("h"));
        let batch = bench.batch(&sequence(0, rows));
        let mut out = bench.zeros(rows, cols);
        bench.b.rms_norm(&mut out, &input, &w_norm, EPS, &batch).expect("normed");
        let wanted: Vec<f64> = x.chunks(cols).flat_map(|x| rms_norm(x, &w, EPS.into())).collect();
        assert_close("rms_norm", &bench.read(&out, rows), &wanted, |i| 1e-6 * wanted[i].abs());
        bench.b.rms_norm_heads(&mut input, &w_heads, EPS, &batch).expect("normed");
        let wanted: Vec<f64> = x.chunks(32).flat_map(|x| rms_norm(x, &w[..32], EPS.into())).collect();
        assert_close("rms_norm_heads", &bench.read(&input, rows), &wanted, |i| 1e-6 * wanted[i].abs());
    }
}

#[derive(Deserialize)]
struct Golden {
    type_id: u32,
    blocks_hex: Vec<String>,
}

/// `n_elems` values of type `ty`, from the blocks of the golden file in some order.
fn weights(ty: GgmlType, n_elems: usize) -> Vec<u8> {
    if ty == GgmlType::F32 {
        return bytemuck::cast_slice(&noise(7, n_elems)).to_vec();
    }
    let golden: BTreeMap<String, Golden> =
        serde_json::from_str(include_str!("../../data/dequant.json")).expect("golden");
    let golden = golden.values().find(|golden| golden.type_id == ty as u32).expect("every type is in the file");
    let block = |i: usize| {
        let hex = &golden.blocks_hex[(i * 7 + i / 5) % golden.blocks_hex.len()];
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex"))
    };
    (0..n_elems / ty.block_elems()).flat_map(block).collect()
}

/// Values of a matrix, and for `x` `[m, cols]` the products and the sums of their terms' magnitudes.
fn products(w: &[f32], x: &[f32], cols: usize) -> (Vec<f64>, Vec<f64>) {
    let pairs = || x.chunks(cols).flat_map(|x| w.chunks(cols).map(move |w| x.iter().zip(w)));
    let product = |(x, w): (&f32, &f32)| f64::from(*x) * f64::from(*w);
    (pairs().map(|p| p.map(product).sum()).collect(), pairs().map(|p| p.map(product).map(f64::abs).sum()).collect())
}

pub(super) fn products_of_every_weight_type<M: Machine>() {
    for ty in GgmlType::ALL {
        // Rows and batches around the sizes of tiles; all dimensions differ.
        for (rows, cols, m) in [(1, 256, 1), (17, 512, 2), (67, 256, 5), (5, 1280, 33)] {
            let bytes = weights(*ty, rows * cols);
            let mut w = vec![0.0; rows * cols];
            dequantize_row(*ty, &bytes, &mut w);
            let (x, before) = (noise(3, m * cols), noise(4, m * rows));
            let (wanted, magnitude) = products(&w, &x, cols);
            let bound = |i: usize| M::PRODUCT_ERROR * (magnitude[i] + 1.0);

            let made = Made("w", vec![cols, rows], *ty, bytes);
            let tensors = [made, f32s("x", &[cols, m], &x), f32s("y", &[rows, m], &before)];
            let mut bench = Bench::<M>::new(&tensors);
            let (w, x, mut y) = (bench.matrix("w"), bench.rows("x"), bench.rows("y"));
            let batch = bench.batch(&sequence(0, m));
            bench.b.matmul_add(&mut y, &w, &x, &batch).expect("multiplied");
            let sums: Vec<f64> = wanted.iter().zip(&before).map(|(y, before)| y + f64::from(*before)).collect();
            assert_close(&format!("matmul_add {ty} {rows}x{cols}, {m} rows"), &bench.read(&y, m), &sums, bound);
            bench.b.matmul(&mut y, &w, &x, &batch).expect("multiplied");
            assert_close(&format!("matmul {ty} {rows}x{cols}, {m} rows"), &bench.read(&y, m), &wanted, bound);
        }
    }
}

pub(super) fn embedding_rows_are_dequantised<M: Machine>() {
    for ty in GgmlType::ALL {
        let (rows, cols) = (9, 256);
        let bytes = weights(*ty, rows * cols);
        let mut values = vec![0.0; rows * cols];
        dequantize_row(*ty, &bytes, &mut values);
        let mut bench = Bench::<M>::new(&[Made("table", vec![cols, rows], *ty, bytes)]);
        let out = bench.rows_at("table", &[8, 0, 3, 3], cols);
        let wanted: Vec<f64> =
            [8, 0, 3, 3].iter().flat_map(|r| &values[r * cols..][..cols]).map(|v| f64::from(*v)).collect();
        assert_close(&format!("embed {ty}"), &bench.read(&out, 4), &wanted, |i| 1e-7 * wanted[i].abs());
    }
}

pub(super) fn outputs_are_gathered_in_order<M: Machine>() {
    let (x, w) = (noise(5, 4 * 32), noise(6, 3 * 32));
    let mut bench = Bench::<M>::new(&[f32s("x", &[32, 4], &x), f32s("w", &[32, 3], &w)]);
    let (rows, w_head) = (bench.rows("x"), bench.matrix("w"));
    let mut batch = sequence(0, 4);
    batch.outputs = vec![1, 3];
    let batch = bench.batch(&batch);
    let (mut gathered, mut logits) = (bench.zeros(2, 32), bench.zeros(2, 3));
    bench.b.gather_outputs(&mut gathered, &rows, &batch).expect("gathered");
    let picked = [&x[32..64], &x[96..]].concat();
    assert_eq!(bench.read(&gathered, 2), picked);
    bench.b.head(&mut logits, &w_head, &gathered, &batch).expect("multiplied");
    let (wanted, magnitude) = products(&w, &picked, 32);
    assert_close("head", &bench.read(&logits, 2), &wanted, |i| M::PRODUCT_ERROR * (magnitude[i] + 1.0));
}

/// B26: the clamped activation.
pub(super) fn gated_activations_at_their_corners<M: Machine>() {
    let oai = [(8.0, 8.0, 55.999_62), (-8.0, -8.0, 5.86e-5), (1.0, 0.0, 0.84580), (0.5, -1.0, 0.0)];
    let silu = [(2.0, 3.0, 6.0 / (1.0 + (-2f64).exp())), (-90.0, 1.0, 0.0), (90.0, 1.0, 90.0), (0.0, 5.0, 0.0)];
    for (act, cases) in [(GatedAct::SwiGluOai, oai), (GatedAct::SwiGlu, silu)] {
        // A row of 32 for each: kernels work on aligned rows.
        let row = |value: fn(&(f32, f32, f64)) -> f32| cases.iter().flat_map(|c| [value(c); 32]).collect::<Vec<f32>>();
        let mut bench = Bench::<M>::new(&[f32s("g", &[32, 4], &row(|c| c.0)), f32s("u", &[32, 4], &row(|c| c.1))]);
        let (gate, up) = (bench.rows("g"), bench.rows("u"));
        let batch = bench.batch(&sequence(0, 4));
        let mut out = bench.zeros(4, 32);
        bench.b.gated_act(&mut out, &gate, &up, act, &batch).expect("activated");
        let wanted: Vec<f64> = cases.iter().flat_map(|c| [c.2; 32]).collect();
        assert_close(&format!("{act:?}"), &bench.read(&out, 4), &wanted, |i| 1e-5 * wanted[i].abs() + 1e-7);
    }
}

pub(super) fn sigmoid_of_the_gate_scales_what_is_added<M: Machine>() {
    let (x, y, gate) = (noise(8, 2 * 32), noise(9, 2 * 32), [0.75, -2.5]);
    let sigmoid = |g: f32| 1.0 / (1.0 + (-f64::from(g)).exp());
    for gated in [true, false] {
        let tensors = [f32s("x", &[32, 2], &x), f32s("y", &[32, 2], &y), f32s("g", &[1, 2], &gate)];
        let mut bench = Bench::<M>::new(&tensors);
        let (mut sum, added, logits) = (bench.rows("x"), bench.rows("y"), bench.rows("g"));
        let batch = bench.batch(&sequence(0, 2));
        bench.b.sigmoid_scale_acc(&mut sum, &added, gated.then_some(&logits), &batch).expect("added");
        let scale = |i: usize| if gated { sigmoid(gate[i / 32]) } else { 1.0 };
        let wanted: Vec<f64> = (0..64).map(|i| f64::from(x[i]) + scale(i) * f64::from(y[i])).collect();
        assert_close("sigmoid_scale_acc", &bench.read(&sum, 2), &wanted, |_| 1e-6);
    }
}
