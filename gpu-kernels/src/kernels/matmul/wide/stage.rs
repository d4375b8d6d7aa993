//! Shared memory: stages, each with the activations and the weights of a step, and the factors of the step at hand.

use core::marker::PhantomData;

use cuda_std::prelude::*;
use cuda_std::wgmma::{ALIGN, COLUMN_BYTES};

use super::super::Tile;
use super::wide_tile;
use crate::kernels::format::FormatWide;
use crate::params::WARP;

/// Bytes of a copy.
pub(super) const UNIT: u32 = 16;
/// Elements of a column of the product's second factor.
pub(super) const COLUMN: u32 = COLUMN_BYTES / 2;
/// Rows of a warp.
pub(super) const WARP_ROWS: u32 = 16;

/// Chunks of a row in a step.
pub(super) const fn chunks<F: FormatWide>() -> u32 {
    F::STEP / F::CHUNK_ELEMS
}

/// Groups of a row in a step.
pub(super) const fn groups<F: FormatWide>() -> u32 {
    F::STEP / F::GROUP_ELEMS
}

/// Groups of a row whose factors are made together.
pub(super) const fn span_groups<F: FormatWide>() -> u32 {
    F::SPAN * groups::<F>()
}

/// Bytes of a row's units. An odd number of units, so that those of eight rows lie in different banks.
pub(super) const fn row_bytes<F: FormatWide>() -> u32 {
    UNIT * ((chunks::<F>() + F::EXTRA) | 1)
}

/// Bytes of a step's activations.
const fn x_bytes<F: FormatWide>(tile: Tile) -> u32 {
    F::STEP / COLUMN * tile.tokens * COLUMN_BYTES
}

/// Bytes of a stage.
const fn stage_bytes<F: FormatWide>(tile: Tile) -> u32 {
    let bytes = x_bytes::<F>(tile) + tile.rows * row_bytes::<F>();
    assert!(bytes.is_multiple_of(ALIGN));
    bytes
}

/// Bytes of the factors, of which each warp has its own.
const fn factor_bytes<F: FormatWide>(tile: Tile) -> u32 {
    tile.rows * span_groups::<F>() * size_of::<F::Factors>() as u32
}

/// Stages: as many as there is room for, at most six; the smaller tile leaves half of it to a second block. At least
/// three: one that is multiplied, one that the products of the step before may still read, and one to copy to.
pub(super) const fn n_stages<F: FormatWide>(tile: Tile) -> u32 {
    let room = if tile.tokens == 128 { 220 << 10 } else { 110 << 10 };
    let n = (room - factor_bytes::<F>(tile)) / stage_bytes::<F>(tile);
    assert!(n >= 3);
    if n < 6 { n } else { 6 }
}

/// Bytes of shared memory that a block needs.
pub(super) const fn shared_bytes<F: FormatWide>(tile: Tile) -> u32 {
    n_stages::<F>(tile) * stage_bytes::<F>(tile) + factor_bytes::<F>(tile)
}

/// Where stages and factors lie, for a tile of `N` tokens.
pub(super) struct Memory<F, const N: u32>(PhantomData<F>);

impl<F: FormatWide, const N: u32> Memory<F, N> {
    const TILE: Tile = wide_tile(N);
    pub(super) const N_STAGES: u32 = n_stages::<F>(Self::TILE);
    /// Bytes of 64 columns of the activations.
    pub(super) const X_PART: u32 = N * COLUMN_BYTES;

    /// The activations of stage `stage`.
    #[inline(always)]
    pub(super) fn x(stage: u32) -> Shared<u8> {
        dynamic(stage * const { stage_bytes::<F>(Self::TILE) })
    }

    /// The weights of stage `stage`, `[row, unit]`.
    #[inline(always)]
    pub(super) fn w(stage: u32) -> Shared<u8> {
        Self::x(stage).add(const { x_bytes::<F>(Self::TILE) })
    }

    /// The factors of a warp's rows, `[group, row]`.
    #[inline(always)]
    pub(super) fn factors() -> Shared<F::Factors> {
        let warp = thread::thread_idx_x() / WARP;
        let before = const { Self::N_STAGES * stage_bytes::<F>(Self::TILE) };
        dynamic::<F::Factors>(before).add(warp * const { span_groups::<F>() * WARP_ROWS })
    }
}
