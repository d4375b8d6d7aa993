//! RMS norm and the products of its result in one launch: `x̂ = norm(x)`, `y_i[r] = Σ_k w_i[r, k]·x̂[k]`, of one row.
//!
//! A norm of one row is one block's work that everybody waits for, and costs as much as a launch. Here each block norms
//! and quantises the row for itself, into shared memory, while its first weights are under way. A block has many rows
//! of weights to multiply, as many as a grid that fits the device at once leaves it, so that this is done once a
//! multiprocessor.
//!
//! The norm is that of [`rms_norm_q8`](super::rms_norm::rms_norm_q8) and the products are those of
//! [`matvecs`](super::matvecs), to the same bits; one block also writes the normed row down, for whoever else reads it.

use bytemuck::{Pod, Zeroable};
use cuda_std::prelude::*;

use super::format::{self, FormatHeld, Row};
use super::matvec::{Items, Lane, StagedPlain, group_sums, sweep};
use super::normed_row::{self, Norm, NormedRow, staged_bytes};
use crate::blocks::GgmlType;
use crate::layout::MAX_PLANES;
use crate::params::{Activations, MATVECS_MAX, MatvecShape, WARP};

/// Lanes of a block, of which a multiprocessor has one: so the row is normed once on each.
pub const THREADS: u32 = normed_row::THREADS;
/// The longest rows: in both forms they fit the shared memory that every device has.
pub const MAX_COLS: u32 = 8192;
/// Chunks of a row in F32 that a lane loads before it uses the first.
const PLAIN_STEPS: usize = MatvecShape::new(GgmlType::F32, Activations::Plain).steps as usize;

/// Shared memory for a row of `cols` columns, in both forms.
pub const fn shared_bytes(cols: u32) -> u32 {
    plain_offset(cols) + 4 * cols
}

/// Where the row lies in f32.
const fn plain_offset(cols: u32) -> u32 {
    staged_bytes(cols).next_multiple_of(16)
}

/// One of the products of `norm_matvecs_*`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct NormMatvecsPart {
    /// Byte offsets of the weight's planes.
    pub planes: [u64; MAX_PLANES],
    /// Rows of the matrix.
    pub rows: u32,
    /// 1 where the weights are F32 and take f32 activations.
    pub plain: u32,
    /// The first of its items, or of its tiles where it is plain: those of one kind are counted through all products.
    /// `u32::MAX` for a product that is not there.
    pub first: u32,
    /// Zero.
    pub reserved: u32,
}

/// Parameters of `norm_matvecs_*`.
///
/// An item is what a warp multiplies at a time: `rows` of [`MatvecShape::normed`] for each group of lanes. A tile is what
/// a block multiplies at a time of matrices in F32: a row for each group of lanes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct NormMatvecsParams {
    /// The products, those of one kind in the order of their first items or tiles, which begin at 0.
    pub parts: [NormMatvecsPart; MATVECS_MAX],
    /// Items of all quantised products, at least one.
    pub items: u32,
    /// Tiles of all products in F32.
    pub tiles: u32,
    /// Elements of the row.
    pub cols: u32,
    /// 16-byte chunks in a row of quantised weights.
    pub chunks: u32,
    /// [`MatvecShape::lanes_log2`] of their type and `chunks`.
    pub lanes_log2: u32,
    /// 16-byte chunks in a row in F32.
    pub plain_chunks: u32,
    /// [`MatvecShape::lanes_log2`] of F32 and `plain_chunks`.
    pub plain_lanes_log2: u32,
    /// The norm's ε.
    pub eps: f32,
}

/// Rows of an item.
pub const fn rows_per_item(ty: GgmlType, lanes_log2: u32) -> u32 {
    (WARP >> lanes_log2) * MatvecShape::normed(ty).rows
}

/// Weights and results of the products.
struct Products {
    w: [*const u8; MATVECS_MAX],
    y: [*mut f32; MATVECS_MAX],
}

/// The product with item or tile `at`, its weights and its result.
#[inline(always)]
fn part(o: &Products, p: &NormMatvecsParams, plain: u32, at: u32) -> (NormMatvecsPart, *const u8, *mut f32) {
    let mut found = (p.parts[0], o.w[0], o.y[0]);
    for i in 1..MATVECS_MAX {
        if p.parts[i].plain == plain && at >= p.parts[i].first {
            found = (p.parts[i], o.w[i], o.y[i]);
        }
    }
    found
}

/// One lane: `R` rows of a quantised matrix a group of lanes, `S` chunks of each a step.
///
/// # Safety
/// As [`norm_matvecs_q8_0`], for the format.
#[inline(always)]
unsafe fn norm_matvecs<F: FormatHeld, const R: usize, const S: usize>(
    o: &Products,
    norm: &Norm,
    p: &NormMatvecsParams,
) {
    let (thread, block, blocks) = (thread::thread_idx_x(), thread::block_idx_x(), thread::grid_dim_x());
    let lanes = 1u32 << p.lanes_log2;
    let place = Lane { lane: thread & (lanes - 1), lanes_log2: p.lanes_log2, chunks: p.chunks };
    // Neighbouring items go to different blocks: so all multiprocessors have the same number of them.
    let items = Items { first: block + blocks * (thread / WARP), stride: blocks * (THREADS / WARP), end: p.items };
    let first_row = |part: &NormMatvecsPart, item: u32| {
        let group = warp::lane_id() >> p.lanes_log2;
        (((item - part.first) * (WARP >> p.lanes_log2)) + group) * R as u32
    };
    let rows = |item: u32| {
        let (part, w, _) = part(o, p, 0, item);
        let first = first_row(&part, item);
        // Groups past the end compute the last row again: all lanes take part in shuffles.
        core::array::from_fn(|r| {
            let row = (first + r as u32).min(part.rows - 1);
            // SAFETY: the row exists.
            unsafe { Row::new::<F>(w, &part.planes, u64::from(row), p.chunks) }
        })
    };
    let store = |item: u32, sums: [f32; R], ()| {
        let (part, _, y) = part(o, p, 0, item);
        let first = first_row(&part, item);
        if place.lane == 0 {
            for r in 0..R {
                if first + (r as u32) < part.rows {
                    // SAFETY: `y` has the row.
                    unsafe { st(y.add(first as usize + r), sums[r]) };
                }
            }
        }
    };
    let plain = StagedPlain { x: dynamic(plain_offset(p.cols)) };
    // SAFETY: items are the same in a warp; the rows exist and have `p.chunks` chunks, as the row has. All of the block
    // makes the row.
    unsafe {
        let keep = block == blocks - 1;
        let row = NormedRow { norm, cols: p.cols, eps: p.eps, plain: (p.tiles > 0).then_some(plain.x), keep };
        sweep::<F, NormedRow, _, R, S>(place, items, rows, &row, |_| (), store);
        multiply_plain(o, p, plain);
    }
}

/// The block's part of the products in F32, of which there are few, with the row `x`.
///
/// # Safety
/// All of the block is here, and the row is written; otherwise as [`norm_matvecs_q8_0`].
#[inline(always)]
unsafe fn multiply_plain(o: &Products, p: &NormMatvecsParams, x: StagedPlain) {
    let (thread, blocks) = (thread::thread_idx_x(), thread::grid_dim_x());
    let lanes = 1u32 << p.plain_lanes_log2;
    let place = Lane { lane: thread & (lanes - 1), lanes_log2: p.plain_lanes_log2, chunks: p.plain_chunks };
    // The last blocks have the fewest items.
    let mut tile = blocks - 1 - thread::block_idx_x();
    while tile < p.tiles {
        let (part, w, y) = part(o, p, 1, tile);
        let row = (tile - part.first) * (THREADS >> p.plain_lanes_log2) + (thread >> p.plain_lanes_log2);
        // SAFETY: the rows exist; the whole block takes the same way; shared memory is laid out by `shared_bytes`.
        unsafe {
            let rows = [Row::new::<format::F32>(w, &part.planes, u64::from(row.min(part.rows - 1)), p.plain_chunks)];
            let raw = place.load_step::<format::F32, 1, PLAIN_STEPS>(&rows, 0);
            let [sums] = place.sums::<format::F32, _, 1, PLAIN_STEPS, 1>(&rows, raw, &[x]);
            let [[sum]] = group_sums::<format::F32, 1, 1>([sums], lanes);
            if place.lane == 0 && row < part.rows {
                st(y.add(row as usize), sum);
            }
            tile += blocks;
            block::sync_threads(); // the sums of this tile are read before those of the next are written
        }
    }
}

macro_rules! entries {
    ($($ty:ident: $name:ident;)+) => {$(
        #[doc = concat!("[`norm_matvecs`](self) with [`", stringify!($ty), "`](format::", stringify!($ty), ") weights, or F32.")]
        ///
        /// `x`, `norm_w` and `norm_y`: `[cols]`; `qs: [cols]`, `d: [cols/16]`, `s: [cols/16]`, the int8 form of `norm_y`;
        /// `w_i: [rows_i, cols]` planar; `y_i: [rows_i]`.
        ///
        /// Grid: `(blocks, 1, 1)`, any number, blocks of [`THREADS`] lanes, [`shared_bytes`] of shared memory.
        ///
        /// # Safety
        /// - `w_i` points to the whole tensor, 16-byte aligned, with `parts[i]` its planes, rows and first item; nobody
        ///   writes it, nor `norm_w`. At least one product is there that is not plain.
        /// - The row's operands have the sizes above, and all but `d` and `s` are 16-byte aligned; `cols` is a multiple of
        ///   32 and at most [`MAX_COLS`].
        /// - `y_i` has `rows_i` elements; the results overlap nothing.
        /// - The grid before in the stream is the only one still running (programmatic dependent launch).
        #[kernel(max_threads = 512, min_blocks = 1)]
        pub unsafe fn $name(
            w_0: *const u8, w_1: *const u8, w_2: *const u8, w_3: *const u8,
            x: *const f32, norm_w: *const f32, norm_y: *mut f32, qs: *mut i8, d: *mut f32, s: *mut f32,
            y_0: *mut f32, y_1: *mut f32, y_2: *mut f32, y_3: *mut f32, p: NormMatvecsParams,
        ) {
            const SHAPE: MatvecShape = MatvecShape::normed(GgmlType::$ty);
            norm_matvecs::<format::$ty, { SHAPE.rows as usize }, { SHAPE.steps as usize }>(
                &Products { w: [w_0, w_1, w_2, w_3], y: [y_0, y_1, y_2, y_3] },
                &Norm { x, w: norm_w, y: norm_y, qs, d, s }, &p);
        }
    )+};
}

entries! {
    Q4K: norm_matvecs_q4_k;
    Q5K: norm_matvecs_q5_k;
    Q6K: norm_matvecs_q6_k;
    Q8_0: norm_matvecs_q8_0;
    Q4_0: norm_matvecs_q4_0;
    Q4_1: norm_matvecs_q4_1;
    Q5_0: norm_matvecs_q5_0;
    Q5_1: norm_matvecs_q5_1;
    Mxfp4: norm_matvecs_mxfp4;
}
