//! One lane of a block: the loop over the steps, and storing the tile.

use cuda_std::wgmma::Descriptor;
use cuda_std::{cp_async, pdl, prelude::*, wgmma};

use super::super::MatmulParams;
use super::super::output::Out;
use super::super::tile::Part;
use super::stage::{COLUMN, Memory, WARP_ROWS, chunks};
use super::tokens::Tokens;
use super::weights::{Weights, Words};
use super::{Operands, wide_tile};
use crate::kernels::format::FormatWide;
use crate::params::WARP;

/// Rows of the second factor that one product takes: a run of weights.
const RUN: u32 = 16;

/// One lane of a block, for tiles of `N` tokens: `R` sums, `G` groups of weights to bring in a step.
///
/// # Safety
/// As [`matmul_q8_0_w64`](super::matmul_q8_0_w64), for the format and the tile.
#[inline(always)]
pub(super) unsafe fn wide<F: FormatWide, const N: u32, const R: usize, const G: usize>(o: Operands, p: &MatmulParams) {
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
        let mut scales = weights.scales::<G>(p, 0);
        pdl::grid_dependency_wait();
        pdl::launch_dependents();

        let (steps, columns) = (p.cols.div_ceil(F::STEP), part.n.next_multiple_of(16));
        let tokens = Tokens::new::<N>(&o, p, &part);
        for step in 0..ahead {
            tokens.copy::<F, N>(&o, p, &part, columns, step, step);
            cp_async::commit();
        }
        let mut sums = [0.0; R];
        let (mut step, mut stage, mut free) = (0, 0, ahead);
        while step < steps {
            wait_copies(n_stages);
            wgmma::fence_shared();
            block::sync_threads(); // this stage is whole; all but the last product of the step before are done
            if step + ahead < steps {
                weights.copy::<N>(p, step + ahead, free);
                tokens.copy::<F, N>(&o, p, &part, columns, step + ahead, free);
            }
            cp_async::commit();
            weights.store_factors::<N, G>(p, step, &scales);
            scales = weights.scales::<G>(p, step + 1);
            warp::sync_warp(warp::FULL_MASK); // the warp's factors are whole
            multiply::<F, N, R>(step, stage, columns, &mut sums);
            step += 1;
            stage = if stage + 1 == n_stages { 0 } else { stage + 1 };
            free = if free + 1 == n_stages { 0 } else { free + 1 };
        }
        wgmma::finish(&mut sums);
        store::<N, R>(&o, p, &part, &sums);
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

/// Multiplies a stage with the first `columns` of its tokens. One product is still running when it returns.
///
/// # Safety
/// The stage and the warp's factors are whole, and visible to products; the whole warpgroup comes here.
#[inline(always)]
unsafe fn multiply<F: FormatWide, const N: u32, const R: usize>(
    step: u32,
    stage: u32,
    columns: u32,
    sums: &mut [f32; R],
) {
    for chunk in 0..const { chunks::<F>() } {
        // SAFETY: the caller's promise; the chunk's runs lie in the step.
        unsafe {
            let words = Words::load::<F, N>(stage, chunk);
            for run in 0..F::RUNS {
                let start = F::start(chunk) + run * F::RUN_DISTANCE;
                let row_chunk = step * const { chunks::<F>() } + chunk;
                let a = words.weights::<F, N>(row_chunk, run as usize, start / F::GROUP_ELEMS);
                let x = Memory::<F, N>::x(stage).add(start / COLUMN * Memory::<F, N>::X_PART);
                wgmma::fence();
                product(columns, sums, a, Descriptor::new(x).rows(start % COLUMN / RUN));
                wgmma::commit();
                // The one before is done, so that its weights' registers are free.
                wgmma::wait::<1>();
            }
        }
    }
}

/// `sums += a·b` for so many columns.
///
/// # Safety
/// As [`wgmma::mma_bf16`].
#[inline(always)]
unsafe fn product<const R: usize>(columns: u32, sums: &mut [f32; R], a: [u32; 4], b: Descriptor) {
    macro_rules! of {
        ($($n:literal)+) => {
            match columns {
                $($n if R >= $n / 2 => wgmma::mma_bf16::<$n, R>(sums, a, b),)+
                _ => {} // the tile has no more columns
            }
        };
    }
    // SAFETY: the caller's promise.
    unsafe { of!(16 32 48 64 80 96 112 128) }
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
