//! [`matvec`](super::matvec) for one row of quantised activations and one matrix, in a grid that fits the device at once.
//!
//! A lane goes from row to row with the next step's weights in flight while one is multiplied, by activations that the
//! block keeps in shared memory. Each row is computed to the bits of [`matvec`](super::matvec), whose blocks have one row a
//! group of lanes and end: there the memory is idle while a step's products are made, which shows where a row has many
//! steps and a multiprocessor few warps.

use cuda_std::prelude::*;

use super::format::{self, FormatHeld, Row};
use super::matvec::{CopiedRow, Items, Lane, Pointers, Quantized, StagedQuantized, residual, store, sweep};
use crate::blocks::GgmlType;
use crate::params::{MatvecParams, MatvecShape, WARP};

/// Lanes of a block.
pub const THREADS: u32 = 256;
/// Blocks of a grid that fit a multiprocessor at once.
pub const BLOCKS_A_MULTIPROCESSOR: u32 = 2;

/// The longest rows: they fit the shared memory that every device has.
pub const MAX_COLS: u32 = 32768;

/// Shared memory for a row of `cols` columns.
pub const fn shared_bytes(cols: u32) -> u32 {
    StagedQuantized::bytes(cols)
}

/// What a warp multiplies at a time of a matrix with `rows` rows: `MatvecShape::swept` rows for each group of lanes.
pub const fn n_items(rows: u32, rows_a_group: u32, lanes_log2: u32) -> u32 {
    // Both are powers of two, which the device divides by with a shift.
    let log2 = (WARP * rows_a_group).ilog2() - lanes_log2;
    (rows + (1 << log2) - 1) >> log2
}

/// One lane: `R` rows a group of lanes, `S` chunks of each a step.
///
/// # Safety
/// As [`matvec_swept_q8_0`], for the format.
#[inline(always)]
unsafe fn matvec_swept<F: FormatHeld, const R: usize, const S: usize>(o: &Pointers, x: Quantized, p: &MatvecParams) {
    const { assert!(R.is_power_of_two()) };
    let (thread, block, blocks) = (thread::thread_idx_x(), thread::block_idx_x(), thread::grid_dim_x());
    let lanes = 1u32 << p.lanes_log2;
    let place = Lane { lane: thread & (lanes - 1), lanes_log2: p.lanes_log2, chunks: p.chunks };
    // Neighbouring items go to different blocks: so all multiprocessors have the same number of them.
    let items = Items {
        first: block + blocks * (thread / WARP),
        stride: blocks * (THREADS / WARP),
        end: n_items(p.rows, R as u32, p.lanes_log2),
    };
    let first_row = |item: u32| (item * (WARP >> p.lanes_log2) + (warp::lane_id() >> p.lanes_log2)) * R as u32;
    let rows = |item: u32| {
        // Groups past the end compute the last row again: all lanes take part in shuffles.
        core::array::from_fn(|r| {
            let row = (first_row(item) + r as u32).min(p.rows - 1);
            // SAFETY: the row exists.
            unsafe { Row::new::<F>(o.w, &p.planes, u64::from(row), p.chunks) }
        })
    };
    let source = CopiedRow { x, cols: p.chunks * F::CHUNK_ELEMS, threads: THREADS };
    let begin = |item: u32| -> [f32; R] {
        // SAFETY: `y` has the rows.
        core::array::from_fn(|r| unsafe { residual(o.y, first_row(item) + r as u32, p) })
    };
    let put = |item: u32, sums: [f32; R], residuals: [f32; R]| {
        if place.lane == 0 {
            for r in 0..R {
                // SAFETY: `y` and `bias` have the rows, and `store` leaves out those that are not there.
                unsafe { store(o, o.y, 0, first_row(item) + r as u32, sums[r], residuals[r], p) };
            }
        }
    };
    // SAFETY: items are the same in a warp; the rows exist and have `p.chunks` chunks, as the activations have.
    unsafe { sweep::<F, CopiedRow, _, R, S>(place, items, rows, &source, begin, put) }
}

macro_rules! entries {
    ($($ty:ident: $name:ident;)+) => {$(
        #[doc = concat!("[`matvec_swept`](self) with [`", stringify!($ty), "`](format::", stringify!($ty), ") weights.")]
        ///
        /// `w: [rows, cols]` planar; `qs: [cols]`, `d: [cols/16]`, `s: [cols/16]`, as `quantize_q8` writes them;
        /// `y: [rows]`; `bias: [rows]` or null.
        ///
        /// Grid: `(blocks, 1, 1)`, any number, blocks of [`THREADS`] lanes, [`shared_bytes`] of shared memory.
        ///
        /// # Safety
        /// As [`matvec_q8_0_q8`](super::matvec::matvec_q8_0_q8), with one token, one expert and no ids; `x` has at most
        /// [`MAX_COLS`] columns.
        #[kernel(max_threads = 256, min_blocks = 2)]
        pub unsafe fn $name(
            w: *const u8, qs: *const i8, d: *const f32, s: *const f32, y: *mut f32, bias: *const f32, p: MatvecParams,
        ) {
            const SHAPE: MatvecShape = MatvecShape::swept(GgmlType::$ty);
            matvec_swept::<format::$ty, { SHAPE.rows as usize }, { SHAPE.steps as usize }>(
                &Pointers { w, y, ids: core::ptr::null(), bias }, Quantized { qs, d, s }, &p);
        }
    )+};
}

entries! {
    Q4K: matvec_swept_q4_k;
    Q5K: matvec_swept_q5_k;
    Q6K: matvec_swept_q6_k;
    Q8_0: matvec_swept_q8_0;
    Q4_0: matvec_swept_q4_0;
    Q4_1: matvec_swept_q4_1;
    Q5_0: matvec_swept_q5_0;
    Q5_1: matvec_swept_q5_1;
    Mxfp4: matvec_swept_mxfp4;
}
