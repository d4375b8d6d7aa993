//! Matrix times many tokens on the tensor cores, for every quantised weight type.
//!
//! `y[t, r] (= or +=) bias[r] + Σ_k w[r, k]·x[t, k]`, and for routes that were grouped by expert
//! ([`route_groups`](super::route_groups)), for route `i` of expert `e`,
//! `y[i, r] (= or +=) bias[e, r] + Σ_k w[e, r, k]·x[i / x_div, k]`.
//!
//! One body serves every type ([`FormatTile`]) and tile. A block computes a tile of rows and tokens, step after
//! step along `k`: weights are unpacked to signed bytes in shared memory, activations (from `quantize_q8`) are
//! copied there, and `mma` multiplies 16 elements at a time, exactly, in integers. What it does to a block of 16 is
//! what the dp4a [`matvec`](super::matvec) does; the two differ in the order in which blocks are added up, in f32.
//!
//! # Scales
//! Each product of a block is multiplied by the weights' scale and the activations', which costs more than the
//! product: a lane has four of them for one `mma`. So the integer is not converted, but in tiles of eight tokens, where
//! products are few. The sum starts at [`MAGIC`], whose bits, plus an integer below 2²², are those of the float
//! `12582912 + integer`; and `fma(that, d, −12582912·d)` is `d·integer`, rounded once, because `12582912·d` is exact
//! ([`FormatTile`] promises two spare bits; a scale of 2^104 or more, which only MXFP4 could write down, overflows).
//!
//! # Pipeline
//! Two stages of shared memory. While one is multiplied, the activations of the next are copied into the other,
//! and its weights are on their way into registers; they are unpacked when the warp has done its part.

mod operands;
mod output;
mod product;
mod stage;
mod tile;
pub mod wide;

use bytemuck::{Pod, Zeroable};
use cuda_std::prelude::*;

use self::stage::Shape;
use self::tile::{Operands, Target, matmul};
use super::format::{self, FormatTile};
use crate::blocks::GgmlType;
use crate::layout::MAX_PLANES;
use crate::params::Q8_COLS;

/// Columns of a block, whose activations have two scales: its halves are products of their own.
const BLOCK: u32 = Q8_COLS;
/// Blocks that a warp multiplies each step.
pub const WARP_BLOCKS: u32 = 4;
/// The sum that a product starts with: 1.5·2²³ as f32. See the module's text.
const MAGIC: i32 = format::MAGIC.to_bits().cast_signed();

/// The tiles that there are, by their tokens.
///
/// Few tokens: 32 rows, so that 8192 rows are 256 blocks, and steps of 512 columns, for which the warps part the
/// columns. That is as much in flight as with 128 rows, where a weight is multiplied often enough. 128 tokens take
/// sixteen warps: the sums of eight would need more registers than leave room for a second block.
pub const TILES: [Tile; 5] = [Tile::new(8), Tile::new(16), Tile::new(32), Tile::new(64), Tile::new(128)];

/// A tile's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Tokens.
    pub tokens: u32,
    /// Weight rows.
    pub rows: u32,
    /// Columns of a step.
    pub step: u32,
    /// Lanes of a block.
    pub threads: u32,
}

impl Tile {
    const fn new(tokens: u32) -> Self {
        let threads = if tokens == 128 { 512 } else { 256 };
        if tokens <= 32 {
            Tile { tokens, rows: 32, step: 512, threads }
        } else {
            Tile { tokens, rows: 128, step: 128, threads }
        }
    }

    /// Bytes of shared memory that a block needs.
    pub const fn shared_bytes(self, ty: GgmlType) -> u32 {
        let groups = if matches!(ty, GgmlType::Q6K) { 16 } else { 32 };
        2 * stage::stage_bytes(self, groups, has_min(ty))
    }
}

/// Whether a type has minimums.
const fn has_min(ty: GgmlType) -> bool {
    matches!(ty, GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4K | GgmlType::Q5K)
}

/// Parameters of `matmul_*`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct MatmulParams {
    /// Byte offsets of the weight's planes.
    pub planes: [u64; MAX_PLANES],
    /// Rows of one expert's matrix, or of the matrix.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
    /// 16-byte chunks in a row.
    pub chunks: u32,
    /// Rows of `y`: tokens, or routes.
    pub routes: u32,
    /// Elements from one row of `y` to the next.
    pub y_stride: u32,
    /// Routes that share a row of `x`; 1 where each has its own.
    pub x_div: u32,
    /// 1: `y += …`.
    pub accumulate: u32,
    /// [`WARP_BLOCKS`]: where the compiler is not to know it, so that it leaves a loop over them as it is.
    /// (The [wide](wide) tiles have no such loop.)
    pub warp_blocks: u32,
}

/// The entry points of a type, for 8, 16, 32, 64 and 128 tokens. In brackets: 16-byte chunks of weights that a lane
/// takes each step, and with 128 tokens; and the blocks that are to fit on a multiprocessor, up to 64 tokens, which
/// is to say the registers of a lane: as few as do without spills.
macro_rules! entries {
    ($($ty:ident[$ch:literal $ch128:literal][$b8:tt $b16:tt $b32:tt $b64:tt]:
        $n8:ident $n16:ident $n32:ident $n64:ident $n128:ident;)+) => {$(
        entries!(@ $ty $n8 [256 $b8] "8" [1 1 2 1 4] $ch 1);
        entries!(@ $ty $n16 [256 $b16] "16" [1 2 2 1 4] $ch 2);
        entries!(@ $ty $n32 [256 $b32] "32" [1 4 2 1 4] $ch 4);
        entries!(@ $ty $n64 [256 $b64] "64" [2 4 4 2 1] $ch 2);
        entries!(@ $ty $n128 [512 1] "128" [2 4 4 4 1] $ch128 2);
    )+};
    (@ $ty:ident $name:ident [$threads:tt $blocks:tt] $tokens:literal
        [$mt:literal $nt:literal $wm:literal $wn:literal $wk:literal] $ch:literal $bi:literal) => {
        #[doc = concat!("[`matmul`](self) with [`", stringify!($ty), "`](format::", stringify!($ty), ") weights in tiles of")]
        #[doc = concat!($tokens, " tokens.")]
        ///
        /// `w: [n_expert, rows, cols]` planar; `qs: [x rows, cols]`, `d: [.., cols/16]`, `s: [.., cols/16]` as
        /// `quantize_q8` writes them; `y: [routes, y_stride]`; `bias: [n_expert, rows]` or null. `order: [routes]`
        /// and `tiles: [grid x]`, `(expert, first of order, how many, 0)`, or both null for a dense product.
        ///
        /// Grid: `(tiles of tokens, ⌈rows / tile rows⌉)`, blocks of [`Tile::threads`], shared memory of
        /// [`Tile::shared_bytes`].
        ///
        /// # Safety
        /// - `w` points to the whole tensor, 16-byte aligned, with `p.planes` its plane offsets; nobody writes it.
        /// - `cols` ≥ 1 is a multiple of 32 and of the type's block, and `p.chunks` chunks; `qs` is 16-byte aligned.
        /// - Dense: the grid's tiles cover `p.routes` tokens, `x` and `y` have a row for each, `x_div` is 1.
        /// - Grouped: `tiles` hold experts of the tensor, and parts of `order`, at most a tile's tokens each; `order`
        ///   has routes below `p.routes`, each once; `y` has a row for each and `x` one for each `x_div` ≥ 1 of them.
        /// - `y` overlaps nothing else. The grid before in the stream is the only one still running.
        #[kernel(max_threads = $threads, min_blocks = $blocks)]
        pub unsafe fn $name(
            w: *const u8, qs: *const i8, d: *const f32, s: *const f32, y: *mut f32, bias: *const f32,
            order: *const u32, tiles: *const U32x4, p: MatmulParams,
        ) {
            const { assert!(<format::$ty as FormatTile>::HAS_MIN == has_min(GgmlType::$ty)) };
            matmul::<format::$ty, Shape<$mt, $nt, $wm, $wn, $wk>, $mt, $nt, $ch, $bi>(
                Operands { w, qs, d, s, to: Target { y, bias, order, tiles } }, &p);
        }
    };
}

entries! {
    Q4K[2 1][3 2 2 2]: matmul_q4_k_n8 matmul_q4_k_n16 matmul_q4_k_n32 matmul_q4_k_n64 matmul_q4_k_n128;
    Q5K[2 1][3 2 2 1]: matmul_q5_k_n8 matmul_q5_k_n16 matmul_q5_k_n32 matmul_q5_k_n64 matmul_q5_k_n128;
    Q6K[2 1][4 2 2 1]: matmul_q6_k_n8 matmul_q6_k_n16 matmul_q6_k_n32 matmul_q6_k_n64 matmul_q6_k_n128;
    Q8_0[4 2][3 2 2 2]: matmul_q8_0_n8 matmul_q8_0_n16 matmul_q8_0_n32 matmul_q8_0_n64 matmul_q8_0_n128;
    Q4_0[2 1][4 2 2 2]: matmul_q4_0_n8 matmul_q4_0_n16 matmul_q4_0_n32 matmul_q4_0_n64 matmul_q4_0_n128;
    Q4_1[2 1][4 2 2 2]: matmul_q4_1_n8 matmul_q4_1_n16 matmul_q4_1_n32 matmul_q4_1_n64 matmul_q4_1_n128;
    Q5_0[2 1][4 2 2 2]: matmul_q5_0_n8 matmul_q5_0_n16 matmul_q5_0_n32 matmul_q5_0_n64 matmul_q5_0_n128;
    Q5_1[2 1][4 2 2 2]: matmul_q5_1_n8 matmul_q5_1_n16 matmul_q5_1_n32 matmul_q5_1_n64 matmul_q5_1_n128;
    Mxfp4[2 1][4 2 2 2]: matmul_mxfp4_n8 matmul_mxfp4_n16 matmul_mxfp4_n32 matmul_mxfp4_n64 matmul_mxfp4_n128;
}
