//! Rotary position embedding.

use gpu_kernels::kernels::rope::RopeParams;
use host::gpu::{Device, ops};

use super::{Output, Random, assert_close, input, on_devices};

/// Frequencies of a base, as models define them.
fn frequencies(n_rot: u32, base: f64) -> Vec<f64> {
    (0..n_rot / 2).map(|i| base.powf(-2.0 * f64::from(i) / f64::from(n_rot))).collect()
}

fn expected(x: &[f32], pos: &[u32], inv_freq: &[f64], p: RopeParams) -> Vec<f64> {
    let mut out: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
    let (row_len, d, half) = ((p.n_head * p.head_dim) as usize, p.head_dim as usize, p.n_rot as usize / 2);
    for (row, &pos) in pos.iter().enumerate() {
        for head in 0..p.n_head as usize {
            for (i, freq) in inv_freq.iter().enumerate() {
                let (a, b) = if p.adjacent != 0 { (2 * i, 2 * i + 1) } else { (i, i + half) };
                let at = row * row_len + head * d;
                let (sin, cos) = (f64::from(pos) * freq).sin_cos();
                let (x, y) = (f64::from(x[at + a]), f64::from(x[at + b]));
                out[at + a] = (x * cos - y * sin) * f64::from(p.magnitude);
                out[at + b] = (x * sin + y * cos) * f64::from(p.magnitude);
            }
        }
    }
    out
}

/// Positions to a million: an angle in f32 would be off by 0.06 rad there.
#[test]
fn pairs_turn_by_position_times_frequency() {
    fn check<D: Device>(device: &D) {
        let pos = [0u32, 1, 127, 4096, 131_071, 1_000_003];
        for (n_head, head_dim, n_rot, adjacent, magnitude) in [
            (3, 64, 64, 1, 1.0),
            (2, 64, 64, 0, 1.346_57),
            (5, 256, 64, 0, 1.0),
            (1, 16, 0, 0, 1.0),
            (33, 8, 6, 1, 1.0),
        ] {
            let p = RopeParams { n_head, head_dim, n_rot, adjacent, magnitude };
            let inv_freq = frequencies(n_rot, 1e7);
            let x = Random::new(u64::from(head_dim)).units(pos.len() * (n_head * head_dim) as usize);
            let out = Output::holding(device, &x);
            let turns = input(device, &ops::turns(inv_freq.iter().copied()));
            ops::rope(device, out.slice(), input(device, &pos).slice(), turns.slice(), p).unwrap();
            let actual = out.read(device);
            let expected = expected(&x, &pos, &inv_freq, p);
            // Inputs are at most 1, sin and cos within 1.2e-7, the angle within 3e-7 at π.
            assert_close("rope", &actual, &expected, |_| 1.2e-6);
            for (i, (&x, &y)) in x.iter().zip(&actual).enumerate() {
                if i as u32 % head_dim >= n_rot {
                    assert_eq!(x.to_bits(), y.to_bits(), "dimension {i} beyond n_rot turned");
                }
            }
        }
    }
    on_devices!(check);
}
