//! Mixture of experts: routing, and products grouped by expert.

use std::ops::Range;

use crate::backend::RouterRule;

/// The experts chosen for every row: row `m` has routes `m·n_used .. (m + 1)·n_used`, best first.
pub struct Routes {
    pub(super) n_used: usize,
    pub(super) experts: Vec<u32>,
    pub(super) weights: Vec<f32>,
}

impl Routes {
    pub(super) fn new(rows: usize, n_used: usize) -> Routes {
        Routes { n_used, experts: vec![0; rows * n_used], weights: vec![0.0; rows * n_used] }
    }

    /// Chooses the experts of row `m`.
    pub(super) fn choose(&mut self, m: usize, logits: &[f32], rule: RouterRule) {
        let routes = m * self.n_used..(m + 1) * self.n_used;
        let (experts, weights) = (&mut self.experts[routes.clone()], &mut self.weights[routes]);
        for j in 0..experts.len() {
            let (chosen, rest) = experts.split_at_mut(j);
            let left = (0..logits.len()).filter(|e| !chosen.contains(&(*e as u32)));
            // Strictly greater: of equal logits the lowest index wins.
            let best = left.reduce(|best, e| if logits[e] > logits[best] { e } else { best });
            rest[0] = best.expect("a model uses no more experts than it has") as u32;
        }
        let max = logits[experts[0] as usize];
        let exp = |expert: u32| f64::from(logits[expert as usize] - max).exp();
        let sum: f64 = match rule {
            RouterRule::SoftmaxChosen => experts.iter().map(|e| exp(*e)).sum(),
            RouterRule::SoftmaxAll => (0..logits.len() as u32).map(exp).sum(),
        };
        for (weight, expert) in weights.iter_mut().zip(experts) {
            *weight = (exp(*expert) / sum) as f32;
        }
    }

    /// By how much the last chosen expert's logit is above the best of those that row `m` did not choose, if any.
    pub(super) fn lead(&self, m: usize, logits: &[f32]) -> Option<f32> {
        let experts = &self.experts[m * self.n_used..(m + 1) * self.n_used];
        let last = logits[*experts.last()? as usize];
        let left = logits.iter().enumerate().filter(|(e, _)| !experts.contains(&(*e as u32)));
        left.map(|(_, logit)| last - logit).reduce(f32::min)
    }

    /// The first `n_routes` routes sorted by expert, and for each expert that has any its range in them.
    pub(super) fn by_expert(&self, n_routes: usize) -> (Vec<usize>, Vec<(usize, Range<usize>)>) {
        let mut order: Vec<usize> = (0..n_routes).collect();
        order.sort_by_key(|route| self.experts[*route]);
        let mut groups = Vec::new();
        let mut start = 0;
        for group in order.chunk_by(|a, b| self.experts[*a] == self.experts[*b]) {
            groups.push((self.experts[group[0]] as usize, start..start + group.len()));
            start += group.len();
        }
        (order, groups)
    }
}
