//! How far two sets of logits are apart.

use serde::Serialize;

use crate::engine::sampler;

/// At one position.
pub(super) struct Difference {
    /// `|a − b| / |b|`.
    relative_l2: f64,
    /// Largest difference of a logit.
    worst_logit: f64,
    /// `Σ q·(ln q − ln p)`, `q` the reference's distribution, in nats.
    kl: f64,
    top: Option<u32>,
    reference_top: Option<u32>,
    /// How much more the reference gives its own most probable token than the other's.
    gap: f64,
}

/// A [`Difference`] with its position.
#[derive(Debug, Serialize, PartialEq)]
pub(super) struct Position {
    position: usize,
    relative_l2: f64,
    worst_logit: f64,
    kl: f64,
    top: Option<u32>,
    reference_top: Option<u32>,
    gap: f64,
}

/// Over all positions.
#[derive(Debug, Default, Serialize, PartialEq)]
pub(super) struct Distance {
    pub(super) positions: usize,
    /// Largest relative L2 difference of a position.
    worst_relative_l2: f64,
    /// Where that is.
    worst_position: usize,
    /// Largest difference of a logit.
    worst_logit: f64,
    /// Mean of the positions' KL divergence from the reference, in nats.
    mean_kl: f64,
    /// Fraction of positions with the same most probable token.
    top1_agreement: f64,
    /// The first position where that token differs.
    first_difference: Option<Position>,
}

impl Difference {
    pub(super) fn new(a: &[f32], reference: &[f32]) -> Self {
        let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
        let differences = || a.iter().zip(reference).map(|(a, b)| f64::from(*a) - f64::from(*b));
        let norm = squares(&mut reference.iter().map(|b| f64::from(*b)));
        let (top, reference_top) = (sampler::argmax(a), sampler::argmax(reference));
        let logit = |id: Option<u32>| id.and_then(|id| reference.get(id as usize)).map_or(f64::NAN, |x| f64::from(*x));
        Difference {
            relative_l2: (squares(&mut differences()) / norm.max(f64::MIN_POSITIVE)).sqrt(),
            worst_logit: differences().map(f64::abs).fold(0.0, largest),
            kl: kl(a, reference),
            top,
            reference_top,
            gap: logit(reference_top) - logit(top),
        }
    }

    pub(super) fn at(&self, position: usize) -> Position {
        let &Difference { relative_l2, worst_logit, kl, top, reference_top, gap } = self;
        Position { position, relative_l2, worst_logit, kl, top, reference_top, gap }
    }
}

/// The larger of two errors, NaN being the largest.
fn largest(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

impl Distance {
    pub(super) fn add(&mut self, d: &Difference) {
        // A NaN is the worst of all.
        let is_worst = d.relative_l2 > self.worst_relative_l2 || d.relative_l2.is_nan();
        if (is_worst && !self.worst_relative_l2.is_nan()) || self.positions == 0 {
            (self.worst_relative_l2, self.worst_position) = (d.relative_l2, self.positions);
        }
        self.worst_logit = largest(self.worst_logit, d.worst_logit);
        self.mean_kl += d.kl;
        self.top1_agreement += f64::from(u8::from(d.top == d.reference_top));
        if d.top != d.reference_top && self.first_difference.is_none() {
            self.first_difference = Some(d.at(self.positions));
        }
        self.positions += 1;
    }

    /// From sums to means.
    pub(super) fn mean(mut self) -> Self {
        let n = self.positions.max(1) as f64;
        self.mean_kl /= n;
        self.top1_agreement /= n;
        self
    }
}

/// `Σ q·(ln q − ln p)` with `p`, `q` the softmax of `a`, `reference`.
fn kl(a: &[f32], reference: &[f32]) -> f64 {
    let log_sum = |logits: &[f32]| {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        f64::from(max) + logits.iter().map(|l| f64::from(l - max).exp()).sum::<f64>().ln()
    };
    let (sum_a, sum_b) = (log_sum(a), log_sum(reference));
    let term = |(a, b): (&f32, &f32)| {
        let (ln_p, ln_q) = (f64::from(*a) - sum_a, f64::from(*b) - sum_b);
        ln_q.exp() * (ln_q - ln_p)
    };
    a.iter().zip(reference).map(term).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_those_of_the_definitions() {
        let mut d = Distance::default();
        d.add(&Difference::new(&[1.0, 0.0], &[1.0, 0.0]));
        d.add(&Difference::new(&[0.0, 4.0], &[3.0, 4.0]));
        let d = d.mean();
        assert_eq!((d.positions, d.worst_position, d.worst_relative_l2, d.top1_agreement), (2, 1, 0.6, 1.0));
        assert_eq!((d.worst_logit, d.first_difference), (3.0, None));
        // By hand: softmax(3, 4) = (0.26894, 0.73106), softmax(0, 4) = (0.01799, 0.98201).
        let kl = 0.26894 * (0.26894f64 / 0.01799).ln() + 0.73106 * (0.73106f64 / 0.98201).ln();
        assert!((d.mean_kl - kl / 2.0).abs() < 1e-4, "{}", d.mean_kl);
    }

    #[test]
    fn the_first_other_token_is_reported_with_its_gap() {
        let mut d = Distance::default();
        for (a, b) in [([1.0, 2.0], [1.0, 2.0]), ([1.0, 2.0], [2.5, 2.0]), ([3.0, 2.0], [0.0, 9.0])] {
            d.add(&Difference::new(&a, &b));
        }
        let first = d.mean().first_difference.expect("two positions differ");
        assert_eq!((first.position, first.top, first.reference_top, first.gap), (1, Some(1), Some(0), 0.5));
    }

    #[test]
    fn nan_is_the_worst() {
        let mut d = Distance::default();
        d.add(&Difference::new(&[1.0], &[2.0]));
        d.add(&Difference::new(&[f32::NAN], &[2.0]));
        d.add(&Difference::new(&[9.0], &[2.0]));
        assert!(d.worst_relative_l2.is_nan() && d.worst_position == 1 && d.worst_logit.is_nan());
    }
}
