//! The activations that a lane brings to a stage.

use cuda_std::{cp_async, prelude::*, wgmma};

use super::super::MatmulParams;
use super::super::tile::Part;
use super::Operands;
use super::stage::{COLUMN, Memory, UNIT};
use crate::kernels::format::{FormatWide, select};

/// Units of a token's 64 columns, which as many lanes bring.
const UNITS: u32 = COLUMN * 2 / UNIT;
/// Tokens of a lane.
const TOKENS: usize = 2;

/// A lane's tokens, as places of their rows in `x`, in units.
pub(super) struct Tokens([u32; TOKENS]);

/// The tile's number of a lane's `i`-th token.
#[inline(always)]
fn token<const N: u32>(i: usize) -> u32 {
    thread::thread_idx_x() / UNITS + i as u32 * (N / TOKENS as u32)
}

impl Tokens {
    /// # Safety
    /// As [`Part::x_row`]; the grid ahead has ended.
    #[inline(always)]
    pub(super) unsafe fn new<const N: u32>(o: &Operands, p: &MatmulParams, part: &Part) -> Self {
        // SAFETY: the caller's promise; the launcher has checked that elements of `x` have 32-bit numbers.
        Tokens(core::array::from_fn(|i| unsafe { part.x_row(&o.to, p, token::<N>(i)) * (p.cols / 8) }))
    }

    /// Starts to copy the columns of a step; zeros past the row's end, and for tokens past the tile's, of which there
    /// are as many as the product takes, `columns` in all.
    ///
    /// # Safety
    /// As [`wide`](super::product::wide); nobody accesses the stage's activations before the copy's end and a barrier.
    #[inline(always)]
    pub(super) unsafe fn copy<F: FormatWide, const N: u32>(
        &self,
        o: &Operands,
        p: &MatmulParams,
        part: &Part,
        columns: u32,
        step: u32,
        stage: u32,
    ) {
        let lane_unit = thread::thread_idx_x() % UNITS;
        for i in 0..TOKENS {
            let token = token::<N>(i);
            if token >= columns {
                continue;
            }
            for part_of_step in 0..const { F::STEP / COLUMN } {
                let unit = (step * const { F::STEP / COLUMN } + part_of_step) * UNITS + lane_unit;
                let inside = token < part.n && unit < p.cols / 8;
                let place = wgmma::swizzle_128((token * UNITS + lane_unit) * UNIT);
                // SAFETY: the row has the unit if it is inside; else nothing is read.
                unsafe {
                    let from = o.x.add((self.0[i] + select(inside, unit, 0)) as usize);
                    let to = Memory::<F, N>::x(stage).add(part_of_step * Memory::<F, N>::X_PART + place);
                    cp_async::copy_16_or_zero(to.cast(), 0, from, inside);
                }
            }
        }
    }
}
