//! Drawing a token.

use gpu_kernels::kernels::sample::SampleParams;
use host::gpu::{Device, ops};

use super::{Output, Random, input, on_devices};

fn sample<D: Device>(device: &D, logits: &[f32], params: &[SampleParams]) -> Vec<u32> {
    let token = Output::new(device, params.len());
    let n = (logits.len() / params.len()) as u32;
    ops::sample(device, input(device, logits).slice(), input(device, params).slice(), token.slice(), n).unwrap();
    token.read(device)
}

/// The weight that the definition gives each token, 0 where it is cut; `None` where a cut is a matter of rounding.
fn kept(logits: &[f32], p: &SampleParams) -> Option<Vec<f64>> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |l: f32| ((f64::from(l) - f64::from(max)) * f64::from(p.inv_temperature)).exp();
    let larger = |l: f32| logits.iter().filter(move |&&other| other > l);
    let in_top_k = |l: f32| p.top_k == 0 || larger(l).count() < p.top_k as usize;
    let total: f64 = logits.iter().filter(|&&l| in_top_k(l)).map(|&l| weight(l)).sum();
    let mut out = Vec::new();
    for &l in logits {
        let mass: f64 = larger(l).map(|&l| weight(l)).sum();
        let (limit, least) = (f64::from(p.top_p) * total, f64::from(p.min_p));
        let near = |a: f64, b: f64| (a - b).abs() < 1e-5 * total;
        if in_top_k(l) && ((p.top_p < 1.0 && near(mass, limit)) || (least > 0.0 && near(weight(l), least))) {
            return None;
        }
        let stays = in_top_k(l) && (p.top_p >= 1.0 || mass < limit) && weight(l) >= least;
        out.push(if stays { weight(l) } else { 0.0 });
    }
    Some(out)
}

fn check<D: Device>(device: &D, logits: &[f32], p: SampleParams) {
    let Some(weights) = kept(logits, &p) else { return };
    let id = sample(device, logits, &[p])[0] as usize;
    let total: f64 = weights.iter().sum();
    let before: f64 = weights[..id].iter().sum();
    assert!(weights[id] > 0.0, "token {id} is not kept: {p:?}");
    let (target, slack) = (f64::from(p.uniform) * total, 1e-5 * total);
    assert!(before - slack <= target && target <= before + weights[id] + slack, "{id} is not at {p:?}");
}

#[test]
fn the_token_at_the_drawn_share_of_what_is_kept() {
    fn checks<D: Device>(device: &D) {
        for n in [1usize, 2, 31, 33, 511, 513, 1500] {
            let mut random = Random::new(n as u64);
            let logits: Vec<f32> = random.units(n).iter().map(|x| 6.0 * x).collect();
            for (top_k, top_p, min_p) in [
                (0, 1.0, 0.0),
                (1, 1.0, 0.0),
                (7, 1.0, 0.0),
                (0, 0.6, 0.0),
                (40, 0.9, 0.0),
                (0, 1.0, 0.05),
                (9, 0.8, 0.1),
            ] {
                for uniform in [0.0, 0.37, 0.999_999_9] {
                    let inv_temperature = 0.5 + random.unit().abs();
                    check(device, &logits, SampleParams { inv_temperature, top_k, top_p, min_p, uniform });
                }
            }
        }
    }
    on_devices!(checks);
}

#[test]
fn equals_stay_together_and_infinities_stay_out() {
    fn checks<D: Device>(device: &D) {
        let p = |top_k, uniform| SampleParams { inv_temperature: 1.0, top_k, top_p: 1.0, min_p: 0.0, uniform };
        // Two share the second place: top-2 keeps all three.
        let logits = [1.0, 2.0, 1.0, f32::NEG_INFINITY, 0.0, f32::NAN];
        assert_eq!(sample(device, &logits, &[p(2, 0.999)]), [2]);
        assert_eq!(sample(device, &logits, &[p(2, 0.0)]), [0]);
        assert_eq!(sample(device, &logits, &[p(0, 0.999_999_9)]), [4]);
        // 0 and −0 are equal.
        assert_eq!(sample(device, &[-0.0, 0.0], &[p(1, 0.0)]), [0]);
        // Nothing to draw from is no reason to leave the row.
        assert_eq!(sample(device, &[f32::NAN; 600], &[p(3, 0.5)]), [0]);
    }
    on_devices!(checks);
}

/// Rows have parameters of their own, and a rerun draws the same.
#[test]
fn rows_are_independent() {
    fn checks<D: Device>(device: &D) {
        let mut random = Random::new(4);
        let n = 700;
        let logits = random.units(3 * n);
        let params = [(5, 0.2), (0, 0.9), (50, 0.5)].map(|(top_k, uniform)| SampleParams {
            inv_temperature: 2.0,
            top_k,
            top_p: 0.95,
            min_p: 0.0,
            uniform,
        });
        let all = sample(device, &logits, &params);
        for row in 0..3 {
            assert_eq!(sample(device, &logits[row * n..][..n], &params[row..=row]), all[row..=row]);
        }
    }
    on_devices!(checks);
}
