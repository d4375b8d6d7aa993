//! How far logits are from others that count as right.

use serde::Serialize;

/// How far two sets of logits are apart at one position.
#[derive(Clone, Debug, Serialize, PartialEq)]
pub struct Difference {
    /// Where that is.
    pub position: usize,
    /// [`relative_l2`].
    pub relative_l2: f64,
    /// Largest difference of a logit.
    pub worst_logit: f64,
    /// [`kl_divergence`], in nats.
    pub kl: f64,
    /// The most probable token.
    pub top: Option<usize>,
    /// The reference's.
    pub reference_top: Option<usize>,
    /// How much more the reference gives its own most probable token than the other's.
    pub gap: f64,
}

/// How far two sets of logits are apart, over the positions [added](Distance::add) so far.
#[derive(Clone, Debug, Default, Serialize, PartialEq)]
pub struct Distance {
    /// Positions compared.
    pub positions: usize,
    /// Largest [`relative_l2`] of a position.
    pub worst_relative_l2: f64,
    /// Where that is.
    pub worst_position: usize,
    /// Largest difference of a logit.
    pub worst_logit: f64,
    /// Mean of the [`kl_divergence`], in nats.
    pub mean_kl: f64,
    /// Fraction of positions with the same most probable token.
    pub top1_agreement: f64,
    /// The first position where that token differs.
    pub first_difference: Option<Difference>,
}

impl Distance {
    /// Adds a position: its logits `a`, and those that count as right.
    pub fn add(&mut self, a: &[f32], reference: &[f32]) -> Difference {
        let (top, reference_top) = (argmax(a), argmax(reference));
        let logit = |id: Option<usize>| id.and_then(|id| reference.get(id)).map_or(f64::NAN, |x| f64::from(*x));
        let errors = a.iter().zip(reference).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
        let difference = Difference {
            position: self.positions,
            relative_l2: relative_l2(a, reference),
            worst_logit: errors.fold(0.0, worst),
            kl: kl_divergence(a, reference),
            top,
            reference_top,
            gap: logit(reference_top) - logit(top),
        };
        if worst(self.worst_relative_l2, difference.relative_l2).to_bits() != self.worst_relative_l2.to_bits() {
            (self.worst_relative_l2, self.worst_position) = (difference.relative_l2, self.positions);
        }
        self.worst_logit = worst(self.worst_logit, difference.worst_logit);
        self.positions += 1;
        let n = self.positions as f64;
        self.mean_kl += (difference.kl - self.mean_kl) / n;
        self.top1_agreement += (f64::from(u8::from(top == reference_top)) - self.top1_agreement) / n;
        if top != reference_top && self.first_difference.is_none() {
            self.first_difference = Some(difference.clone());
        }
        difference
    }
}

/// The larger of two errors; a NaN is the largest of all.
fn worst(a: f64, b: f64) -> f64 {
    if a.is_nan() || a >= b { a } else { b }
}

/// `‖a − b‖ / ‖b‖`.
pub fn relative_l2(a: &[f32], b: &[f32]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
    let difference = squares(&mut a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    let norm = squares(&mut b.iter().copied().map(f64::from));
    (difference / norm.max(f64::MIN_POSITIVE)).sqrt()
}

/// `Σ q·(ln q − ln p)` with `p`, `q` the softmax of `a`, `reference`.
pub fn kl_divergence(a: &[f32], reference: &[f32]) -> f64 {
    let log_sum = |logits: &[f32]| {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        f64::from(max) + logits.iter().map(|l| f64::from(l - max).exp()).sum::<f64>().ln()
    };
    let (sum_a, sum_reference) = (log_sum(a), log_sum(reference));
    let term = |(a, reference): (&f32, &f32)| {
        let (ln_p, ln_q) = (f64::from(*a) - sum_a, f64::from(*reference) - sum_reference);
        ln_q.exp() * (ln_q - ln_p)
    };
    a.iter().zip(reference).map(term).sum()
}

/// The index of the largest value, the lowest on a tie.
pub fn argmax(row: &[f32]) -> Option<usize> {
    (0..row.len()).reduce(|best, i| if row[i] > row[best] { i } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_those_of_the_definitions() {
        let mut d = Distance::default();
        d.add(&[1.0, 0.0], &[1.0, 0.0]);
        let second = d.add(&[0.0, 4.0], &[3.0, 4.0]);
        assert_eq!((d.positions, d.worst_position, d.worst_relative_l2, d.top1_agreement), (2, 1, 0.6, 1.0));
        assert_eq!((d.worst_logit, d.first_difference, second.position, second.relative_l2), (3.0, None, 1, 0.6));
        // By hand: softmax(3, 4) = (0.26894, 0.73106), softmax(0, 4) = (0.01799, 0.98201).
        let kl = 0.26894 * (0.26894f64 / 0.01799).ln() + 0.73106 * (0.73106f64 / 0.98201).ln();
        assert!((d.mean_kl - kl / 2.0).abs() < 1e-4, "{}", d.mean_kl);
    }

    #[test]
    fn the_first_other_token_is_reported_with_its_gap() {
        let mut d = Distance::default();
        for (a, b) in [([1.0, 2.0], [1.0, 2.0]), ([1.0, 2.0], [2.5, 2.0]), ([3.0, 2.0], [0.0, 9.0])] {
            d.add(&a, &b);
        }
        let first = d.first_difference.expect("two positions differ");
        assert_eq!((first.position, first.top, first.reference_top, first.gap), (1, Some(1), Some(0), 0.5));
    }

    #[test]
    fn nan_is_the_worst() {
        let mut d = Distance::default();
        d.add(&[1.0], &[2.0]);
        d.add(&[f32::NAN], &[2.0]);
        d.add(&[9.0], &[2.0]);
        assert!(d.worst_relative_l2.is_nan() && d.worst_position == 1 && d.worst_logit.is_nan());
    }
}
