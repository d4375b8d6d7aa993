//! Quantised activations against their definition.

use host::gpu::Device;
use host::gpu::ops::{OpError, Q8, quantize_q8};

use super::{Output, Random, devices};

/// Quantised rows on the host.
pub(crate) struct Quantized {
    pub(crate) qs: Vec<i8>,
    pub(crate) d: Vec<f32>,
    pub(crate) s: Vec<f32>,
}

/// Runs the kernel on `rows` rows, `stride` apart.
fn run<D: Device>(device: &D, x: &[f32], rows: u32, cols: u32, stride: u32) -> Quantized {
    let n = (rows * cols) as usize;
    let x = device.alloc_from(x).expect("memory");
    let (qs, d, s) = (Output::new(device, n), Output::new(device, n / 16), Output::new(device, n / 16));
    let out = Q8 { qs: qs.slice(), d: d.slice(), s: s.slice(), cols };
    quantize_q8(device, x.slice(), stride, out, rows).expect("quantize_q8");
    Quantized { qs: qs.read(device), d: d.read(device), s: s.read(device) }
}

devices! {
    fn quantize_q8_is_within_half_a_step(device) {
        let mut random = Random::new(2);
        // Two blocks, less and more than a warp's 128 elements, a block of lanes ± 1, twice a prime number of blocks.
        let shapes =
            [(1, 32, 32), (3, 96, 100), (2, 128, 128), (1, 1024, 1024), (2, 1056, 1060), (5, 41 * 32, 41 * 32)];
        for (rows, cols, stride) in shapes {
            let x: Vec<f32> = (0..rows * stride).map(|_| random.unit() * (random.unit() * 20.0).exp2()).collect();
            let got = run(device, &x, rows, cols, stride);
            for row in 0..rows as usize {
                let x = &x[row * stride as usize..][..cols as usize];
                for (b, x) in x.chunks_exact(16).enumerate() {
                    let block = row * cols as usize / 16 + b;
                    let (d, qs) = (f64::from(got.d[block]), &got.qs[block * 16..][..16]);
                    let max = x.iter().fold(0.0, |max: f64, x| max.max(f64::from(x.abs())));
                    // d is one f32 division from exact.
                    assert!((d - max / 127.0).abs() <= max / 127.0 * 2f64.powi(-23), "d[{block}] = {d}, max {max}");
                    for (i, (&x, &q)) in x.iter().zip(qs).enumerate() {
                        let error = (f64::from(x) - d * f64::from(q)).abs();
                        // Half a step, and the rounding of x·(127/max) at a magnitude up to 127.
                        assert!(error <= d * (0.5 + 127.0 * 2f64.powi(-22)), "x[{i}] = {x}, {q}·{d}");
                    }
                    let sum: i32 = qs.iter().map(|&q| i32::from(q)).sum();
                    let (s, want) = (f64::from(got.s[block]), d * f64::from(sum));
                    assert!((s - want).abs() <= want.abs() * 2f64.powi(-24), "s of block {block}: {s}, {want}");
                }
            }
        }
    }

    fn quantize_q8_of_zeros_is_zero(device) {
        let got = run(device, &[0.0; 64], 1, 64, 64);
        assert!(got.qs.iter().all(|&q| q == 0) && got.d == [0.0; 4] && got.s == [0.0; 4]);
    }

    /// Of numbers whose scale has no finite reciprocal, none is lost that a product could show.
    fn quantize_q8_of_tiny_numbers_is_zero_or_right(device) {
        for exponent in [-149, -130, -126, -120, -119, -118, -100, 100, 123] {
            let max = 2f32.powi(exponent);
            let got = run(device, &[max; 32], 1, 32, 32);
            let value = f64::from(got.d[0]) * f64::from(got.qs[0]);
            let error = (value - f64::from(max)).abs();
            assert!(error <= 2f64.powi(-119) || error <= f64::from(max) * 2f64.powi(-22), "2^{exponent}: {value:e}");
            assert!(got.qs.iter().all(|&q| q == 0 || q == 127) && got.s[0].is_finite(), "2^{exponent}: {:?}", got.qs);
        }
    }

    fn quantize_q8_uses_the_whole_range(device) {
        let mut x = [0.0; 32];
        (x[3], x[15], x[17]) = (-2.54, 1.27, 1e-3);
        let got = run(device, &x, 1, 32, 32);
        assert_eq!((got.qs[3], got.qs[15]), (-127, 64), "2.54 is 127 steps, 1.27 is 63.5 and goes to even");
        assert_eq!(got.qs[17], 127, "a block of its own");
        assert_eq!(got.qs.iter().filter(|&&q| q != 0).count(), 3);
    }

    fn quantize_q8_does_not_lose_a_nan(device) {
        for bad in [f32::NAN, f32::INFINITY] {
            for place in [0, 5, 15] {
                let mut x = [1.0; 32];
                x[place] = bad;
                let got = run(device, &x, 1, 32, 32);
                assert!(!(got.d[0] * f32::from(got.qs[0])).is_finite(), "{bad} at {place}: d = {}", got.d[0]);
                assert!(got.d[1].is_finite(), "the next block is its own");
            }
        }
    }

    fn quantize_q8_refuses_bad_shapes(device) {
        let x = device.alloc_zeroed::<f32>(256).expect("memory");
        let qs = device.alloc_zeroed::<i8>(128).expect("memory");
        let [d, s] = [8; 2].map(|n| device.alloc_zeroed::<f32>(n).expect("memory"));
        let q8 = |cols| Q8 { qs: qs.slice(), d: d.slice(), s: s.slice(), cols };
        let refused = |result| matches!(result, Err(OpError::Operand { .. }));
        assert!(refused(quantize_q8(device, x.slice(), 128, q8(48), 1)), "48 columns");
        assert!(refused(quantize_q8(device, x.slice(), 126, q8(64), 2)), "unaligned stride");
        assert!(refused(quantize_q8(device, x.slice(), 32, q8(64), 2)), "rows overlap");
        assert!(refused(quantize_q8(device, x.slice(), 128, q8(128), 2)), "outputs too small");
        assert!(refused(quantize_q8(device, x.part(1..).expect("inside"), 64, q8(64), 1)), "unaligned x");
        assert!(quantize_q8(device, x.slice(), 128, q8(128), 1).is_ok());
        assert!(quantize_q8(device, x.slice(), 128, q8(64), 0).is_ok(), "no rows");
    }
}
