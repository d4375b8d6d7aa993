//! Multiplying a stage: `mma`, and the scales.

use cuda_std::{mma, prelude::*};

use super::stage::{Geometry, Stage, UNIT, row_bytes};
use super::{MAGIC, WARP_BLOCKS};
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

    /// A stage from where this lane reads: its row of `ldmatrix`, and its place in C.
    #[inline(always)]
    pub(super) fn of<F: FormatTile, G: Geometry, const NT: usize>(&self, stage: &Stage<F, G>) -> Stage<F, G> {
        let (lane, block, row_bytes) = (self.lane, self.k * WARP_BLOCKS, const { row_bytes(G::TILE) });
        let (g, t) = (lane / 4, lane % 4);
        // Sixteen rows' first halves, then their second. Of tokens, both halves of eight, then of the next eight;
        // where there are but eight tokens, words are read one by one.
        let w = (self.row + lane % 16) * row_bytes + lane / 16 * UNIT;
        let x =
            if NT == 1 { g * row_bytes + 4 * t } else { (lane % 8 + lane / 16 * 8) * row_bytes + lane / 8 % 2 * UNIT };
        stage.at(
            w + block * Q8_BLOCK,
            block * const { Q8_BLOCK / F::GROUP_ELEMS * G::TILE.rows } + self.row + g,
            self.token * row_bytes + x + block * Q8_BLOCK,
            block * const { Stage::<F, G>::X_STRIDE } + self.token + 2 * t,
        )
    }
}

/// A lane's sums: for `MT` by `NT` products, those of [`mma`]'s C.
pub(super) type Sums<const MT: usize, const NT: usize> = [[[f32; 4]; NT]; MT];

/// Weights of 16 rows and one group, as a lane has them: scale, [`MAGIC`] times the scale, minimum; of two rows.
#[derive(Clone, Copy)]
struct Scales {
    scale: [f32; 2],
    offset: [f32; 2],
    min: [f32; 2],
}

impl Scales {
    /// # Safety
    /// As [`multiply`].
    #[inline(always)]
    unsafe fn load<F: FormatTile, G: Geometry>(from: &Stage<F, G>, group: u32, row: u32) -> Self {
        let at = group * G::TILE.rows + row;
        // SAFETY: the caller's promise.
        unsafe {
            let scale = [from.scale.get(at), from.scale.get(at + 8)];
            Scales {
                scale,
                offset: scale.map(|scale| scale * -f32::from_bits(MAGIC.cast_unsigned())),
                min: if F::HAS_MIN { [from.min.get(at), from.min.get(at + 8)] } else { [0.0; 2] },
            }
        }
    }

    /// Adds a product that started at [`MAGIC`], times both scales, without the minimum.
    #[inline(always)]
    fn add(&self, product: [i32; 4], x_scale: F32x2, sums: &mut [f32; 4]) {
        let x = x_scale.to_array();
        for j in 0..4 {
            let raw = f32::from_bits(product[j].cast_unsigned());
            sums[j] = math::fma(math::fma(raw, self.scale[j / 2], self.offset[j / 2]), x[j % 2], sums[j]);
        }
    }

    /// Subtracts the minimum times the activations' sum.
    #[inline(always)]
    fn subtract_min(&self, x_sum: F32x2, sums: &mut [f32; 4]) {
        let x = x_sum.to_array();
        for j in 0..4 {
            sums[j] = math::fma(-self.min[j / 2], x[j % 2], sums[j]);
        }
    }
}

/// The weights of 16 rows and one block, as a lane has them: [`mma`]'s A, and the scales of the block's groups.
#[derive(Clone, Copy)]
struct Rows {
    a: [u32; 4],
    /// The second where there are two.
    scales: [Scales; 2],
}

impl Rows {
    /// For the `m`-th sixteen rows and block `k` of the warp.
    ///
    /// # Safety
    /// As [`multiply`].
    #[inline(always)]
    unsafe fn load<F: FormatTile, G: Geometry>(from: &Stage<F, G>, k: u32, m: u32) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let a = mma::ldmatrix_x4(from.w, 16 * m * const { row_bytes(G::TILE) } + k * Q8_BLOCK);
            let groups = const { Q8_BLOCK / F::GROUP_ELEMS };
            let first = Scales::load(from, k * groups, 16 * m);
            Rows { a, scales: [first, if groups == 2 { Scales::load(from, k * groups + 1, 16 * m) } else { first }] }
        }
    }

    /// Adds the products with eight tokens' activations.
    ///
    /// # Safety
    /// Every lane of the warp comes here.
    #[inline(always)]
    unsafe fn add<F: FormatTile>(&self, b: [u32; 2], x_scale: F32x2, x_sum: F32x2, sums: &mut [f32; 4]) {
        let ([first, second], a) = (&self.scales, self.a);
        // SAFETY: the caller's promise.
        unsafe {
            if F::GROUP_ELEMS == 16 {
                first.add(mma::m16n8k16_s8([a[0], a[1]], b[0], [MAGIC; 4]), x_scale, sums);
                second.add(mma::m16n8k16_s8([a[2], a[3]], b[1], [MAGIC; 4]), x_scale, sums);
            } else {
                first.add(mma::m16n8k32_s8(a, b, [MAGIC; 4]), x_scale, sums);
            }
        }
        if F::HAS_MIN {
            first.subtract_min(x_sum, sums);
        }
    }
}

/// The activations of the warp's block `k` for the `pair`-th 16 tokens, as [`mma`]'s B; for eight where `NT` is 1.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn load_x<F: FormatTile, G: Geometry, const NT: usize>(from: &Stage<F, G>, k: u32, pair: u32) -> [[u32; 2]; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        if NT == 1 {
            let words = from.x.add(k * Q8_BLOCK).cast::<u32>();
            return [[words.get(0), words.get(UNIT / 4)], [0; 2]];
        }
        let [b0, b1, b2, b3] = mma::ldmatrix_x4(from.x, 16 * pair * const { row_bytes(G::TILE) } + k * Q8_BLOCK);
        [[b0, b1], [b2, b3]]
    }
}

/// Multiplies blocks `k` to `end` of the warp's part of a stage, `from` where the lane reads it, with the first
/// `PAIRS` times 16 of its tokens.
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
    end: u32,
    sums: &mut Sums<MT, NT>,
) {
    let mut k = 0;
    while k < end {
        // SAFETY: the caller's promise.
        unsafe { multiply::<F, G, MT, NT, PAIRS>(from, k, sums) };
        k += 1;
    }
}

/// Multiplies block `k`.
///
/// # Safety
/// As [`multiply_blocks`].
#[inline(always)]
unsafe fn multiply<F: FormatTile, G: Geometry, const MT: usize, const NT: usize, const PAIRS: usize>(
    from: &Stage<F, G>,
    k: u32,
    sums: &mut Sums<MT, NT>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let rows: [Rows; MT] = core::array::from_fn(|m| Rows::load(from, k, m as u32));
        for pair in 0..PAIRS.min(NT.div_ceil(2)) {
            let b = load_x::<F, G, NT>(from, k, pair as u32);
            for n in 2 * pair..(2 * pair + 2).min(NT) {
                let (b, x) = (b[n % 2], (k * const { Stage::<F, G>::X_STRIDE } + 8 * n as u32) / 2);
                let x_scale: F32x2 = from.x_scale.cast().get(x);
                let x_sum: F32x2 = if F::HAS_MIN { from.x_sum.cast().get(x) } else { F32x2::splat(0.0) };
                for m in 0..MT {
                    rows[m].add::<F>(b, x_scale, x_sum, &mut sums[m][n]);
                }
            }
        }
    }
}
