//! One lane of a block: the loop over the steps, and storing the tile.

use cuda_std::wgmma::Descriptor;
use cuda_std::{cp_async, pdl, prelude::*, wgmma};

use super::super::MatmulParams;
use super::super::output::Out;
use super::super::tile::Part;
use super::stage::{COLUMN, Memory, WARP_ROWS, chunks, groups};
use super::tokens::Tokens;
use super::weights::{Weights, Words};
use super::{Operands, wide_tile};
use crate::kernels::format::FormatWide;
use crate::params::WARP;

/// Rows of the second factor that one product takes: a run of weights.
const RUN: u32 = 16;

/// One lane of a block, for tiles of `N` tokens: `R` sums, `L` scales to load for a span and `G` groups
/// to make factors of.
///
/// # Safety
/// As [`matmul_q8_0_w64`](super::matmul_q8_0_w64), for the format and the tile.
#[inline(always)]
pub(super) unsafe fn wide<F: FormatWide, const N: u32, const R: usize, const L: usize, const G: usize>(
    o: Operands,
    p: &MatmulParams,
) {
    const { assert!(R as u32 * 2 == N && F::RUN_ELEMS == RUN) };
    // SAFETY: the caller's promise, item by item: rows, chunks, tokens and columns are clamped or checked where they
    // are formed. A stage is copied to after the barrier that all warps reach when they are done with it, and read
    // after the one that follows the copy's end.
    unsafe {
        let part = Part::of_block(&o.to, p, N);
        if part.n == 0 {
            return; // the whole block
        }
        let n_stages = const { Memory::<F, N>::N_STAGES };
        let ahead = n_stages - 2;
        let weights = Weights::<F>::new::<N>(&o, p, part.expert);
        for step in 0..ahead {
            weights.copy::<N>(p, step, step);
        }
        let scales = weights.scales::<L>(p, 0);
        pdl::grid_dependency_wait();
        pdl::launch_dependents();

        let tokens = Tokens::new::<N>(&o, p, &part);
        let columns = columns(part.n, N);
        for step in 0..ahead {
            tokens.copy::<F, N>(&o, p, &part, columns, step, step);
            cp_async::commit();
        }
        let mut sums = [0.0; R];
        // The loop as often as there are numbers of columns: a branch at each product would keep it from running on.
        macro_rules! of {
            ($($n:literal)+) => {
                match columns {
                    $($n if const { self::columns($n, N) == $n } => {
                        let lane = Lane { o: &o, p, part: &part, weights: &weights, tokens: &tokens };
                        lane.steps::<N, R, L, G, $n>(scales, &mut sums);
                    })+
                    _ => {} // the tile has no more columns
                }
            };
        }
        of!(16 32 48 64 80 96 112 128);
        store::<N, R>(&o, p, &part, &sums);
    }
}

/// Columns of the second factor for so many tokens, in a tile of `tile`. Each number there is has a loop of its own, so
/// they are those that occur: few tokens for each expert, or as many as the tile is for.
const fn columns(n: u32, tile: u32) -> u32 {
    if n > tile {
        0
    } else if n <= 64 && (tile == 128 || n > 32) {
        64
    } else {
        n.next_multiple_of(16)
    }
}

/// What a lane needs for its steps.
struct Lane<'a, F> {
    o: &'a Operands,
    p: &'a MatmulParams,
    part: &'a Part,
    weights: &'a Weights<F>,
    tokens: &'a Tokens,
}

impl<F: FormatWide> Lane<'_, F> {
    /// All steps, with `C` columns of the second factor. The first steps' copies are under way, and their first scales
    /// are `scales`.
    ///
    /// # Safety
    /// As [`wide`].
    #[inline(always)]
    unsafe fn steps<const N: u32, const R: usize, const L: usize, const G: usize, const C: usize>(
        &self,
        mut scales: [F::Scales; L],
        sums: &mut [f32; R],
    ) {
        let Lane { o, p, part, weights, tokens } = *self;
        let n_stages = const { Memory::<F, N>::N_STAGES };
        let ahead = n_stages - 2;
        let steps = p.cols.div_ceil(F::STEP);
        let (mut step, mut stage, mut free) = (0, 0, ahead);
        wgmma::begin(sums);
        // SAFETY: as in `wide`.
        unsafe {
            while step < steps {
                wait_copies(n_stages);
                wgmma::fence_shared();
                block::sync_threads(); // this stage is whole; all but the last product of the step before are done
                if step + ahead < steps {
                    weights.copy::<N>(p, step + ahead, free);
                    tokens.copy::<F, N>(o, p, part, C as u32, step + ahead, free);
                }
                cp_async::commit();
                if step.is_multiple_of(F::SPAN) {
                    weights.store_factors::<N, L, G>(p, step, &scales);
                    scales = weights.scales::<L>(p, step + F::SPAN);
                    warp::sync_warp(warp::FULL_MASK); // the warp's factors are whole
                }
                multiply::<F, N, R, C>(step, stage, sums);
                step += 1;
                stage = if stage + 1 == n_stages { 0 } else { stage + 1 };
                free = if free + 1 == n_stages { 0 } else { free + 1 };
            }
            wgmma::finish(sums);
        }
    }
}

/// Waits for the copies of the step at hand: those of all but one of the steps ahead may be under way.
#[inline(always)]
fn wait_copies(n_stages: u32) {
    match n_stages {
        3 => cp_async::wait::<0>(),
        4 => cp_async::wait::<1>(),
        5 => cp_async::wait::<2>(),
        _ => cp_async::wait::<3>(),
    }
}

/// Multiplies a stage with the first `C` of its tokens. One product is still running when it returns.
///
/// # Safety
/// The stage and the warp's factors are whole, and visible to products; the whole warpgroup comes here.
#[inline(always)]
unsafe fn multiply<F: FormatWide, const N: u32, const R: usize, const C: usize>(
    step: u32,
    stage: u32,
    sums: &mut [f32; R],
) {
    let first_group = step % F::SPAN * const { groups::<F>() };
    for chunk in 0..const { chunks::<F>() } {
        // SAFETY: the caller's promise; the chunk's runs lie in the step.
        unsafe {
            let row_chunk = step * const { chunks::<F>() } + chunk;
            let words = Words::load::<F, N>(stage, chunk, row_chunk);
            for run in 0..F::RUNS {
                let start = F::start(chunk) + run * F::RUN_DISTANCE;
                let a = words.weights::<F, N>(row_chunk, run as usize, first_group + start / F::GROUP_ELEMS);
                let x = Memory::<F, N>::x(stage).add(start / COLUMN * Memory::<F, N>::X_PART);
                wgmma::fence();
                wgmma::mma_bf16::<C, R>(sums, a, Descriptor::new(x).rows(start % COLUMN / RUN));
                wgmma::commit();
                // The one before is done, so that its weights' registers are free.
                wgmma::wait::<1>();
            }
        }
    }
}

/// Stores the tile.
///
/// # Safety
/// As [`wide`].
#[inline(always)]
unsafe fn store<const N: u32, const R: usize>(o: &Operands, p: &MatmulParams, part: &Part, sums: &[f32; R]) {
    let (warp, lane) = (thread::thread_idx_x() / WARP, thread::thread_idx_x() % WARP);
    let row = thread::block_idx_y() * const { wide_tile(N).rows } + warp * WARP_ROWS + lane / 4;
    for column in 0..R / 4 {
        for j in 0..2 {
            // SAFETY: the caller's promise.
            unsafe {
                let out = Out::new(&o.to, p, part, row, 8 * column as u32 + lane % 4 * 2 + j as u32);
                out.store(p, 0, sums[4 * column + j]);
                out.store(p, 8, sums[4 * column + 2 + j]);
            }
        }
    }
}
