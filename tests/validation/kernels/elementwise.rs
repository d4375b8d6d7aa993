//! Element-wise operations, gated activations and norms.

use host::backend::GatedAct;
use host::gpu::{Device, ops};

use super::{EPS, Output, Random, assert_close, assert_same_bits, input, on_devices, sigmoid, wide};

/// Sizes around the warp and the block, and a prime.
const SIZES: [usize; 9] = [0, 1, 31, 32, 33, 255, 256, 257, 1009];

#[test]
fn sums_and_scaled_sums() {
    fn check<D: Device>(device: &D) {
        for n in SIZES {
            let mut random = Random::new(n as u64);
            let (x, y) = (random.units(n), random.units(n));
            let y_in = input(device, &y);
            let out = Output::holding(device, &x);
            ops::add(device, out.slice(), y_in.slice()).unwrap();
            let expected: Vec<f64> = x.iter().zip(&y).map(|(&x, &y)| f64::from(x) + f64::from(y)).collect();
            assert_close("add", &out.read(device), &expected, |i| EPS * expected[i].abs());

            let out = Output::holding(device, &x);
            ops::scale_accumulate(device, out.slice(), y_in.slice(), -1.75).unwrap();
            let expected: Vec<f64> = x.iter().zip(&y).map(|(&x, &y)| f64::from(x) - 1.75 * f64::from(y)).collect();
            assert_close("scale_accumulate", &out.read(device), &expected, |i| EPS * expected[i].abs());
        }
    }
    on_devices!(check);
}

#[test]
fn biases_and_gates_of_rows() {
    fn check<D: Device>(device: &D) {
        for (rows, cols) in [(1, 1), (3, 31), (5, 257), (2, 2048)] {
            let mut random = Random::new(rows as u64 * 7919 + cols as u64);
            let (x, y, bias, gate) =
                (random.units(rows * cols), random.units(rows * cols), random.units(cols), random.units(rows));
            let out = Output::holding(device, &x);
            ops::add_bias(device, out.slice(), input(device, &bias).slice()).unwrap();
            let expected: Vec<f64> =
                x.iter().enumerate().map(|(i, &x)| f64::from(x) + f64::from(bias[i % cols])).collect();
            assert_close("add_bias", &out.read(device), &expected, |i| EPS * expected[i].abs());

            let out = Output::holding(device, &x);
            let (y_in, gate_in) = (input(device, &y), input(device, &gate));
            ops::sigmoid_scale_acc(device, out.slice(), y_in.slice(), gate_in.slice()).unwrap();
            let added = |i: usize| sigmoid(f64::from(gate[i / cols])) * f64::from(y[i]);
            let expected: Vec<f64> = x.iter().enumerate().map(|(i, &x)| f64::from(x) + added(i)).collect();
            // The sigmoid's own error is 5e-7 of what it scales.
            assert_close("sigmoid_scale_acc", &out.read(device), &expected, |i| {
                EPS * expected[i].abs() + 6e-7 * added(i).abs()
            });

            let out = Output::holding(device, &x);
            ops::sigmoid_mul(device, out.slice(), y_in.slice()).unwrap();
            let expected: Vec<f64> = x.iter().zip(&y).map(|(&x, &y)| f64::from(x) * sigmoid(f64::from(y))).collect();
            assert_close("sigmoid_mul", &out.read(device), &expected, |i| 7e-7 * expected[i].abs());
        }
    }
    on_devices!(check);
}

#[test]
fn heads_are_split_and_rows_gathered() {
    fn check<D: Device>(device: &D) {
        let (rows, heads, d) = (3, 5, 7);
        let qg = Random::new(1).units(rows * heads * 2 * d);
        let (q, gate) = (Output::new(device, rows * heads * d), Output::new(device, rows * heads * d));
        ops::split_gate(device, input(device, &qg).slice(), q.slice(), gate.slice(), d as u32).unwrap();
        let (q, gate): (Vec<f32>, Vec<f32>) = (q.read(device), gate.read(device));
        for head in 0..rows * heads {
            assert_eq!(q[head * d..][..d], qg[head * 2 * d..][..d], "q of head {head}");
            assert_eq!(gate[head * d..][..d], qg[head * 2 * d + d..][..d], "gate of head {head}");
        }
        let joined = Output::new(device, qg.len());
        ops::join_rows(device, input(device, &q).slice(), input(device, &gate).slice(), joined.slice(), d as u32)
            .unwrap();
        assert_eq!(joined.read(device), qg, "joining is the inverse");
        let picked = [14u32, 0, 7];
        let out = Output::new(device, picked.len() * 2 * d);
        let (x, picked_in) = (input(device, &qg), input(device, &picked));
        // SAFETY: `qg` has 15 rows of 14 elements.
        #[expect(unsafe_code, reason = "the rows are checked by eye")]
        unsafe {
            ops::gather_rows(device, x.slice(), picked_in.slice(), out.slice(), 2 * d as u32).unwrap();
        }
        let expected: Vec<f32> = picked.iter().flat_map(|&row| qg[row as usize * 2 * d..][..2 * d].to_vec()).collect();
        assert_eq!(out.read(device), expected);
    }
    on_devices!(check);
}

/// The corners are those of the definition: both clamps, both sides of zero.
const CORNERS: [f32; 11] = [-100.0, -8.0, -7.0, -1.0, -0.0, 0.0, 0.5, 1.0, 7.0, 8.0, 100.0];

#[test]
fn gated_activations() {
    fn check<D: Device>(device: &D) {
        let mut random = Random::new(5);
        let mut gate: Vec<f32> = CORNERS.iter().flat_map(|&g| CORNERS.map(|_| g)).collect();
        let mut up: Vec<f32> = CORNERS.iter().flat_map(|_| CORNERS).collect();
        gate.extend(random.units(300).iter().map(|x| 10.0 * x));
        up.extend(random.units(300).iter().map(|x| 10.0 * x));
        for act in [GatedAct::SwiGlu, GatedAct::SwiGluOai] {
            let out = Output::new(device, gate.len());
            let (gate_in, up_in) = (input(device, &gate), input(device, &up));
            ops::gated_act(device, act, gate_in.slice(), up_in.slice(), out.slice()).unwrap();
            let expected: Vec<f64> = wide(&gate)
                .iter()
                .zip(wide(&up))
                .map(|(&g, u)| match act {
                    GatedAct::SwiGlu => g * sigmoid(g) * u,
                    GatedAct::SwiGluOai => {
                        let g = g.min(7.0);
                        g * sigmoid(1.702 * g) * (u.clamp(-7.0, 7.0) + 1.0)
                    }
                })
                .collect();
            // The exponent's own rounding grows with it; below the smallest normal number the GPU's exp gives 0.
            let relative = |i: usize| 1e-6 + 2.0 * EPS * f64::from(gate[i]).abs();
            assert_close(
                if act == GatedAct::SwiGlu { "swiglu" } else { "swiglu_oai" },
                &out.read(device),
                &expected,
                |i| relative(i) * expected[i].abs() + 1e-36,
            );

            // In place, as the engine uses it.
            let again = Output::holding(device, &gate);
            ops::gated_act(device, act, again.slice(), up_in.slice(), again.slice()).unwrap();
            assert_same_bits("gated_act", &out.read(device), &again.read(device));
        }
    }
    on_devices!(check);
}

#[test]
fn root_mean_square_norm() {
    fn check<D: Device>(device: &D) {
        for (rows, n) in [(1, 4), (3, 64), (2, 1020), (2, 2048), (1, 4100)] {
            let mut random = Random::new(n as u64);
            let (x, w) = (random.units(rows * n), random.units(n));
            let y = Output::new(device, rows * n);
            let w_in = input(device, &w);
            ops::rms_norm(device, input(device, &x).slice(), w_in.slice(), y.slice(), 1e-6).unwrap();
            let expected: Vec<f64> = (0..rows * n)
                .map(|i| {
                    let row = &x[i / n * n..][..n];
                    let mean = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n as f64;
                    f64::from(w[i % n]) * f64::from(x[i]) / (mean + 1e-6).sqrt()
                })
                .collect();
            // 256 lanes sum n/256 squares each, then a tree of eight; the root halves the error.
            let relative = EPS * (8.0 + (n as f64 / 256.0).ceil()) + 2e-7;
            assert_close("rms_norm", &y.read(device), &expected, |i| relative * expected[i].abs() + 1e-30);

            let again = Output::holding(device, &x);
            ops::rms_norm(device, again.slice(), w_in.slice(), again.slice(), 1e-6).unwrap();
            assert_same_bits("rms_norm", &y.read(device), &again.read(device));

            // The residual form is the sum, and the plain norm of it.
            let r: Vec<f32> = (0..rows * n).map(|i| (i % 5) as f32 * 0.5).collect();
            let before: Vec<f32> = x.iter().zip(&r).map(|(x, r)| x - r).collect();
            let sum: Vec<f32> = before.iter().zip(&r).map(|(a, b)| a + b).collect();
            let (x_out, y_out) = (Output::holding(device, &before), Output::new(device, rows * n));
            let r_in = input(device, &r);
            ops::rms_norm_add(device, x_out.slice(), r_in.slice(), w_in.slice(), y_out.slice(), 1e-6).unwrap();
            assert_same_bits("rms_norm_add x", &sum, &x_out.read(device));
            let plain = Output::new(device, rows * n);
            ops::rms_norm(device, input(device, &sum).slice(), w_in.slice(), plain.slice(), 1e-6).unwrap();
            assert_same_bits("rms_norm_add y", &plain.read(device), &y_out.read(device));
        }
    }
    on_devices!(check);
}
