//! The weights that a lane brings to shared memory, and those that it takes from there.

use core::marker::PhantomData;

use cuda_std::{cp_async, prelude::*};

use super::super::MatmulParams;
use super::stage::{Memory, UNIT, WARP_ROWS, chunks, groups, row_bytes, span_groups};
use super::{Operands, wide_tile};
use crate::kernels::format::{FormatWide, Row, wide};
use crate::params::WARP;

/// A lane of its warp's rows: it brings every second unit and group of one of them. (The other lane of that row brings
/// the others.)
pub(super) struct Weights<F> {
    row: Row,
    /// The first unit and group of a step that it brings.
    first: u32,
    of: PhantomData<F>,
}

impl<F: FormatWide> Weights<F> {
    /// # Safety
    /// As [`wide`](super::product::wide).
    #[inline(always)]
    pub(super) unsafe fn new<const N: u32>(o: &Operands, p: &MatmulParams, expert: u32) -> Self {
        let thread = thread::thread_idx_x();
        // Rows past the end are the last one again, and are not stored.
        let row = (thread::block_idx_y() * const { wide_tile(N).rows } + thread / 2).min(p.rows - 1);
        let row = u64::from(expert) * u64::from(p.rows) + u64::from(row);
        // SAFETY: the row exists.
        let row = unsafe { Row::new::<F>(o.w, &p.planes, row, p.chunks) };
        Weights { row, first: thread % 2, of: PhantomData }
    }

    /// Starts to copy a step's units; zeros past the row's end.
    ///
    /// # Safety
    /// The row has `p.chunks` chunks; nobody accesses the stage's weights before the copy's end and a barrier.
    #[inline(always)]
    pub(super) unsafe fn copy<const N: u32>(&self, p: &MatmulParams, step: u32, stage: u32) {
        let row = thread::thread_idx_x() / 2;
        let to = Memory::<F, N>::w(stage).add(row * const { row_bytes::<F>() } + self.first * UNIT).cast();
        // SAFETY: the caller's promise. A row has units of plane 1 wherever it has chunks.
        unsafe {
            for i in 0..const { chunks::<F>() / 2 } {
                let chunk = step * const { chunks::<F>() } + self.first + 2 * i;
                let inside = chunk < p.chunks;
                cp_async::stream_16_or_zero(to, 2 * i, wide::unit::<0>(&self.row, chunk, inside), inside);
            }
            if F::EXTRA > 0 {
                let inside = step * const { chunks::<F>() } < p.chunks;
                let from = wide::unit::<1>(&self.row, F::extra(step) + self.first, inside);
                cp_async::stream_16_or_zero(to, const { chunks::<F>() }, from, inside);
            }
        }
    }

    /// Group number `i` of those whose scales or factors the lane takes of the span that begins with step `step`. Of
    /// several, each lane has every second, where each has scales of its own, else one half.
    #[inline(always)]
    fn group(&self, step: u32, i: usize) -> u32 {
        let first = step * const { groups::<F>() };
        first
            + if F::SPAN == 1 {
                self.first + 2 * i as u32
            } else {
                self.first * const { span_groups::<F>() / 2 } + i as u32
            }
    }

    /// Loads what a span's factors are made of; the row's last for what is past its end.
    ///
    /// # Safety
    /// The row has `p.cols` columns.
    #[inline(always)]
    pub(super) unsafe fn scales<const L: usize>(&self, p: &MatmulParams, step: u32) -> [F::Scales; L] {
        let last = p.cols / F::GROUP_ELEMS - 1;
        // SAFETY: the caller's promise.
        core::array::from_fn(|i| unsafe { F::scales(&self.row, self.group(step, i).min(last)) })
    }

    /// Stores the factors of a span. Those past the row's end are 0, so that the weights are.
    ///
    /// # Safety
    /// No other lane accesses them before the next barrier of the warp.
    #[inline(always)]
    pub(super) unsafe fn store_factors<const N: u32, const L: usize, const G: usize>(
        &self,
        p: &MatmulParams,
        step: u32,
        scales: &[F::Scales; L],
    ) {
        const { assert!(G as u32 * 2 == span_groups::<F>() && L == if F::SPAN == 1 { G } else { 1 }) };
        let row = thread::thread_idx_x() % WARP / 2;
        let factors: [F::Factors; G] = F::factors(scales, self.group(step, 0), p.cols / F::GROUP_ELEMS);
        for i in 0..G {
            let group = self.group(0, i);
            // SAFETY: the caller's promise.
            unsafe { Memory::<F, N>::factors().set(group * WARP_ROWS + row, factors[i]) };
        }
    }
}

/// The weights of one chunk that a lane multiplies, of rows `g` and `g + 8` of its warp: their words of the chunk, and
/// those that belong to them.
pub(super) struct Words([[u32; 2]; 2]);

impl Words {
    /// Of chunk number `chunk` of the stage's step, number `row_chunk` of the row.
    ///
    /// # Safety
    /// The stage's weights are whole.
    #[inline(always)]
    pub(super) unsafe fn load<F: FormatWide, const N: u32>(stage: u32, chunk: u32, row_chunk: u32) -> Self {
        let (warp, lane) = (thread::thread_idx_x() / WARP, thread::thread_idx_x() % WARP);
        let row = warp * WARP_ROWS + lane / 4;
        let words = Memory::<F, N>::w(stage).add(row * const { row_bytes::<F>() }).cast::<u32>();
        let word =
            |half: u32, unit: u32, word: u32| half * const { 8 * row_bytes::<F>() / 4 } + unit * (UNIT / 4) + word;
        let extra_word = F::extra_word(row_chunk, lane % 4);
        // SAFETY: the caller's promise.
        let both = |half: u32| unsafe {
            let extra = if F::EXTRA > 0 { words.get(word(half, chunks::<F>(), extra_word)) } else { 0 };
            [words.get(word(half, chunk, lane % 4)), extra]
        };
        Words([both(0), both(1)])
    }

    /// Run `run` of the chunk, number `chunk` of the row, as the product's first factor.
    ///
    /// # Safety
    /// The span's factors are whole; the run is of group `group` of it.
    #[inline(always)]
    pub(super) unsafe fn weights<F: FormatWide, const N: u32>(&self, chunk: u32, run: usize, group: u32) -> [u32; 4] {
        let lane = thread::thread_idx_x() % WARP;
        let half = |half: usize| {
            let [word, extra] = self.0[half];
            // SAFETY: the caller's promise.
            let factors = unsafe { Memory::<F, N>::factors().get(group * WARP_ROWS + lane / 4 + 8 * half as u32) };
            F::weights(word, extra, lane % 4, chunk, run, &factors)
        };
        let ([a0, a2], [a1, a3]) = (half(0), half(1));
        [a0, a1, a2, a3]
    }
}
