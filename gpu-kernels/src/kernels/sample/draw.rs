//! The last pass: one of the kept tokens.

use super::weight::{BROKEN, LEAST, Weights, key};
use super::{MARKS, NO_INDEX, PER_LANE, SHARE, SampleParams, SampleState, THREADS};
use super::{is_last_block, scan, share_of};
use cuda_std::{pdl, prelude::*};

/// Draws a token for every row.
///
/// Launch: as [`sample_search`](super::sample_search), after its passes.
///
/// # Safety
/// As there; `part_weight` and `part_equal` are `[rows, ceil(n / SHARE)]`, `token` has `rows` elements.
#[kernel(max_threads = 256)]
pub unsafe fn sample_draw(
    logits: *const f32,
    params: *const SampleParams,
    state: *const SampleState,
    part_weight: *mut u64,
    part_equal: *mut u32,
    marks: *mut u32,
    token: *mut u32,
    n: u32,
    stride: u32,
) {
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let at = thread::block_idx_y() as usize;
    let (lane, part, n_part) = (thread::thread_idx_x(), thread::block_idx_x(), thread::grid_dim_x());
    // SAFETY: rows, parts and logits are below their counts; every lane of the block takes the same branches around
    // barriers, for they depend on the row and on what all lanes have from `scan`.
    unsafe {
        let marks = marks.add(at * MARKS);
        let (part_weight, part_equal) = (part_weight.add(at * n_part as usize), part_equal.add(at * n_part as usize));
        let p = ld(params.add(at));
        let max_key = ld(marks);
        let row = Row {
            logits: logits.add(at * stride as usize),
            n,
            weights: Weights::new(&p, max_key),
            state: ld(state.add(at)),
        };
        let (mut weight, mut equal) = (0, 0);
        let mut j = 0;
        while j < PER_LANE {
            let (above, is_equal) = row.weigh(part * SHARE + j * THREADS + lane);
            weight += above;
            equal += is_equal;
            j += 1;
        }
        let (_, weight) = scan(weight);
        let (_, equal) = scan(equal);
        if lane == 0 {
            st(part_weight.add(part as usize), weight);
            st(part_equal.add(part as usize), equal as u32);
        }
        if !is_last_block(marks) {
            return;
        }
        if lane == 0 {
            st(marks, 0); // for the next use; this kernel's blocks have read it
        }
        let each = row.weights.kept(row.state.threshold);

        // Which part: each lane sums a run of them.
        let run = n_part.div_ceil(THREADS);
        let begin = lane * run;
        let end = if begin + run < n_part { begin + run } else { n_part };
        let mut equal = 0;
        let mut i = begin;
        while i < end {
            equal += u64::from(ld(part_equal.add(i as usize)));
            i += 1;
        }
        let (equal_before, _) = scan(equal);
        let of_part = |i: u32, equal_before: u64| {
            let equal = u64::from(ld(part_equal.add(i as usize)));
            (ld(part_weight.add(i as usize)) + row.n_kept(equal_before, equal) * each, equal)
        };
        let (mut own, mut seen) = (0, equal_before);
        let mut i = begin;
        while i < end {
            let (weight, equal) = of_part(i, seen);
            own += weight;
            seen += equal;
            i += 1;
        }
        let (before, total) = scan(own);
        if max_key >= BROKEN || max_key <= LEAST || total == 0 {
            if lane == 0 {
                st(token.add(at), NO_INDEX);
            }
            return;
        }
        let target = share_of(total, p.uniform); // below the total
        let found = dynamic::<u64>(0);
        if before <= target && target < before + own {
            let (mut left, mut seen) = (target - before, equal_before);
            let mut i = begin;
            let mut here = of_part(i, seen);
            while left >= here.0 {
                left -= here.0;
                seen += here.1;
                i += 1;
                here = of_part(i, seen);
            }
            found.set(0, u64::from(i));
            found.set(1, left);
            found.set(2, seen);
        }
        thread::sync_threads(); // one lane has found the part
        let (part, left, equal_before) = (found.get(0) as u32, found.get(1), found.get(2));

        // Which token of the part: each lane takes a run of them.
        let begin = part * SHARE + lane * PER_LANE;
        let mut equal = 0;
        let mut j = 0;
        while j < PER_LANE {
            equal += row.weigh(begin + j).1;
            j += 1;
        }
        let (before_here, _) = scan(equal);
        let equal_before = equal_before + before_here;
        let (mut own, mut seen) = (0, equal_before);
        let mut j = 0;
        while j < PER_LANE {
            let (above, equal) = row.weigh(begin + j);
            own += above + row.n_kept(seen, equal) * each;
            seen += equal;
            j += 1;
        }
        let (before, _) = scan(own);
        if before <= left && left < before + own {
            let (mut sum, mut seen) = (before, equal_before);
            let mut drawn = begin;
            let mut j = 0;
            while j < PER_LANE {
                let (above, equal) = row.weigh(begin + j);
                sum += above + row.n_kept(seen, equal) * each;
                seen += equal;
                drawn += if sum <= left { 1 } else { 0 };
                j += 1;
            }
            st(token.add(at), drawn);
        }
    }
}

/// A row of logits and what is kept of it.
struct Row {
    logits: *const f32,
    n: u32,
    weights: Weights,
    state: SampleState,
}

impl Row {
    /// Token `i`'s weight if it is above the threshold and kept, and 1 if it is at the threshold.
    ///
    /// # Safety
    /// The first `n` logits are there.
    #[inline(always)]
    unsafe fn weigh(&self, i: u32) -> (u64, u64) {
        if i >= self.n {
            return (0, 0);
        }
        // SAFETY: `i < n`.
        let key = key(unsafe { ld(self.logits.add(i as usize)) });
        let threshold = self.state.threshold;
        (if key > threshold { self.weights.kept(key) } else { 0 }, u64::from(key == threshold))
    }

    /// How many of `equal` tokens at the threshold are kept, behind `before` others.
    #[inline(always)]
    fn n_kept(&self, before: u64, equal: u64) -> u64 {
        let n = u64::from(self.state.n_equal);
        let left = n.saturating_sub(before);
        if equal < left { equal } else { left }
    }
}
