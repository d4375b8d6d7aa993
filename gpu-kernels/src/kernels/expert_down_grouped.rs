//! The experts' output for routes that were grouped by expert, a few to each.
//!
//! `y[i, r] = Σ_k w[e, r, k]·h[i, k] + bias[e, r]` for every route `i` to expert `e`, and with a shared expert, of a type
//! of its own, `shared_y[t, r] = Σ_k shared_w[r, k]·shared_h[t, k]` for every token `t`. A block computes [`ROWS`] rows
//! for a tile of routes (see [`grouped`](super::grouped)). Joining the outputs is
//! [`moe_weighted_acc`](super::moe::moe_weighted_acc)'s.
//!
//! The products are [`matvec`](super::matvec)'s, to the same bits.

use bytemuck::{Pod, Zeroable};
use cuda_std::{pdl, prelude::*};

use super::format::{self, FormatQ8};
use super::grouped::{GROUP, Rows, THREADS, TILE, Tile, group_sums, starts};
use super::matvec::{Lane, Quantized};
use crate::layout::MAX_PLANES;

/// Rows that a block computes.
pub const ROWS: u32 = 128;

/// Scalars of `expert_down_grouped_*`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct ExpertDownGroupedParams {
    /// Byte offsets of the planes of `w`.
    pub planes: [u64; MAX_PLANES],
    /// Those of `shared_w`.
    pub shared_planes: [u64; MAX_PLANES],
    /// Rows of one expert's matrix, and of the shared one's.
    pub rows: u32,
    /// 16-byte chunks in a row of `w`.
    pub chunks: u32,
    /// [`MatvecShape::lanes_log2`](crate::params::MatvecShape::lanes_log2) of its type with quantised activations.
    pub lanes_log2: u32,
    /// Columns of `w`.
    pub cols: u32,
    /// 16-byte chunks in a row of `shared_w`.
    pub shared_chunks: u32,
    /// Lanes that share a row of it, as above.
    pub shared_lanes_log2: u32,
    /// Columns of `shared_w`.
    pub shared_cols: u32,
    /// Tokens.
    pub tokens: u32,
    /// Tiles of tokens, which come before those of routes: none without a shared expert.
    pub shared_tiles: u32,
    /// Zero.
    pub reserved: u32,
}

/// The operands of one expert, or of all.
struct Operands<'a> {
    w: *const u8,
    planes: &'a [u64; MAX_PLANES],
    rows: u32,
    chunks: u32,
    lanes_log2: u32,
    h: Quantized,
    cols: u32,
    bias: *const f32,
    order: *const u32,
    y: *mut f32,
}

/// The block's rows for the first `T` routes of a tile, `R` rows at a time; those routes that it has not are not stored.
///
/// # Safety
/// As [`block`].
#[inline(always)]
unsafe fn products<F: FormatQ8, const R: usize, const S: usize, const T: usize>(o: &Operands<'_>, tile: Tile) {
    let (thread, lanes) = (thread::thread_idx_x(), 1u32 << o.lanes_log2);
    let place = Lane { lane: thread & (lanes - 1), lanes_log2: o.lanes_log2, chunks: o.chunks };
    let group = (thread >> o.lanes_log2) * R as u32;
    let step = (THREADS >> o.lanes_log2) * R as u32;
    let first = thread::block_idx_x() * ROWS;
    let end = (first + ROWS).min(o.rows);
    // SAFETY: the caller's promise. Groups past the end compute the last row again and don't store it: all lanes take
    // part in shuffles.
    unsafe {
        let starts = starts::<T>(o.cols, tile, o.order, 1);
        let expert_row = tile.expert * o.rows;
        let mut base = first;
        while base < end {
            let row = (base + group).min(end - 1);
            let n = if base + group < end { (end - row).min(R as u32) } else { 0 };
            let rows = Rows { w: o.w, planes: o.planes, first: expert_row + row, n: n.max(1) };
            let sums = group_sums::<F, R, S, T>(place, &rows, o.h, &starts);
            if place.lane == 0 {
                for t in 0..T {
                    if (t as u32) < tile.n {
                        let y = o.y.add(tile.route(o.order, t as u32) as usize * o.rows as usize + row as usize);
                        for r in 0..R {
                            if (r as u32) < n {
                                let bias = (expert_row + row) as usize + r;
                                let bias = if o.bias.is_null() { 0.0 } else { ld(o.bias.add(bias)) };
                                st(y.add(r), sums[t][r] + bias);
                            }
                        }
                    }
                }
            }
            base += step;
        }
    }
}

/// One block's rows for the routes of a tile, by the smallest of the bodies that has room for them: `S` chunks of [`GROUP`]
/// rows together, or with most tokens one of `R`.
///
/// # Safety
/// The tile is not empty, and its expert, `order` and rows of `h` and `y` exist; all of the block is here.
#[inline(always)]
unsafe fn block<F: FormatQ8, const S: usize, const R: usize>(o: &Operands<'_>, tile: Tile) {
    // SAFETY: the caller's promise; the block takes one branch as a whole.
    unsafe {
        match tile.n {
            1 => products::<F, GROUP, S, 1>(o, tile),
            2 => products::<F, GROUP, 1, 2>(o, tile),
            _ => products::<F, R, 1, { TILE as usize }>(o, tile),
        }
    }
}

macro_rules! entry {
    ($ty:ident, $shared:ident, $name:ident, [$($how:literal)+], [$($shared_how:literal)+]) => {
        #[doc = concat!("[`expert_down_grouped`](self) with [`", stringify!($ty), "`](format::", stringify!($ty), ")")]
        #[doc = concat!("experts and a shared one in [`", stringify!($shared), "`](format::", stringify!($shared), ").")]
        ///
        /// `w: [n_expert, rows, cols]` planar, `shared_w: [rows, shared_cols]` or null; `qs, d, s`: `h`,
        /// `[tokens·n_used, cols]`, as `quantize_q8` makes it, `shared_qs, shared_d, shared_s`: `[tokens, shared_cols]`;
        /// `bias: [n_expert, rows]` or null; `order` and `tiles` as `route_groups` makes them for tiles of [`TILE`];
        /// `y: [tokens·n_used, rows]`, `shared_y: [tokens, rows]`.
        ///
        /// Grid: `(⌈rows / ROWS⌉, shared_tiles + tiles)`, blocks of [`THREADS`] lanes.
        ///
        /// # Safety
        /// - `w` and `shared_w` point to whole tensors of those shapes, 16-byte aligned, with `p` their planes, chunks and
        ///   lanes; nobody writes them.
        /// - The tensors have fewer than 2^32 blocks, the activations fewer elements.
        /// - All arrays have the shapes above; columns are multiples of 32; activations are 16-byte aligned. Results overlap
        ///   nothing; each route is in `order` once.
        /// - `shared_tiles` is `⌈tokens / TILE⌉` with a shared expert, else 0.
        /// - The grid before in the stream is the only one still running (programmatic dependent launch).
        #[kernel(max_threads = 128, min_blocks = 4)]
        pub unsafe fn $name(
            w: *const u8, qs: *const i8, d: *const f32, s: *const f32, bias: *const f32,
            shared_w: *const u8, shared_qs: *const i8, shared_d: *const f32, shared_s: *const f32,
            order: *const u32, tiles: *const U32x4, y: *mut f32, shared_y: *mut f32, p: ExpertDownGroupedParams,
        ) {
            pdl::grid_dependency_wait();
            pdl::launch_dependents();
            let at = thread::block_idx_y();
            // A block leaves, or takes a branch, as a whole.
            if at < p.shared_tiles {
                let o = Operands {
                    w: shared_w, planes: &p.shared_planes, rows: p.rows, chunks: p.shared_chunks,
                    lanes_log2: p.shared_lanes_log2, h: Quantized { qs: shared_qs, d: shared_d, s: shared_s },
                    cols: p.shared_cols, bias: core::ptr::null(), order: core::ptr::null(), y: shared_y,
                };
                block::<format::$shared, $($shared_how),+>(&o, Tile::of_tokens(at, p.tokens));
            } else {
                let tile = Tile::of_list(tiles, at - p.shared_tiles);
                if tile.n == 0 {
                    return;
                }
                let o = Operands {
                    w, planes: &p.planes, rows: p.rows, chunks: p.chunks, lanes_log2: p.lanes_log2,
                    h: Quantized { qs, d, s }, cols: p.cols, bias, order, y,
                };
                block::<format::$ty, $($how),+>(&o, tile);
            }
        }
    };
}

/// The entry points of a type: `$same` for a shared expert of the same type, `$q8_0` for one in Q8_0.
macro_rules! entries {
    ($($ty:ident $how:tt $shared_how:tt: $same:ident $q8_0:ident;)+) => {$(
        entry!($ty, $ty, $same, $how, $shared_how);
        entry!($ty, Q8_0, $q8_0, $how, [2 4]);
    )+};
}

// In brackets, chunks of a row that a lane loads for one token before it uses the first, and rows that it computes
// together for most; then the same for a shared expert of the type.
entries! {
    Q4K [2 2] [2 2]: expert_down_grouped_q4_k expert_down_grouped_q4_k_q8_0;
    Q5K [1 2] [1 2]: expert_down_grouped_q5_k expert_down_grouped_q5_k_q8_0;
    Q6K [1 2] [1 2]: expert_down_grouped_q6_k expert_down_grouped_q6_k_q8_0;
    Q4_0 [2 2] [2 2]: expert_down_grouped_q4_0 expert_down_grouped_q4_0_q8_0;
    Q4_1 [2 2] [2 2]: expert_down_grouped_q4_1 expert_down_grouped_q4_1_q8_0;
    Q5_0 [1 2] [1 2]: expert_down_grouped_q5_0 expert_down_grouped_q5_0_q8_0;
    Q5_1 [1 2] [1 2]: expert_down_grouped_q5_1 expert_down_grouped_q5_1_q8_0;
    Mxfp4 [2 2] [2 2]: expert_down_grouped_mxfp4 expert_down_grouped_mxfp4_q8_0;
}
entry!(Q8_0, Q8_0, expert_down_grouped_q8_0, [2 4], [2 4]);
