//! One lane of a block: which tile is its own, and the loop over the steps.

use cuda_std::{cp_async, pdl, prelude::*};

use super::operands::{WeightLane, XLane};
use super::output::finish;
use super::product::{Place, Sums, multiply_blocks};
use super::stage::{Geometry, Stage};
use super::{MatmulParams, WARP_BLOCKS};
use crate::kernels::format::FormatTile;

/// The arguments of a kernel.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub(super) w: *const u8,
    pub(super) qs: *const i8,
    pub(super) d: *const f32,
    pub(super) s: *const f32,
    pub(super) to: Target,
}

/// Where results go, and of which rows they are.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub(super) y: *mut f32,
    pub(super) bias: *const f32,
    pub(super) order: *const u32,
    pub(super) tiles: *const U32x4,
}

/// What this block computes: `n` rows of `y` from `first` on (of all, or of `order`), with an expert's weights.
pub(super) struct Part {
    pub(super) expert: u32,
    pub(super) first: u32,
    pub(super) n: u32,
}

impl Part {
    /// # Safety
    /// As [`matmul`].
    #[inline(always)]
    pub(super) unsafe fn of_block(to: &Target, p: &MatmulParams, tokens: u32) -> Self {
        let block = thread::block_idx_x();
        if to.tiles.is_null() {
            let first = block * tokens;
            return Part { expert: 0, first, n: tokens.min(p.routes - first) };
        }
        // Which expert it is was written by the grid ahead.
        pdl::grid_dependency_wait();
        // SAFETY: there is an entry for every block.
        let tile: U32x4 = unsafe { ld(to.tiles.add(block as usize)) };
        Part { expert: tile.x, first: tile.y, n: tile.z }
    }

    /// The row of `y` that is the tile's number `i`; the first for one past its end.
    ///
    /// # Safety
    /// As [`matmul`]; the part is not empty.
    #[inline(always)]
    pub(super) unsafe fn route(&self, to: &Target, i: u32) -> u32 {
        let at = self.first + if i < self.n { i } else { 0 };
        // SAFETY: the part lies within `order`.
        if to.order.is_null() { at } else { unsafe { ld(to.order.add(at as usize)) } }
    }

    /// The row of `x` for [`Part::route`].
    ///
    /// # Safety
    /// As [`Part::route`].
    #[inline(always)]
    pub(super) unsafe fn x_row(&self, to: &Target, p: &MatmulParams, i: u32) -> u32 {
        // SAFETY: the caller's promise; the launcher gives a divisor that is not 0.
        unsafe {
            let route = self.route(to, i);
            if to.order.is_null() { route } else { math::div_rem(route, p.x_div).0 }
        }
    }
}

/// One lane of a block.
///
/// # Safety
/// As [`matmul_q8_0_n8`](super::matmul_q8_0_n8), for the format and the tile.
#[inline(always)]
pub(super) unsafe fn matmul<
    F: FormatTile,
    G: Geometry,
    const MT: usize,
    const NT: usize,
    const CH: usize,
    const BI: usize,
>(
    o: Operands,
    p: &MatmulParams,
) {
    const { assert!(CH as u32 * G::TILE.threads * F::CHUNK_ELEMS == G::TILE.rows * G::TILE.step) };
    // SAFETY: the caller's promise, item by item: rows, chunks, tokens and blocks are clamped or checked where they
    // are formed. A stage is written between the barrier that ends its use and the one that begins it.
    unsafe {
        let part = Part::of_block(&o.to, p, G::TILE.tokens);
        if part.n == 0 {
            return; // the whole block
        }
        let weights = WeightLane::<F>::new::<G>(&o, p, part.expert);
        let mut raw = weights.load::<G, CH>(p, 0);
        pdl::grid_dependency_wait();
        pdl::launch_dependents();

        let steps = p.cols.div_ceil(G::TILE.step);
        let x = XLane::<BI>::new::<G>(&o, p, &part);
        let stage = Stage::<F, G>::new(0);
        x.copy(&o, p, &part, 0, &stage);
        weights.unpack::<G, CH>(p, 0, &raw, &stage);
        if steps > 1 {
            raw = weights.load::<G, CH>(p, 1);
        }
        cp_async::wait::<0>();
        block::sync_threads(); // the first stage is whole

        let at = Place::new::<G>();
        let mut sums: Sums<MT, NT> = [[[0.0; 4]; NT]; MT];
        let (mut step, mut start) = (0, 0);
        loop {
            let stage = Stage::<F, G>::new(start);
            start = const { Stage::<F, G>::BYTES } - start;
            let next = Stage::<F, G>::new(start);
            let more = step + 1 < steps;
            if more {
                x.copy(&o, p, &part, step + 1, &next);
            }
            let from = at.of::<F, G, MT, NT>(&stage);
            // Warps whose tokens are all past the tile's end have nothing to multiply, and those with few of them
            // half as much (but for groups of 16: two loops take them too many registers). Unrolled, a loop over 32
            // tokens would take registers from other blocks.
            let blocks = if NT >= 4 { p.warp_blocks } else { WARP_BLOCKS };
            let live = part.n.saturating_sub(at.token);
            if live > 16 || (NT <= 2 || F::GROUP_ELEMS == 16) && live > 0 {
                multiply_blocks::<F, G, MT, NT, NT>(&from, blocks, &mut sums);
            } else if live > 0 {
                multiply_blocks::<F, G, MT, NT, 1>(&from, blocks, &mut sums);
            }
            step += 1;
            if !more {
                break;
            }
            weights.unpack::<G, CH>(p, step, &raw, &next);
            if step + 1 < steps {
                raw = weights.load::<G, CH>(p, step + 1);
            }
            cp_async::wait::<0>();
            block::sync_threads(); // the next stage is whole, and this one is done with
        }
        finish::<G, MT, NT>(&o.to, p, &part, at, &sums);
    }
}
