//! Several products of the same activations in one launch: `y_i[t, r] = Σ_k w_i[r, k]·x[t, k]`.
//!
//! A decode step is bound by its launches as much as by its bytes, and most of its matrices come in groups that
//! multiply one vector: query, key and value; a router beside a shared expert. Their blocks form one grid, the first
//! product's before the second's. The matrices have one quantised type or are F32, which take the f32 form of the
//! activations; each row is computed as [`matvec`](super::matvec) computes it, to the same bits.

use cuda_std::prelude::*;

use super::format::{self, FormatQ8};
use super::matvec::{Plain, Pointers, Quantized, matvec};
use crate::blocks::GgmlType;
use crate::params::{Activations, MatvecParams, MatvecShape, MatvecsParams};

/// Weights and results of the products.
struct Parts {
    w: [*const u8; 4],
    y: [*mut f32; 4],
}

/// One lane: `R` rows of a quantised matrix a group of lanes, `S` chunks of each a step, `T` tokens. A row of an F32
/// matrix takes `FS` chunks a step.
///
/// # Safety
/// As [`matvecs_q8_0`], for the format.
#[inline(always)]
unsafe fn matvecs<F: FormatQ8, const R: usize, const S: usize, const FS: usize, const T: usize>(
    parts: Parts,
    x: Quantized,
    plain: Plain,
    p: &MatvecsParams,
) {
    let block = thread::block_idx_x();
    let (mut part, mut w, mut y) = (p.parts[0], parts.w[0], parts.y[0]);
    for i in 1..4 {
        if block >= p.parts[i].first_block {
            (part, w, y) = (p.parts[i], parts.w[i], parts.y[i]);
        }
    }
    let params = MatvecParams {
        planes: part.planes,
        rows: part.rows,
        chunks: part.chunks,
        lanes_log2: part.lanes_log2,
        n_expert: 1,
        x_stride: p.cols,
        y_stride: part.y_stride,
        ids_stride: 0,
        n_used: 1,
        routes: p.tokens,
        flags: 0,
    };
    let o = Pointers { w, y, ids: core::ptr::null(), bias: core::ptr::null() };
    let block = block - part.first_block;
    // SAFETY: the caller's promise is the same for the block's product; a block takes one branch as a whole.
    unsafe {
        if part.plain != 0 {
            matvec::<format::F32, _, 1, FS, T>(o, plain, &params, block);
        } else {
            matvec::<F, _, R, S, T>(o, x, &params, block);
        }
    }
}

macro_rules! entries {
    ($($ty:ident: $one:ident[$one_blocks:tt] $four:ident[$four_blocks:tt];)+) => {$(
        #[doc = concat!("[`matvecs`](self) with [`", stringify!($ty), "`](format::", stringify!($ty), ") weights, or F32.")]
        ///
        /// `w_i: [rows_i, cols]` planar; `x: [tokens, cols]`, and `qs: [tokens, cols]`, `d: [tokens, cols/16]`,
        /// `s: [tokens, cols/16]` as `quantize_q8` makes them of it; `y_i: [tokens, y_stride_i]`.
        ///
        /// Grid: `(Σ_i ⌈rows_i / rows_per_block_i⌉, 1, tokens)`, blocks of `MATVEC_BLOCK` lanes, `MATVEC_SHARED_BYTES`
        /// of shared memory.
        ///
        /// # Safety
        /// - `w_i` points to the whole tensor, 16-byte aligned, with `parts[i]` its planes, sizes, lanes and first
        ///   block; nobody writes it. The first product is there; of one that is not, nothing but its first block
        ///   counts.
        /// - The activations have the shapes above, 16-byte aligned; `cols` is a multiple of 32.
        /// - `y_i` has `rows_i` elements for every token; the results overlap nothing.
        /// - The grid before in the stream is the only one still running (programmatic dependent launch).
        #[kernel(max_threads = 128, min_blocks = $one_blocks)]
        pub unsafe fn $one(
            w_0: *const u8, w_1: *const u8, w_2: *const u8, w_3: *const u8,
            x: *const f32, qs: *const i8, d: *const f32, s: *const f32,
            y_0: *mut f32, y_1: *mut f32, y_2: *mut f32, y_3: *mut f32, p: MatvecsParams,
        ) {
            const SHAPE: MatvecShape = MatvecShape::new(GgmlType::$ty, Activations::Q8);
            matvecs::<format::$ty, { SHAPE.rows as usize }, { SHAPE.steps as usize }, 4, 1>(
                Parts { w: [w_0, w_1, w_2, w_3], y: [y_0, y_1, y_2, y_3] }, Quantized { qs, d, s }, Plain { x }, &p);
        }

        #[doc = concat!("[`", stringify!($one), "`] for four tokens a block, which read and unpack the weights once.")]
        ///
        /// Grid: `(Σ_i ⌈rows_i / rows_per_block_i⌉, 1, ⌈tokens / 4⌉)`.
        ///
        /// # Safety
        #[doc = concat!("As [`", stringify!($one), "`].")]
        #[kernel(max_threads = 128, min_blocks = $four_blocks)]
        pub unsafe fn $four(
            w_0: *const u8, w_1: *const u8, w_2: *const u8, w_3: *const u8,
            x: *const f32, qs: *const i8, d: *const f32, s: *const f32,
            y_0: *mut f32, y_1: *mut f32, y_2: *mut f32, y_3: *mut f32, p: MatvecsParams,
        ) {
            const SHAPE: MatvecShape = MatvecShape::new(GgmlType::$ty, Activations::Q8x4);
            matvecs::<format::$ty, { SHAPE.rows as usize }, { SHAPE.steps as usize }, 2, 4>(
                Parts { w: [w_0, w_1, w_2, w_3], y: [y_0, y_1, y_2, y_3] }, Quantized { qs, d, s }, Plain { x }, &p);
        }
    )+};
}

// In brackets, as for `matvec`, the blocks that are to fit on a multiprocessor.
entries! {
    Q4K: matvecs_q4_k[4] matvecs_q4_k_x4[4];
    Q5K: matvecs_q5_k[4] matvecs_q5_k_x4[4];
    Q6K: matvecs_q6_k[4] matvecs_q6_k_x4[4];
    Q8_0: matvecs_q8_0[8] matvecs_q8_0_x4[4];
    Q4_0: matvecs_q4_0[6] matvecs_q4_0_x4[4];
    Q4_1: matvecs_q4_1[6] matvecs_q4_1_x4[4];
    Q5_0: matvecs_q5_0[5] matvecs_q5_0_x4[4];
    Q5_1: matvecs_q5_1[5] matvecs_q5_1_x4[4];
    Mxfp4: matvecs_mxfp4[6] matvecs_mxfp4_x4[4];
}
