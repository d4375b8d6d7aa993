//! [`gate_up`](super::gate_up) for routes that were grouped by expert, a few to each.
//!
//! `h[i, r] = act(Σ_k gate[e, r, k]·x[t, k] + gate_bias[e, r], Σ_k up[e, r, k]·x[t, k] + up_bias[e, r])` for every route
//! `i` of token `t` to expert `e`; of `h` the quantised form is kept. With a shared expert, of a type of its own, the
//! same for every token. A block computes 32 rows of both matrices for a tile of routes (see [`grouped`](super::grouped)).
//!
//! The products are [`matvec`](super::matvec)'s, to the same bits.

use bytemuck::{Pod, Zeroable};
use cuda_std::{pdl, prelude::*};

use super::format::{self, FormatQ8};
use super::gate_up::{Hidden, Q8Mut, ROWS, finish};
use super::grouped::{GROUP, Rows, THREADS, TILE, Tile, group_sums, starts};
use super::matvec::{Lane, Quantized};
use crate::layout::MAX_PLANES;

/// Shared memory: a sum for each row of both matrices and each token.
pub const SHARED_BYTES: u32 = TILE * 2 * ROWS * 4;

/// Scalars of `gate_up_grouped_*`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct GateUpGroupedParams {
    /// Byte offsets of the planes, which gate and up have in common.
    pub planes: [u64; MAX_PLANES],
    /// Those of the shared expert.
    pub shared_planes: [u64; MAX_PLANES],
    /// Rows of one expert's gate, a multiple of [`ROWS`].
    pub rows: u32,
    /// 16-byte chunks in a row.
    pub chunks: u32,
    /// [`MatvecShape::lanes_log2`](crate::params::MatvecShape::lanes_log2) of the type with quantised activations.
    pub lanes_log2: u32,
    /// Rows of the shared expert's gate, a multiple of [`ROWS`].
    pub shared_rows: u32,
    /// 16-byte chunks in a row of it.
    pub shared_chunks: u32,
    /// Lanes that share a row of it, as above.
    pub shared_lanes_log2: u32,
    /// Columns of all.
    pub cols: u32,
    /// Experts chosen for a token: routes that share a row of `x`.
    pub n_used: u32,
    /// Tokens.
    pub tokens: u32,
    /// Tiles of tokens, which come before those of routes: none without a shared expert.
    pub shared_tiles: u32,
    /// 1: the clamped activation of gpt-oss.
    pub oai: u32,
    /// Zero.
    pub reserved: u32,
}

/// Both matrices of an expert, or of all.
struct Weights<'a> {
    gate: *const u8,
    up: *const u8,
    planes: &'a [u64; MAX_PLANES],
    chunks: u32,
    lanes_log2: u32,
}

/// The operands that all experts have in common.
struct Common {
    x: Quantized,
    cols: u32,
    order: *const u32,
    /// Routes of a token.
    n_used: u32,
}

/// The sums of 32 rows of gate and of up for `T` rows of activations, `R` rows at a time, to shared memory:
/// `[T, 2·ROWS]`.
///
/// # Safety
/// The rows from `first` on (counted over all experts) and the tile's activations exist; all of the block is here.
#[inline(always)]
unsafe fn products<F: FormatQ8, const R: usize, const S: usize, const T: usize>(
    w: &Weights<'_>,
    o: &Common,
    first: u32,
    tile: Tile,
) {
    let (thread, lanes) = (thread::thread_idx_x(), 1u32 << w.lanes_log2);
    let place = Lane { lane: thread & (lanes - 1), lanes_log2: w.lanes_log2, chunks: w.chunks };
    let group = (thread >> w.lanes_log2) * R as u32;
    let step = (THREADS >> w.lanes_log2) * R as u32;
    let sums = dynamic::<f32>(0);
    // SAFETY: the caller's promise; rows 0 to 31 are gate's, the others up's, and no group has both. Groups past the end
    // compute the last rows again and don't store them: all lanes take part in shuffles.
    unsafe {
        let starts = starts::<T>(o.cols, tile, o.order, o.n_used);
        let mut base = 0;
        while base < 2 * ROWS {
            let at = (base + group).min(2 * ROWS - R as u32);
            let matrix = if at < ROWS { w.gate } else { w.up };
            let rows = Rows { w: matrix, planes: w.planes, first: first + at % ROWS, n: const { R as u32 } };
            let row_sums = group_sums::<F, R, S, T>(place, &rows, o.x, &starts);
            if place.lane == 0 && base + group < 2 * ROWS {
                for t in 0..T {
                    for r in 0..R {
                        sums.set(t as u32 * 2 * ROWS + at + r as u32, row_sums[t][r]);
                    }
                }
            }
            base += step;
        }
    }
}

/// One block's 32 rows of `h` for the routes of a tile, by the smallest of the bodies that has room for them: `S` chunks of
/// [`GROUP`] rows together, or with most tokens one of `R`.
///
/// # Safety
/// As [`products`], with `first` the row in the expert's matrix; `hidden` has what [`finish`] asks.
#[inline(always)]
unsafe fn block<F: FormatQ8, const S: usize, const R: usize>(
    w: &Weights<'_>,
    o: &Common,
    hidden: &Hidden,
    first: u32,
    tile: Tile,
) {
    let expert_row = tile.expert * hidden.rows + first;
    // SAFETY: the caller's promise; the block takes one branch as a whole.
    unsafe {
        match tile.n {
            1 => products::<F, GROUP, S, 1>(w, o, expert_row, tile),
            2 => products::<F, GROUP, 1, 2>(w, o, expert_row, tile),
            _ => products::<F, R, 1, { TILE as usize }>(w, o, expert_row, tile),
        }
        block::sync_threads(); // all sums are written before they are read
        finish(hidden, tile.expert, first, tile.n, |t| tile.route(o.order, t));
    }
}

macro_rules! entry {
    ($ty:ident, $shared:ident, $name:ident, [$($how:literal)+], [$($shared_how:literal)+]) => {
        #[doc = concat!("[`gate_up_grouped`](self) with [`", stringify!($ty), "`](format::", stringify!($ty), ") experts")]
        #[doc = concat!("and a shared one in [`", stringify!($shared), "`](format::", stringify!($shared), ").")]
        ///
        /// `gate` and `up`: `[n_expert, rows, cols]` planar; `shared_gate` and `shared_up`: `[shared_rows, cols]` or null;
        /// `qs, d, s`: `x`, `[tokens, cols]`, as `quantize_q8` makes it; `gate_bias`, `up_bias`: `[n_expert, rows]` or
        /// null; `order` and `tiles` as `route_groups` makes them for tiles of [`TILE`]; `h_*`: `h`,
        /// `[tokens·n_used, rows]`, and `shared_*`: `[tokens, shared_rows]`, of the same form as `x`.
        ///
        /// Grid: `(max(rows, shared_rows) / ROWS, shared_tiles + tiles)`, blocks of [`THREADS`] lanes, [`SHARED_BYTES`] of
        /// shared memory.
        ///
        /// # Safety
        /// - `gate` and `up`, `shared_gate` and `shared_up` point to whole tensors of those shapes, 16-byte aligned, with
        ///   `p` their planes, chunks and lanes; nobody writes them. `rows` and `shared_rows` are multiples of [`ROWS`].
        /// - The tensors have fewer than 2^32 blocks, the activations fewer elements.
        /// - All arrays have the shapes above; `cols` is a multiple of 32; activations are 16-byte aligned. Results overlap
        ///   nothing; each route is in `order` once, and `n_used` is not 0.
        /// - `shared_tiles` is `⌈tokens / TILE⌉` with a shared expert, else 0.
        /// - The grid before in the stream is the only one still running (programmatic dependent launch).
        #[kernel(max_threads = 128, min_blocks = 4)]
        pub unsafe fn $name(
            gate: *const u8, up: *const u8, shared_gate: *const u8, shared_up: *const u8,
            qs: *const i8, d: *const f32, s: *const f32, gate_bias: *const f32, up_bias: *const f32,
            order: *const u32, tiles: *const U32x4, h_qs: *mut i8, h_d: *mut f32, h_s: *mut f32,
            shared_qs: *mut i8, shared_d: *mut f32, shared_s: *mut f32, p: GateUpGroupedParams,
        ) {
            pdl::grid_dependency_wait();
            pdl::launch_dependents();
            let (first, at) = (thread::block_idx_x() * ROWS, thread::block_idx_y());
            let x = Quantized { qs, d, s };
            // A block leaves, or takes a branch, as a whole.
            if at < p.shared_tiles {
                if first >= p.shared_rows {
                    return;
                }
                let (null, h) = (core::ptr::null(), Q8Mut { qs: shared_qs, d: shared_d, s: shared_s });
                let hidden = Hidden { gate_bias: null, up_bias: null, h, rows: p.shared_rows, oai: p.oai };
                let w = Weights {
                    gate: shared_gate, up: shared_up, planes: &p.shared_planes, chunks: p.shared_chunks,
                    lanes_log2: p.shared_lanes_log2,
                };
                let common = Common { x, cols: p.cols, order: core::ptr::null(), n_used: 1 };
                block::<format::$shared, $($shared_how),+>(&w, &common, &hidden, first, Tile::of_tokens(at, p.tokens));
            } else {
                if first >= p.rows {
                    return;
                }
                let tile = Tile::of_list(tiles, at - p.shared_tiles);
                if tile.n == 0 {
                    return;
                }
                let h = Q8Mut { qs: h_qs, d: h_d, s: h_s };
                let hidden = Hidden { gate_bias, up_bias, h, rows: p.rows, oai: p.oai };
                let w = Weights { gate, up, planes: &p.planes, chunks: p.chunks, lanes_log2: p.lanes_log2 };
                let common = Common { x, cols: p.cols, order, n_used: p.n_used };
                block::<format::$ty, $($how),+>(&w, &common, &hidden, first, tile);
            }
        }
    };
}

/// The entry points of a type: `$same` for a shared expert of the same type, `$q8_0` for one in Q8_0.
macro_rules! entries {
    ($($ty:ident $how:tt: $same:ident $q8_0:ident;)+) => {$(
        entry!($ty, $ty, $same, $how, $how);
        entry!($ty, Q8_0, $q8_0, $how, [2 4]);
    )+};
}

// In brackets, chunks of a row that a lane loads for one token before it uses the first, and rows that it computes
// together for most.
entries! {
    Q4K [2 2]: gate_up_grouped_q4_k gate_up_grouped_q4_k_q8_0;
    Q5K [1 2]: gate_up_grouped_q5_k gate_up_grouped_q5_k_q8_0;
    Q6K [1 2]: gate_up_grouped_q6_k gate_up_grouped_q6_k_q8_0;
    Q4_0 [2 4]: gate_up_grouped_q4_0 gate_up_grouped_q4_0_q8_0;
    Q4_1 [2 2]: gate_up_grouped_q4_1 gate_up_grouped_q4_1_q8_0;
    Q5_0 [1 4]: gate_up_grouped_q5_0 gate_up_grouped_q5_0_q8_0;
    Q5_1 [1 2]: gate_up_grouped_q5_1 gate_up_grouped_q5_1_q8_0;
    Mxfp4 [2 2]: gate_up_grouped_mxfp4 gate_up_grouped_mxfp4_q8_0;
}
entry!(Q8_0, Q8_0, gate_up_grouped_q8_0, [2 4], [2 4]);
