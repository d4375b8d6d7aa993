//! Drawing a token.

use gpu_kernels::kernels::sample::{MAX_LOGITS, NO_INDEX, SHARE};
use host::backend::Draw;
use host::gpu::ops::{self, SampleRoom};
use host::gpu::{Device, Slice};

use super::{Output, Random, input, on_devices};

const PLAIN: Draw = Draw { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, uniform: 0 };

/// A share of all as a number of 64 bits.
fn uniform(share: f64) -> u64 {
    (share * 2f64.powi(64)) as u64
}

/// Draws twice in the same room, from the first `n` logits of rows `stride` long.
fn sample<D: Device>(device: &D, logits: &[f32], stride: usize, n: u32, draws: &[Draw]) -> Vec<u32> {
    let rows = draws.len();
    let params: Vec<_> = draws.iter().map(ops::sample_params).collect();
    let (logits, params) = (input(device, &logits[..rows * stride]), input(device, &params));
    let room = SampleRoom::new(device, rows, n).unwrap();
    let draw = || {
        let token = Output::new(device, rows);
        ops::sample(device, logits.slice(), params.slice(), &room, token.slice(), n).unwrap();
        token.read(device)
    };
    let tokens = draw();
    assert_eq!(draw(), tokens, "a rerun differs, or finds the room changed");
    tokens
}

fn sample_one<D: Device>(device: &D, logits: &[f32], draw: Draw) -> u32 {
    sample(device, logits, logits.len(), logits.len() as u32, &[draw])[0]
}

/// The weight that the definition gives each token, 0 where it is cut, and whether a cut is a matter of rounding.
fn kept(logits: &[f32], draw: &Draw) -> (Vec<f64>, bool) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |l: f32| ((f64::from(l) - f64::from(max)) / f64::from(draw.temperature)).exp();
    let mut ranked: Vec<usize> = (0..logits.len()).collect();
    ranked.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).expect("no NaN").then(a.cmp(&b)));
    if draw.top_k > 0 {
        ranked.truncate(draw.top_k as usize);
    }
    let total: f64 = ranked.iter().map(|&i| weight(logits[i])).sum();
    let mut near = false;
    if draw.top_p < 1.0 {
        let goal = f64::from(draw.top_p) * total;
        let sums = ranked.iter().scan(0.0, |sum, &i| {
            *sum += weight(logits[i]);
            Some(*sum)
        });
        let sums: Vec<f64> = sums.collect();
        near |= sums.iter().any(|sum| (sum - goal).abs() < 2e-6 * total);
        let n = sums.iter().position(|&sum| sum >= goal).map_or(ranked.len(), |last| last + 1);
        ranked.truncate(n);
    }
    let least = f64::from(draw.min_p);
    near |= least > 0.0 && ranked.iter().any(|&i| (weight(logits[i]) - least).abs() < 2e-6);
    let mut out = vec![0.0; logits.len()];
    ranked.iter().filter(|&&i| weight(logits[i]) >= least).for_each(|&i| out[i] = weight(logits[i]));
    (out, near)
}

/// Draws, and checks it where no cut is near; whether it did.
fn check<D: Device>(device: &D, logits: &[f32], draw: Draw) -> bool {
    let id = sample_one(device, logits, draw) as usize;
    let (weights, near) = kept(logits, &draw);
    if !near {
        assert_drawn(id, &weights, &draw);
    }
    !near
}

fn assert_drawn(id: usize, weights: &[f64], draw: &Draw) {
    let total: f64 = weights.iter().sum();
    let before: f64 = weights[..id].iter().sum();
    assert!(weights[id] > 0.0, "token {id} of {} is not kept: {draw:?}", weights.len());
    let (target, slack) = (draw.uniform as f64 / 2f64.powi(64) * total, 1e-5 * total);
    assert!(before - slack <= target && target <= before + weights[id] + slack, "{id} is not at {draw:?}");
}

const CUTS: [(u32, f32, f32); 9] = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (7, 1.0, 0.0),
    (0, 0.6, 0.0),
    (0, 0.0, 0.0),
    (40, 0.9, 0.0),
    (0, 1.0, 0.05),
    (9, 0.8, 0.1),
    (1_000_000, 0.999, 1e-3),
];

#[test]
fn the_token_at_the_drawn_share_of_what_is_kept() {
    fn checks<D: Device>(device: &D) {
        let mut n_checked = 0;
        for n in [1usize, 2, 31, 33, 511, 2047, 2048, 2049, 5000] {
            let mut random = Random::new(n as u64);
            let logits: Vec<f32> = random.units(n).iter().map(|x| 6.0 * x).collect();
            // The same with many equals, also across shares of blocks.
            let stepped: Vec<f32> = logits.iter().map(|l| l.round() / 2.0).collect();
            for (top_k, top_p, min_p) in CUTS {
                for share in [0.0, 0.37, 1.0 - 2f64.powi(-53)] {
                    let temperature = 0.3 + random.unit().abs();
                    let draw = Draw { temperature, top_k, top_p, min_p, uniform: uniform(share) };
                    n_checked += usize::from(check(device, &logits, draw));
                    n_checked += usize::from(check(device, &stepped, draw));
                }
            }
        }
        assert!(n_checked > 400, "only {n_checked} draws were far enough from a border");
    }
    on_devices!(checks);
}

/// A row of the reference model, and one so long that a lane of the last block has several parts.
#[test]
fn long_rows() {
    fn checks<D: Device>(device: &D) {
        for (n, draw) in [
            (248_320, Draw { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, uniform: uniform(0.7) }),
            (248_320, Draw { top_p: 0.9, temperature: 2.0, uniform: uniform(0.2), ..PLAIN }),
            (300 * SHARE as usize + 5, Draw { uniform: uniform(0.999), ..PLAIN }),
        ] {
            let mut random = Random::new(9);
            let logits: Vec<f32> = (0..n).map(|_| 4.0 * (random.unit() + random.unit() + random.unit())).collect();
            // Among so many a cut is always near some sum: one token more or less, which the slack allows for.
            assert_drawn(sample_one(device, &logits, draw) as usize, &kept(&logits, &draw).0, &draw);
        }
    }
    on_devices!(checks);
}

#[test]
fn among_equals_the_lower_index_ranks_first() {
    fn checks<D: Device>(device: &D) {
        let p = |top_k, share| Draw { top_k, uniform: uniform(share), ..PLAIN };
        // Two share the second place: top-2 keeps the first of them.
        let logits = [1.0, 2.0, 1.0, f32::NEG_INFINITY, 0.0];
        assert_eq!(sample_one(device, &logits, p(2, 0.999)), 1);
        assert_eq!(sample_one(device, &logits, p(2, 0.0)), 0);
        assert_eq!(sample_one(device, &logits, p(3, 0.999)), 2);
        assert_eq!(sample_one(device, &logits, p(0, 0.999_999_9)), 4);
        // 0 and −0 are equal.
        assert_eq!(sample_one(device, &[-0.0, 0.0], p(1, 0.999)), 0);
        assert_eq!(sample_one(device, &[f32::NEG_INFINITY, -3.0, -3.0], Draw::GREEDY), 1);
        // A nucleus that ends among equals, also behind top-k.
        let flat = [0.5; 6000];
        let at = |top_k, top_p| sample_one(device, &flat, Draw { top_k, top_p, uniform: u64::MAX, ..PLAIN });
        assert_eq!([at(0, 0.75), at(4000, 0.75), at(4000, 1.0)], [4499, 2999, 3999]);
        // A temperature whose reciprocal is no number is greedy.
        let cold = Draw { temperature: f32::from_bits(1), uniform: u64::MAX, ..PLAIN };
        assert_eq!(sample_one(device, &[0.0, 1.0, 2.0, 1.0], cold), 2);
    }
    on_devices!(checks);
}

#[test]
fn what_is_no_number_and_nothing_to_draw_are_marked() {
    fn checks<D: Device>(device: &D) {
        let n = 2 * SHARE as usize + 3;
        let any = Draw { top_k: 5, top_p: 0.9, ..PLAIN };
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
            for at in [0, SHARE as usize, n - 1] {
                let mut logits = vec![0.25; n];
                logits[at] = bad;
                for draw in [any, PLAIN, Draw::GREEDY] {
                    assert_eq!(sample_one(device, &logits, draw), NO_INDEX, "{bad} at {at}, {draw:?}");
                }
                // Beyond the first n it harms nobody, and neither does the row before.
                let stride = logits.len() + 9;
                logits.extend([bad; 9]);
                logits.extend(vec![0.25; stride]);
                assert_eq!(sample(device, &logits, stride, n as u32, &[any, any])[1], 0);
            }
        }
        assert_eq!(sample_one(device, &[f32::NEG_INFINITY; 600], any), NO_INDEX);
    }
    on_devices!(checks);
}

/// Rows have parameters of their own, and do not see each other.
#[test]
fn rows_are_independent() {
    fn checks<D: Device>(device: &D) {
        let n = 2500;
        let logits = Random::new(4).units(5 * n);
        let draws = [(5, 1.0, 0.2), (0, 0.95, 0.9), (50, 0.95, 0.5), (0, 1.0, 0.4), (1, 1.0, 0.0)]
            .map(|(top_k, top_p, share)| Draw { temperature: 0.5, top_k, top_p, min_p: 0.0, uniform: uniform(share) });
        let all = sample(device, &logits, n, n as u32, &draws);
        for row in 0..draws.len() {
            assert_eq!(sample_one(device, &logits[row * n..][..n], draws[row]), all[row], "row {row}");
        }
    }
    on_devices!(checks);
}

#[test]
fn bad_operands_are_refused() {
    fn checks<D: Device>(device: &D) {
        let logits = input(device, &[0.0f32; 24]);
        let params = input(device, &[ops::sample_params(&PLAIN); 2]);
        let token = Output::<D, u32>::new(device, 2);
        let room = SampleRoom::new(device, 2, 12).unwrap();
        let run = |n, token: Slice<'_, u32>| {
            ops::sample(device, logits.slice(), params.slice(), &room, token, n).map_err(|e| e.to_string())
        };
        for (n, rows, why) in
            [(0, 2, "rows of 0"), (MAX_LOGITS + 1, 2, "rows of 0"), (13, 2, "n elements"), (12, 1, "")]
        {
            let refused = run(n, token.slice().part(..rows).unwrap()).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
        assert!(run(12, logits.slice().part(..2).unwrap().cast().unwrap()).unwrap_err().contains("overlaps"));
        let small = SampleRoom::new(device, 1, 12).unwrap();
        let refused = ops::sample(device, logits.slice(), params.slice(), &small, token.slice(), 12).unwrap_err();
        assert!(refused.to_string().contains("too small"), "{refused}");
        assert_eq!(token.read(device), [u32::MAX; 2], "nothing was launched");
    }
    on_devices!(checks);
}
