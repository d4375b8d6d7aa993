//! A kernel of ours against its equation, in every order of lanes and blocks.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::rms_norm::{RMS_NORM_SHARED_BYTES, RMS_NORM_THREADS, rms_norm};

use super::in_every_order;

/// Sizes that break tiles, and the reference model's.
const RMS_NORM_SHAPES: [(u32, u32); 8] =
    [(1, 4), (3, 124), (2, 128), (5, 132), (3, 1020), (2, 1028), (7, 2048), (32, 256)];

#[test]
fn rms_norm_matches_its_equation() {
    const EPS: f32 = 1e-6;
    for (rows, n) in RMS_NORM_SHAPES {
        let value = |i: u32, m: u32| (i.wrapping_mul(m) % 2003) as f32 / 500.0 - 2.0;
        let x: Vec<f32> = (0..rows * n).map(|i| value(i, 7919)).collect();
        let w: Vec<f32> = (0..n).map(|i| value(i, 104_729)).collect();
        let launch = Launch::linear(rows, RMS_NORM_THREADS).shared(RMS_NORM_SHARED_BYTES);
        let y = in_every_order(|device| {
            let (x, w) = (device.upload(&x), device.upload(&w));
            let y = device.alloc::<f32>(x.len());
            device.launch(rms_norm, launch, (x.as_ptr(), w.as_ptr(), y.as_mut_ptr(), n, EPS)).expect("no fault");
            // In place.
            device.launch(rms_norm, launch, (x.as_ptr(), w.as_ptr(), x.as_mut_ptr(), n, EPS)).expect("no fault");
            assert_eq!(x.to_vec(), y.to_vec());
            y.to_vec()
        });
        for (row, (x, y)) in x.chunks(n as usize).zip(y.chunks(n as usize)).enumerate() {
            let mean = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / f64::from(n);
            let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
            // A lane sums up to n/256 rounding errors and the trees add 10; the root halves the relative error;
            // then come two products and the approximate root.
            let bound = (f64::from(n / 256 + 10) / 2.0 + 4.0) * f64::from(f32::EPSILON) / 2.0;
            for (i, (&x, &y)) in x.iter().zip(y).enumerate() {
                let want = f64::from(x) * scale * f64::from(w[i]);
                let error = (f64::from(y) - want).abs();
                assert!(
                    error <= bound * want.abs(),
                    "{rows}×{n}, row {row}, column {i}: {y}, want {want}, bound {bound:e}"
                );
            }
        }
    }
}
