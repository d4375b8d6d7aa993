//! Matrix products with quantised weights: `y[r, j] = Σ_k w[r, k]·x[j, k]`.
//!
//! Weights stay in the mapped file. For one row of `x` they are dequantised in registers. For more, a few rows at a
//! time are dequantised into a small buffer that stays in cache, and are multiplied with all rows of `x` from there,
//! so a batch pays for dequantisation once.
//!
//! Every product is one sum in one order, whatever the batch: a token gives the same bits alone, in a
//! prompt, or beside other sequences.

use std::sync::Arc;

use gpu_kernels::blocks::GgmlType;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::dequant::{self, Block, GROUP, PART, WithBlock, dequantize_row_inline, with_block};
use crate::backend::{Error, Result};
use crate::gguf::{self, Gguf};

/// A weight matrix `[rows, cols]`, or a stack of `n_expert` of them, that lies in the file.
pub struct Matrix {
    file: Arc<Gguf>,
    name: String,
    ty: GgmlType,
    pub(super) rows: usize,
    pub(super) cols: usize,
    n_expert: usize,
}

impl Matrix {
    pub(super) fn new(file: &Arc<Gguf>, tensor: &gguf::Tensor<'_>) -> Result<Matrix> {
        let info = tensor.info;
        let (rows, n_expert) = match *info.dims() {
            [_] => (1, 1),
            [_, rows] => (rows, 1),
            [_, rows, n_expert] => (rows, n_expert),
            _ => return Err(Error::Unsupported(format!("tensor {:?} has four dimensions", info.name))),
        };
        Ok(Matrix { file: Arc::clone(file), name: info.name.clone(), ty: info.ty, rows, cols: info.cols(), n_expert })
    }

    /// The matrix of one expert; of a plain matrix, 0.
    pub(super) fn expert(&self, expert: usize) -> Weights<'_> {
        assert!(expert < self.n_expert, "{}: expert {expert} of {}", self.name, self.n_expert);
        let tensor = self.file.find(&self.name).expect("the matrix was made from this file's tensor");
        let bytes = self.rows * tensor.row_bytes();
        let data = &tensor.data()[expert * bytes..][..bytes];
        Weights { ty: self.ty, data, row_bytes: tensor.row_bytes(), rows: self.rows, cols: self.cols }
    }
}

/// The bytes of one weight matrix.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a> {
    ty: GgmlType,
    data: &'a [u8],
    row_bytes: usize,
    rows: usize,
    cols: usize,
}

impl Weights<'_> {
    /// The stored bytes of row `row`, and their type.
    pub(super) fn row(&self, row: usize) -> (GgmlType, &[u8]) {
        (self.ty, &self.data[row * self.row_bytes..][..self.row_bytes])
    }
}

/// A product to compute: `y = w·xᵀ`, `[w.rows, xs.len()]`.
pub(super) struct Product<'a> {
    pub(super) w: Weights<'a>,
    /// Rows of `w.cols` values.
    pub(super) xs: Vec<&'a [f32]>,
    pub(super) y: &'a mut [f32],
}

/// Weight elements a task takes at least, so that its work outweighs the handing over.
const TASK_ELEMS: usize = 1 << 15;

impl Product<'_> {
    /// Computes the product on all threads.
    pub(super) fn compute(self) {
        let Product { w, xs, y } = self;
        assert!(
            xs.iter().all(|x| x.len() == w.cols) && y.len() == w.rows * xs.len(),
            "operands have the product's shape"
        );
        if xs.is_empty() || y.is_empty() {
            return;
        }
        if let [x] = *xs
            && w.cols.is_multiple_of(PART)
        {
            let task_rows = (TASK_ELEMS / w.cols).max(1).next_multiple_of(TILE_ROWS);
            return y.par_chunks_mut(task_rows).enumerate().for_each(|(task, y)| {
                pulp::Arch::new().dispatch(Vector { w: &w, first_row: task * task_rows, x, y });
            });
        }
        // Few columns: keep the dequantised rows in the first-level cache. Many: read the columns less often.
        let block_rows = if xs.len() <= TILE_COLS { TILE_ROWS } else { 4 * TILE_ROWS };
        let task_rows = (TASK_ELEMS / w.cols).max(1).next_multiple_of(block_rows);
        let buffer = || vec![0.0; block_rows * w.cols];
        let strip = |buffer: &mut Vec<f32>, (task, y): (usize, &mut [f32])| {
            pulp::Arch::new().dispatch(Strip { w: &w, first_row: task * task_rows, xs: &xs, y, buffer });
        };
        y.par_chunks_mut(task_rows * xs.len()).enumerate().for_each_init(buffer, strip);
    }
}

/// Weight rows and `x` rows of a register tile: twelve accumulators, three `x` vectors and one weight vector
/// fill the sixteen registers of AVX2.
const TILE_ROWS: usize = 4;
const TILE_COLS: usize = 3;

/// The rows of a [`Product`] from `first_row` on, as many as `y` has.
struct Strip<'a> {
    w: &'a Weights<'a>,
    first_row: usize,
    xs: &'a [&'a [f32]],
    y: &'a mut [f32],
    /// Holds a block of dequantised rows; its length says how many.
    buffer: &'a mut [f32],
}

impl WithSimd for Strip<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Strip { w, first_row, xs, y, buffer } = self;
        let block_rows = buffer.len() / w.cols;
        for (block, y) in y.chunks_mut(block_rows * xs.len()).enumerate() {
            let rows = y.len() / xs.len();
            for (r, out) in buffer.chunks_exact_mut(w.cols).take(rows).enumerate() {
                let (ty, bytes) = w.row(first_row + block * block_rows + r);
                dequantize_row_inline(ty, bytes, out);
            }
            for (x0, xs_tile) in (0..).step_by(TILE_COLS).zip(xs.chunks(TILE_COLS)) {
                for (w_tile, y) in buffer.chunks(TILE_ROWS * w.cols).zip(y.chunks_mut(TILE_ROWS * xs.len())) {
                    let y = (y, xs.len(), x0);
                    match *xs_tile {
                        [a] => tile(simd, w_tile, [a], y),
                        [a, b] => tile(simd, w_tile, [a, b], y),
                        [a, b, c] => tile(simd, w_tile, [a, b, c], y),
                        _ => unreachable!("a tile has at most {TILE_COLS} columns"),
                    }
                }
            }
        }
    }
}

/// The rows of a product with one row `x` from `first_row` on, as many as `y` has. `x` is whole [`PART`]s.
struct Vector<'a> {
    w: &'a Weights<'a>,
    first_row: usize,
    x: &'a [f32],
    y: &'a mut [f32],
}

impl WithSimd for Vector<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Vector { w, first_row, x, y } = self;
        for (tile, y) in y.chunks_mut(TILE_ROWS).enumerate() {
            // A tile that is not full has its last row several times.
            let mut rows: [&[u8]; TILE_ROWS] = [&[]; TILE_ROWS];
            for (r, row) in rows.iter_mut().enumerate() {
                (_, *row) = w.row(first_row + tile * TILE_ROWS + r.min(y.len() - 1));
            }
            let sums = with_block(w.ty, Dots { simd, rows, x });
            y.copy_from_slice(&sums[..y.len()]);
        }
    }
}

/// The dot products of quantised rows with `x`: what [`dots`] gives for the dequantised rows, to the last bit.
struct Dots<'a, S> {
    simd: S,
    rows: [&'a [u8]; TILE_ROWS],
    x: &'a [f32],
}

impl<S: Simd> WithBlock for Dots<'_, S> {
    type Output = [f32; TILE_ROWS];

    #[inline(always)]
    fn with_block<B: Block<H>, const H: usize>(self) -> [f32; TILE_ROWS] {
        let Dots { simd, rows, x } = self;
        let [mut a, mut b, mut c, mut d] = [simd.splat_f32s(0.0); TILE_ROWS];
        let group_bytes = GROUP * size_of::<B>();
        for (group, x) in x.as_chunks::<PART>().0.chunks(GROUP * B::PARTS).enumerate() {
            let mut bytes: [&[u8]; TILE_ROWS] = [&[]; TILE_ROWS];
            for r in 0..TILE_ROWS {
                bytes[r] = &rows[r][group * group_bytes..][..x.len() / B::PARTS * size_of::<B>()];
            }
            let scales = dequant::scales::<B, H, TILE_ROWS>(bytes);
            for (i, x) in x.chunks_exact(B::PARTS).enumerate() {
                // One by one, so that the sums stay in registers.
                a = add_block::<S, B, H>(simd, a, bytes[0], i, scales[0][i], x);
                b = add_block::<S, B, H>(simd, b, bytes[1], i, scales[1][i], x);
                c = add_block::<S, B, H>(simd, c, bytes[2], i, scales[2][i], x);
                d = add_block::<S, B, H>(simd, d, bytes[3], i, scales[3][i], x);
            }
        }
        [simd.reduce_sum_f32s(a), simd.reduce_sum_f32s(b), simd.reduce_sum_f32s(c), simd.reduce_sum_f32s(d)]
    }
}

/// `acc` and the products of block `i` of `bytes` with its parts of `x`, added up lane by lane.
#[inline(always)]
fn add_block<S: Simd, B: Block<H>, const H: usize>(
    simd: S,
    mut acc: S::f32s,
    bytes: &[u8],
    i: usize,
    scales: [f32; H],
    x: &[[f32; PART]],
) -> S::f32s {
    let block: B = bytemuck::pod_read_unaligned(&bytes[i * size_of::<B>()..][..size_of::<B>()]);
    for (part, x) in x.iter().enumerate() {
        // Small enough to live in registers.
        let mut w = [0.0; PART];
        block.part(scales, part, &mut w);
        for (w, x) in S::as_simd_f32s(&w).0.iter().zip(S::as_simd_f32s(x).0) {
            acc = simd.mul_add_f32s(*w, *x, acc);
        }
    }
    acc
}

/// `y[r, x0 + j] = dot(w[r], xs[j])` for the up to [`TILE_ROWS`] rows that `y` (of `stride` columns) has; `w`
/// holds as many rows in any case.
#[inline(always)]
fn tile<S: Simd, const M: usize>(simd: S, w: &[f32], xs: [&[f32]; M], y: (&mut [f32], usize, usize)) {
    let (y, stride, x0) = y;
    let cols = xs[0].len();
    let w = [&w[..cols], &w[cols..2 * cols], &w[2 * cols..3 * cols], &w[3 * cols..4 * cols]];
    let sums = dots(simd, w, xs);
    for (y, sums) in y.chunks_exact_mut(stride).zip(sums) {
        y[x0..x0 + M].copy_from_slice(&sums);
    }
}

/// The dot products of `R` rows with `M` rows of the same length.
///
/// Plain loops: a closure, and so `array::map`, would not be compiled for the dispatched instruction set.
#[inline(always)]
pub(super) fn dots<S: Simd, const R: usize, const M: usize>(simd: S, w: [&[f32]; R], xs: [&[f32]; M]) -> [[f32; M]; R] {
    let n = S::as_simd_f32s(w[0]).0.len();
    let mut w_body: [&[S::f32s]; R] = [&[]; R];
    for r in 0..R {
        w_body[r] = &S::as_simd_f32s(w[r]).0[..n];
    }
    let mut x_body: [&[S::f32s]; M] = [&[]; M];
    for j in 0..M {
        x_body[j] = &S::as_simd_f32s(xs[j]).0[..n];
    }
    let zero = simd.splat_f32s(0.0);
    let mut acc = [[zero; M]; R];
    for i in 0..n {
        let mut x = [zero; M];
        for j in 0..M {
            x[j] = x_body[j][i];
        }
        for r in 0..R {
            let w = w_body[r][i];
            for j in 0..M {
                acc[r][j] = simd.mul_add_f32s(w, x[j], acc[r][j]);
            }
        }
    }
    let mut sums = [[0.0; M]; R];
    for r in 0..R {
        for j in 0..M {
            // Columns that do not fill a vector, with zeros beyond them.
            let w = simd.partial_load_f32s(S::as_simd_f32s(w[r]).1);
            let x = simd.partial_load_f32s(S::as_simd_f32s(xs[j]).1);
            sums[r][j] = simd.reduce_sum_f32s(simd.mul_add_f32s(w, x, acc[r][j]));
        }
    }
    sums
}

/// `Σ a[i]·b[i]`.
#[inline(always)]
pub(super) fn dot<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    dots(simd, [a], [b])[0][0]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every type, with rows that fill no tile, no group of blocks and, for plain numbers, no part.
    #[test]
    fn a_product_has_the_same_bits_alone_and_in_a_batch() {
        for &ty in GgmlType::ALL {
            let cols = if ty.block_elems() == 1 { [96, 77] } else { [9 * ty.block_elems(), ty.block_elems()] };
            for cols in cols {
                let rows = 7;
                let row_bytes = cols / ty.block_elems() * ty.block_bytes();
                // Exponents in the middle, whatever the bytes mean: no infinities, no subnormals.
                let byte = |i: usize| (i as u32).wrapping_mul(0x9e37_79b9).to_le_bytes()[3] & 0x3b;
                let data: Vec<u8> = (0..rows * row_bytes).map(byte).collect();
                let x: Vec<Vec<f32>> =
                    (0..5).map(|j| (0..cols).map(|k| ((k * 7 + j * 13) as f32).sin()).collect()).collect();
                let product = |n: usize| {
                    let w = Weights { ty, data: &data, row_bytes, rows, cols };
                    let mut y = vec![f32::NAN; rows * n];
                    Product { w, xs: x[..n].iter().map(Vec::as_slice).collect(), y: &mut y }.compute();
                    y.iter().step_by(n).map(|y| y.to_bits()).collect::<Vec<u32>>()
                };
                let alone = product(1);
                assert!(alone.iter().all(|y| f32::from_bits(*y).is_finite() && *y != 0), "{ty} {cols}");
                assert_eq!(alone, product(2), "{ty} {cols}");
                assert_eq!(alone, product(5), "{ty} {cols}");
            }
        }
    }
}
