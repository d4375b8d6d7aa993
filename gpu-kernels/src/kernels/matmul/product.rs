//! Multiplying a stage: `mma`, and the scales.

use cuda_std::{mma, prelude::*};

use super::stage::{Geometry, Stage, UNIT, row_bytes};
use super::{BLOCK, MAGIC, WARP_BLOCKS};
use crate::kernels::format::FormatTile;
use crate::params::{Q8_BLOCK, WARP};

/// A lane's place in its warp's part of the tile.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// The lane.
    pub(super) lane: u32,
    /// First row and first token of the warp.
    pub(super) row: u32,
    pub(super) token: u32,
    /// Its number among the warps along the columns.
    pub(super) k: u32,
}

impl Place {
    #[inline(always)]
    pub(super) fn new<G: Geometry>() -> Self {
        let [rows, tokens, _] = G::WARPS;
        let (lane, warp) = (thread::thread_idx_x() % WARP, thread::thread_idx_x() / WARP);
        Place {
            lane,
            row: warp % rows * const { G::TILE.rows / G::WARPS[0] },
            token: warp / rows % tokens * const { G::TILE.tokens / G::WARPS[1] },
            k: warp / (rows * tokens),
        }
    }

    /// A stage from where this lane reads: its rows of `ldmatrix`, and its place in C.
    #[inline(always)]
    pub(super) fn of<F: FormatTile, G: Geometry, const MT: usize, const NT: usize>(
        &self,
        stage: &Stage<F, G>,
    ) -> Stage<F, G> {
        let (lane, block, row_bytes) = (self.lane, self.k * WARP_BLOCKS, const { row_bytes(G::TILE) });
        let (g, t) = (lane / 4, lane % 4);
        // One unit of 32 rows; or of sixteen the first of a block's two, then the second. Of tokens likewise, but both
        // of eight come before those of the next eight; where there are but eight tokens, words are read one by one.
        let w = if MT == 2 { lane * row_bytes } else { lane % 16 * row_bytes + lane / 16 * UNIT };
        let x = match (MT, NT) {
            (1, 1) => g * row_bytes + 4 * t,
            (1, _) => (lane % 8 + lane / 16 * 8) * row_bytes + lane / 8 % 2 * UNIT,
            _ => lane * row_bytes,
        };
        stage.at(
            self.row * row_bytes + w + block * BLOCK,
            block * const { BLOCK / F::GROUP_ELEMS * G::TILE.rows } + self.row + g,
            self.token * row_bytes + x + block * BLOCK,
            block * const { BLOCK / Q8_BLOCK * Stage::<F, G>::X_STRIDE } + self.token + 2 * t,
        )
    }
}

/// A lane's sums: for `MT` by `NT` products, those of [`mma`]'s C.
pub(super) type Sums<const MT: usize, const NT: usize> = [[[f32; 4]; NT]; MT];

/// The scales of 16 rows and one group, as a lane has them: of two rows, and [`MAGIC`] times minus them.
#[derive(Clone, Copy)]
struct Scales {
    scale: [f32; 2],
    offset: [f32; 2],
}

impl Scales {
    /// # Safety
    /// As [`multiply`].
    #[inline(always)]
    unsafe fn load<F: FormatTile, G: Geometry>(from: &Stage<F, G>, group: u32, row: u32) -> Self {
        // SAFETY: the caller's promise.
        let scale = unsafe { two_rows::<G>(from.scale, group, row) };
        Scales { scale, offset: scale.map(|scale| scale * -f32::from_bits(MAGIC.cast_unsigned())) }
    }

    /// Adds a product that started at [`start`], times both scales. `x` are two tokens' scales.
    #[inline(always)]
    fn add<const NT: usize>(&self, product: [i32; 4], x: [f32; 2], sums: &mut [f32; 4]) {
        for j in 0..4 {
            let scaled = if start::<NT>() == MAGIC {
                math::fma(f32::from_bits(product[j].cast_unsigned()), self.scale[j / 2], self.offset[j / 2])
            } else {
                product[j] as f32 * self.scale[j / 2]
            };
            sums[j] = math::fma(scaled, x[j % 2], sums[j]);
        }
    }
}

/// What products start at: 0 in tiles of eight tokens, where the integer is converted. It takes fewer registers, of which
/// a lane has fewest there, and is to the same bits.
const fn start<const NT: usize>() -> i32 {
    if NT == 1 { 0 } else { MAGIC }
}

/// The scales or minimums of a group for the two rows that a lane has of 16.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn two_rows<G: Geometry>(from: Shared<f32>, group: u32, row: u32) -> [f32; 2] {
    let at = group * G::TILE.rows + row;
    // SAFETY: the caller's promise.
    unsafe { [from.get(at), from.get(at + 8)] }
}

/// The scales or sums of 16 columns for the two tokens that a lane has of the `n`-th eight.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn two_tokens<F: FormatTile, G: Geometry>(from: Shared<f32>, unit: u32, n: usize) -> [f32; 2] {
    let at = unit * const { Stage::<F, G>::X_STRIDE } + 8 * n as u32;
    // SAFETY: the caller's promise; rows are an even number of words apart.
    let two: F32x2 = unsafe { from.cast().get(at / 2) };
    two.to_array()
}

/// Multiplies `blocks` blocks of the warp's part of a stage, `from` where the lane reads it, with the first `PAIRS` times
/// 16 of its tokens.
///
/// # Safety
/// The stage is whole; every lane of the warp comes here.
#[inline(always)]
pub(super) unsafe fn multiply_blocks<
    F: FormatTile,
    G: Geometry,
    const MT: usize,
    const NT: usize,
    const PAIRS: usize,
>(
    from: &Stage<F, G>,
    blocks: u32,
    sums: &mut Sums<MT, NT>,
) {
    let mut k = 0;
    while k < blocks * MT as u32 {
        // SAFETY: the caller's promise.
        unsafe { multiply::<F, G, MT, NT, PAIRS>(from, k, sums) };
        k += 1;
    }
    // Apart, which takes fewer registers than beside the products.
    let mut k = 0;
    while F::HAS_MIN && k < blocks {
        // SAFETY: the caller's promise.
        unsafe { subtract_mins::<F, G, MT, NT, PAIRS>(from, k, sums) };
        k += 1;
    }
}

/// Multiplies what one `ldmatrix` brings of the weights, two factors of 16 rows and 16 columns: both halves of block `k`,
/// or where `MT` is 2 half `k` of 32 rows.
///
/// # Safety
/// As [`multiply_blocks`].
#[inline(always)]
unsafe fn multiply<F: FormatTile, G: Geometry, const MT: usize, const NT: usize, const PAIRS: usize>(
    from: &Stage<F, G>,
    k: u32,
    sums: &mut Sums<MT, NT>,
) {
    const { assert!(MT == 1 || MT == 2 && NT == 4) };
    let first = k * const { BLOCK / MT as u32 };
    // SAFETY: the caller's promise.
    unsafe {
        let a = mma::ldmatrix_x4(from.w, first);
        let scales = Scales::load(from, first / F::GROUP_ELEMS, 0);
        let scales = match (MT, F::GROUP_ELEMS) {
            (1, BLOCK) => [scales; 2],
            (1, _) => [scales, Scales::load(from, first / F::GROUP_ELEMS + 1, 0)],
            _ => [scales, Scales::load(from, first / F::GROUP_ELEMS, 16)],
        };
        for load in 0..if MT == 2 { 1 } else { PAIRS.min(NT.div_ceil(2)) } {
            let b = load_x::<F, G, NT>(from, first, load as u32);
            // Of the tokens one half, or of eight both.
            for i in 0..if MT == 2 { 2 * PAIRS.min(2) } else { 2 * NT.min(2) } {
                let (n, half) = if MT == 2 { (i, 0) } else { (2 * load + i / 2, i % 2) };
                let x = two_tokens::<F, G>(from.x_scale, first / Q8_BLOCK + half as u32, n);
                for m in 0..MT {
                    let a = [a[2 * (m + half)], a[2 * (m + half) + 1]];
                    let product = mma::m16n8k16_s8(a, b[i], [start::<NT>(); 4]);
                    scales[m + half].add::<NT>(product, x, &mut sums[m][n]);
                }
            }
        }
    }
}

/// The activations of 16 columns from column `first` on for 32 tokens, as [`mma`]'s B; or of both halves of a block for
/// the `load`-th 16 tokens, or for eight where `NT` is 1.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn load_x<F: FormatTile, G: Geometry, const NT: usize>(from: &Stage<F, G>, first: u32, load: u32) -> [u32; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        if NT == 1 {
            let words = from.x.add(first).cast::<u32>();
            return [words.get(0), words.get(UNIT / 4), 0, 0];
        }
        mma::ldmatrix_x4(from.x, 16 * load * const { row_bytes(G::TILE) } + first)
    }
}

/// Subtracts the minimums of block `k` times the activations' sums.
///
/// # Safety
/// As [`multiply_blocks`].
#[inline(always)]
unsafe fn subtract_mins<F: FormatTile, G: Geometry, const MT: usize, const NT: usize, const PAIRS: usize>(
    from: &Stage<F, G>,
    k: u32,
    sums: &mut Sums<MT, NT>,
) {
    const { assert!(!F::HAS_MIN || F::GROUP_ELEMS == BLOCK) };
    // SAFETY: the caller's promise.
    unsafe {
        let mins: [[f32; 2]; MT] = core::array::from_fn(|m| two_rows::<G>(from.min, k, 16 * m as u32));
        for n in 0..NT.min(2 * PAIRS) {
            let [x, y] = [0, 1].map(|half| two_tokens::<F, G>(from.x_sum, 2 * k + half, n));
            let x = [x[0] + y[0], x[1] + y[1]];
            for m in 0..MT {
                for j in 0..4 {
                    sums[m][n][j] = math::fma(-mins[m][j / 2], x[j % 2], sums[m][n][j]);
                }
            }
        }
    }
}
