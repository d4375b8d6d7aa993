//! Shared memory: two stages, each with the weights and the activations of one step.

use core::marker::PhantomData;

use cuda_std::prelude::*;

use super::{BLOCK, Tile, WARP_BLOCKS};
use crate::kernels::format::FormatTile;
use crate::params::WARP;

/// Bytes of a load, a copy, and a row of `ldmatrix`.
pub(super) const UNIT: u32 = 16;
/// Rows of the activations' scales are so many words longer than the tile, to lie in other banks; an even number, for two
/// are read at once.
const X_PAD: u32 = 2;

/// Bytes from one row of a stage to the next: a unit more than its columns, so that neither the eight rows of an
/// `ldmatrix` nor the units of a row meet in a bank.
pub(super) const fn row_bytes(tile: Tile) -> u32 {
    tile.step + UNIT
}

/// How a tile is spread over the warps: `WM` of them along rows with `MT` products of 16 each, `WN` along tokens
/// with `NT` products of 8 each, `WK` along the columns of a step.
pub(super) struct Shape<const MT: usize, const NT: usize, const WM: u32, const WN: u32, const WK: u32>;

/// [`Shape`]'s numbers.
pub(super) trait Geometry {
    /// The tile.
    const TILE: Tile;
    /// Warps along rows, tokens and columns.
    const WARPS: [u32; 3];
}

impl<const MT: usize, const NT: usize, const WM: u32, const WN: u32, const WK: u32> Geometry
    for Shape<MT, NT, WM, WN, WK>
{
    const TILE: Tile = {
        let tile = Tile::new(8 * NT as u32 * WN);
        assert!(WM * WN * WK * WARP == tile.threads);
        assert!(tile.rows == 16 * MT as u32 * WM && tile.step == WK * WARP_BLOCKS * BLOCK);
        tile
    };
    const WARPS: [u32; 3] = [WM, WN, WK];
}

/// Where the parts of a stage lie, in bytes from its start; the last is its end.
///
/// Weights and activations as bytes, `[rows or tokens, step]`; scales and minimums of the weights, `[group, row]`;
/// scales and sums of the activations, `[unit, token]`.
const fn offsets(tile: Tile, group_elems: u32, has_min: bool) -> [u32; 7] {
    let groups = tile.step / group_elems * tile.rows * 4;
    let units = tile.step / UNIT * (tile.tokens + X_PAD) * 4;
    let (min, sum) = if has_min { (groups, units) } else { (0, 0) };
    let parts = [tile.rows * row_bytes(tile), tile.tokens * row_bytes(tile), groups, min, units, sum];
    let (mut offsets, mut i) = ([0; 7], 0);
    while i < 6 {
        offsets[i + 1] = offsets[i] + parts[i];
        i += 1;
    }
    offsets
}

/// Bytes of a stage.
pub(super) const fn stage_bytes(tile: Tile, group_elems: u32, has_min: bool) -> u32 {
    offsets(tile, group_elems, has_min)[6]
}

/// A stage of shared memory, or the parts of it from a lane's place on.
pub(super) struct Stage<F, G> {
    pub(super) w: Shared<u8>,
    pub(super) x: Shared<u8>,
    pub(super) scale: Shared<f32>,
    pub(super) min: Shared<f32>,
    pub(super) x_scale: Shared<f32>,
    pub(super) x_sum: Shared<f32>,
    pub(super) of: PhantomData<(F, G)>,
}

impl<F, G> Clone for Stage<F, G> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<F, G> Copy for Stage<F, G> {}

impl<F: FormatTile, G: Geometry> Stage<F, G> {
    const OFFSETS: [u32; 7] = offsets(G::TILE, F::GROUP_ELEMS, F::HAS_MIN);
    pub(super) const BYTES: u32 = Self::OFFSETS[6];
    /// Words from the activation scales of one unit to those of the next.
    pub(super) const X_STRIDE: u32 = G::TILE.tokens + X_PAD;

    /// The stage at byte `start`.
    #[inline(always)]
    pub(super) fn new(start: u32) -> Self {
        let [w, x, scale, min, x_scale, x_sum, _] = const { Self::OFFSETS };
        Stage {
            w: dynamic(start + w),
            x: dynamic(start + x),
            scale: dynamic(start + scale),
            min: dynamic(start + min),
            x_scale: dynamic(start + x_scale),
            x_sum: dynamic(start + x_sum),
            of: PhantomData,
        }
    }

    /// The parts of the weights from byte `w` and scale `scale` on, of the activations from `x` and `x_scale` on.
    #[inline(always)]
    pub(super) fn at(&self, w: u32, scale: u32, x: u32, x_scale: u32) -> Self {
        Stage {
            w: self.w.add(w),
            x: self.x.add(x),
            scale: self.scale.add(scale),
            min: self.min.add(scale),
            x_scale: self.x_scale.add(x_scale),
            x_sum: self.x_sum.add(x_scale),
            of: PhantomData,
        }
    }
}
