//! Matrix products with quantised weights: `y[r, j] = Σ_k w[r, k]·x[j, k]`.
//!
//! Weights stay in the mapped file. A few rows at a time are dequantised into a small buffer that stays in
//! cache, and are multiplied with all rows of `x` from there, so a batch pays for dequantisation once.
//!
//! Every product is one sum in one order, whatever the batch: a token gives the same bits alone, in a
//! prompt, or beside other sequences.

use std::sync::Arc;

use gpu_kernels::blocks::GgmlType;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::dequant::dequantize_row_inline;
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

/// `y[r, x0 + j] = dot(w[r], xs[j])` for the up to [`TILE_ROWS`] rows that `y` (of `stride` columns) has; `w`
/// holds as many rows in any case.
#[inline(always)]
fn tile<S: Simd, const M: usize>(simd: S, w: &[f32], xs: [&[f32]; M], y: (&mut [f32], usize, usize)) {
    let (y, stride, x0) = y;
    let cols = xs[0].len();
    let w: [&[f32]; TILE_ROWS] = std::array::from_fn(|r| &w[r * cols..][..cols]);
    let sums = dots(simd, w, xs);
    for (y, sums) in y.chunks_exact_mut(stride).zip(sums) {
        y[x0..x0 + M].copy_from_slice(&sums);
    }
}

/// The dot products of `R` rows with `M` rows of the same length.
#[inline(always)]
pub(super) fn dots<S: Simd, const R: usize, const M: usize>(simd: S, w: [&[f32]; R], xs: [&[f32]; M]) -> [[f32; M]; R] {
    let w = w.map(S::as_simd_f32s);
    let xs = xs.map(S::as_simd_f32s);
    let n = w[0].0.len();
    let w_body = w.map(|(body, _)| &body[..n]);
    let x_body = xs.map(|(body, _)| &body[..n]);
    let mut acc = [[simd.splat_f32s(0.0); M]; R];
    for i in 0..n {
        let x: [S::f32s; M] = std::array::from_fn(|j| x_body[j][i]);
        for r in 0..R {
            let w = w_body[r][i];
            for j in 0..M {
                acc[r][j] = simd.mul_add_f32s(w, x[j], acc[r][j]);
            }
        }
    }
    if !w[0].1.is_empty() {
        let x: [S::f32s; M] = std::array::from_fn(|j| simd.partial_load_f32s(xs[j].1));
        for r in 0..R {
            let w = simd.partial_load_f32s(w[r].1);
            for j in 0..M {
                acc[r][j] = simd.mul_add_f32s(w, x[j], acc[r][j]);
            }
        }
    }
    acc.map(|row| row.map(|sum| simd.reduce_sum_f32s(sum)))
}

/// `Σ a[i]·b[i]`.
#[inline(always)]
pub(super) fn dot<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    dots(simd, [a], [b])[0][0]
}
