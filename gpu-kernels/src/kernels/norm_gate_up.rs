//! RMS norm and the first half of a dense feed-forward network in one launch, of one row:
//! `h[r] = act(Σ_k gate[r, k]·x̂[k], Σ_k up[r, k]·x̂[k])` with `x̂ = norm(x)`; of `h` the quantised form is kept.
//!
//! A block norms the row for itself, as in [`norm_matvecs`](super::norm_matvecs), and then goes through units of 32 rows
//! of both matrices, in a grid that fits the device at once. The sums of one unit are activated by
//! one warp while the others are at the next.
//!
//! To the bits of [`rms_norm_q8`](super::rms_norm::rms_norm_q8) and [`gate_up`](super::gate_up).

use bytemuck::{Pod, Zeroable};
use cuda_std::prelude::*;

use super::format::{self, FormatHeld, Row};
use super::gate_up::{Q8Mut, ROWS, activate};
use super::matvec::{Items, Lane, sweep};
use super::normed_row::{self, Norm, NormedRow, staged_bytes};
use super::quantize_q8::quantize4;
use crate::blocks::GgmlType;
use crate::layout::MAX_PLANES;
use crate::params::{MatvecShape, WARP};

/// Lanes of a block, of which a multiprocessor has one.
pub const THREADS: u32 = normed_row::THREADS;
/// The longest rows: quantised, they fit the shared memory that every device has.
pub const MAX_COLS: u32 = 16384;
/// Rows of a unit, of both matrices.
const UNIT: u32 = 2 * ROWS;

/// Shared memory for a row of `cols` columns: with it, the sums of two units.
pub const fn shared_bytes(cols: u32) -> u32 {
    staged_bytes(cols) + 2 * UNIT * 4
}

/// Scalars of `norm_gate_up_*`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct NormGateUpParams {
    /// Byte offsets of the planes, which gate and up have in common.
    pub planes: [u64; MAX_PLANES],
    /// Rows of each, a multiple of [`ROWS`].
    pub rows: u32,
    /// 16-byte chunks in a row.
    pub chunks: u32,
    /// [`MatvecShape::lanes_log2`] of the type with quantised activations.
    pub lanes_log2: u32,
    /// Columns.
    pub cols: u32,
    /// The norm's ε.
    pub eps: f32,
    /// 1: the clamped activation of gpt-oss.
    pub oai: u32,
}

/// One lane, with `R` rows a group of lanes and `S` chunks of each a step.
///
/// # Safety
/// As [`norm_gate_up_q8_0`], for the format.
#[inline(always)]
unsafe fn norm_gate_up<F: FormatHeld, const R: usize, const S: usize>(
    [gate, up]: [*const u8; 2],
    norm: &Norm,
    h: &Q8Mut,
    p: &NormGateUpParams,
) {
    const { assert!(R.is_power_of_two() && R as u32 <= ROWS) };
    let (thread, block, blocks) = (thread::thread_idx_x(), thread::block_idx_x(), thread::grid_dim_x());
    let lanes = 1u32 << p.lanes_log2;
    let place = Lane { lane: thread & (lanes - 1), lanes_log2: p.lanes_log2, chunks: p.chunks };
    // Times that the block's groups go to a unit's rows: once, or twice where a group has two of them.
    let at_once_log2 = (THREADS * R as u32).ilog2() - p.lanes_log2;
    let passes_log2 = UNIT.ilog2().saturating_sub(at_once_log2);
    // Every so many units are the block's; `item` counts its passes through them.
    let unit = |item: u32| block + blocks * (item >> passes_log2);
    // The group's first row in the unit: gate's, then up's. A group past the end has none to store.
    let first = |item: u32| ((item & ((1 << passes_log2) - 1)) << at_once_log2) + (thread >> p.lanes_log2) * R as u32;
    let rows = |item: u32| {
        let at = first(item).min(UNIT - R as u32);
        let w = if at < ROWS { gate } else { up };
        let row = unit(item) * ROWS + at % ROWS;
        // SAFETY: the rows exist: their number is a multiple of a unit's.
        core::array::from_fn(|r| unsafe { Row::new::<F>(w, &p.planes, u64::from(row) + r as u64, p.chunks) })
    };
    let sums = dynamic::<f32>(staged_bytes(p.cols));
    let store = |item: u32, row_sums: [f32; R], ()| {
        let count = item >> passes_log2;
        let (sums, at) = (sums.add(count % 2 * UNIT), first(item));
        // SAFETY: the whole block comes here for each item. Between a unit's barrier and its sums' place being written
        // again lies the next unit's barrier, at which the warp that reads them arrives afterwards.
        unsafe {
            if place.lane == 0 && at < UNIT {
                for r in 0..R {
                    sums.set(at + r as u32, row_sums[r]);
                }
            }
            if (item + 1) & ((1 << passes_log2) - 1) == 0 {
                block::sync_threads(); // all sums of the unit are written before they are read
                if thread / WARP == count % (THREADS / WARP) {
                    finish(sums, unit(item), h, p);
                }
            }
        }
    };
    // SAFETY: items are the same in the block, which has one unit at least; the rows exist and have `p.chunks` chunks,
    // as the row has. All of the block makes the row.
    unsafe {
        let units = math::div_rem(p.rows / ROWS - block + blocks - 1, blocks).0;
        let items = Items { first: 0, stride: 1, end: units << passes_log2 };
        let row = NormedRow { norm, cols: p.cols, eps: p.eps, plain: None, keep: false };
        sweep::<F, NormedRow, _, R, S>(place, items, rows, &row, |_| (), store)
    }
}

/// Activates and quantises a unit.
///
/// # Safety
/// The whole warp is here, and the unit's sums are written; `h` has its rows.
#[inline(always)]
unsafe fn finish(sums: Shared<f32>, unit: u32, h: &Q8Mut, p: &NormGateUpParams) {
    const { assert!(ROWS == WARP) };
    let (lane, at) = (warp::lane_id(), 4 * (warp::lane_id() % 8));
    // SAFETY: the caller's promise; a row a lane, and then eight lanes have the unit.
    unsafe {
        sums.set(lane, activate(p.oai, sums.get(lane), sums.get(ROWS + lane)));
        warp::sync_warp(warp::FULL_MASK); // all rows are activated before they are read
        let values = sums.cast::<F32x4>().get(at / 4).to_array();
        quantize4(values, lane < 8, (unit * ROWS + at) as usize, h.qs, h.d, h.s);
    }
}

macro_rules! entries {
    ($($ty:ident: $name:ident;)+) => {$(
        #[doc = concat!("[`norm_gate_up`](self) with [`", stringify!($ty), "`](format::", stringify!($ty), ") weights.")]
        ///
        /// `gate` and `up`: `[rows, cols]` planar; `x` and `norm_w`: `[cols]`; `h_qs: [rows]`, `h_d: [rows/16]`,
        /// `h_s: [rows/16]`, as `quantize_q8` makes them of `h`.
        ///
        /// Grid: `(blocks, 1, 1)`, at most `rows / ROWS`, blocks of [`THREADS`] lanes, [`shared_bytes`] of shared memory.
        ///
        /// # Safety
        /// - `gate` and `up` point to whole tensors of that shape, 16-byte aligned, `rows` a multiple of [`ROWS`], with
        ///   `p.planes` the plane offsets of both; nobody writes them, nor `norm_w`.
        /// - `x`, `norm_w` and `h_qs` are 16-byte aligned; `cols` is a multiple of 32, at most [`MAX_COLS`]. The results
        ///   overlap nothing.
        /// - The grid before in the stream is the only one still running (programmatic dependent launch).
        #[kernel(max_threads = 512, min_blocks = 1)]
        pub unsafe fn $name(
            gate: *const u8, up: *const u8, x: *const f32, norm_w: *const f32,
            h_qs: *mut i8, h_d: *mut f32, h_s: *mut f32, p: NormGateUpParams,
        ) {
            const SHAPE: MatvecShape = MatvecShape::swept(GgmlType::$ty);
            let null = core::ptr::null_mut();
            norm_gate_up::<format::$ty, { SHAPE.rows as usize }, { SHAPE.steps as usize }>(
                [gate, up], &Norm { x, w: norm_w, y: null, qs: core::ptr::null_mut(), d: null, s: null },
                &Q8Mut { qs: h_qs, d: h_d, s: h_s }, &p);
        }
    )+};
}

entries! {
    Q4K: norm_gate_up_q4_k;
    Q5K: norm_gate_up_q5_k;
    Q6K: norm_gate_up_q6_k;
    Q8_0: norm_gate_up_q8_0;
    Q4_0: norm_gate_up_q4_0;
    Q4_1: norm_gate_up_q4_1;
    Q5_0: norm_gate_up_q5_0;
    Q5_1: norm_gate_up_q5_1;
    Mxfp4: norm_gate_up_mxfp4;
}
