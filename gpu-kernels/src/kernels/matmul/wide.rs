//! The products of many tokens by the tensor cores of Hopper: bf16 factors, f32 sums.
//!
//! The equations, arguments and groups of routes are those of [`matmul`](super). The weights are turned to bf16 by the
//! lanes that multiply them ([`FormatWide`]), in registers, where [`wgmma`](cuda_std::wgmma) takes them from; the
//! activations ([`to_bf16`](crate::kernels::to_bf16)) lie in shared memory. So a weight is unpacked once for all tokens
//! of a tile and never written, and scales cost nothing for an element of the product, which is what limits the tiles
//! in integers.
//!
//! A block computes a tile of rows and tokens; each warpgroup 64 of the rows, each warp 16. Step after step along the
//! columns, both kinds of bytes are copied to shared memory as they are, some steps ahead; a product runs while the
//! weights of the next one are unpacked. A tile that has fewer tokens is multiplied with as many columns as it needs,
//! in sixteens.
//!
//! The tensor cores add up what an f32 holds of the products; the order is theirs.

mod product;
mod stage;
mod tokens;
mod weights;

use cuda_std::prelude::*;
use cuda_std::wgmma;

use self::product::wide;
use super::tile::Target;
use super::{MatmulParams, Tile};
use crate::blocks::GgmlType;
use crate::kernels::format;

/// The tiles that there are. 256 rows, so that the activations are copied as seldom as possible: to 128 rows it would
/// be as many bytes as there are weights for 16 tokens of each of them. Of matrices with few rows there are more small
/// tiles.
pub const WIDE_TILES: [Tile; 2] = [wide_tile(64), wide_tile(128)];

/// The tile of so many tokens: two lanes for each row.
const fn wide_tile(tokens: u32) -> Tile {
    Tile { tokens, rows: 2 * tokens, step: 64, threads: 4 * tokens }
}

/// Whether a tile is one of these.
pub const fn is_wide(tile: Tile) -> bool {
    tile.step == 64
}

/// Bytes of shared memory that a block needs.
pub const fn shared_bytes(tile: Tile, ty: GgmlType) -> u32 {
    use format::*;
    match ty {
        GgmlType::Q4_0 => stage::shared_bytes::<Q4_0>(tile),
        GgmlType::Q4_1 => stage::shared_bytes::<Q4_1>(tile),
        GgmlType::Q5_0 => stage::shared_bytes::<Q5_0>(tile),
        GgmlType::Q5_1 => stage::shared_bytes::<Q5_1>(tile),
        GgmlType::Q8_0 => stage::shared_bytes::<Q8_0>(tile),
        GgmlType::Q4K => stage::shared_bytes::<Q4K>(tile),
        GgmlType::Q5K => stage::shared_bytes::<Q5K>(tile),
        GgmlType::Q6K => stage::shared_bytes::<Q6K>(tile),
        GgmlType::Mxfp4 => stage::shared_bytes::<Mxfp4>(tile),
        GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16 => 0,
    }
}

/// The arguments of a kernel.
#[derive(Clone, Copy)]
struct Operands {
    w: *const u8,
    x: *const U32x4,
    to: Target,
}

/// The entry points of a type. In brackets: scales that a lane loads for a span, and groups that it makes factors of.
macro_rules! entries {
    ($($ty:ident[$loads:literal $groups:literal]: $w64:ident $w128:ident;)+) => {$(
        entries!(@ $ty $w64 "64" [256 2] 64 32 $loads $groups);
        entries!(@ $ty $w128 "128" [512 1] 128 64 $loads $groups);
    )+};
    (@ $ty:ident $name:ident $tokens:literal [$threads:tt $blocks:tt]
        $n:literal $sums:literal $loads:literal $groups:literal) => {
        #[doc = concat!("[`wide`](self) product with [`", stringify!($ty), "`](format::", stringify!($ty), ") weights in tiles of ")]
        #[doc = concat!($tokens, " tokens.")]
        ///
        /// `x: [x rows, cols]` as [`to_bf16`](crate::kernels::to_bf16) writes it; the other arguments as those of
        /// [`matmul_q8_0_n8`](super::matmul_q8_0_n8). Grid: `(tiles of tokens, ⌈rows / tile rows⌉)`, blocks of the
        /// tile's threads, shared memory of [`shared_bytes`].
        ///
        /// # Safety
        /// - The GPU has [`wgmma`]; elsewhere the kernel traps.
        /// - As [`matmul_q8_0_n8`](super::matmul_q8_0_n8), with `x` in place of `qs`.
        #[kernel(max_threads = $threads, min_blocks = $blocks)]
        pub unsafe fn $name(
            w: *const u8, x: *const U32x4, y: *mut f32, bias: *const f32, order: *const u32, tiles: *const U32x4,
            p: MatmulParams,
        ) {
            wgmma::require();
            wide::<format::$ty, $n, $sums, $loads, $groups>(Operands { w, x, to: Target { y, bias, order, tiles } }, &p);
        }
    };
}

entries! {
    Q4K[1 4]: matmul_q4_k_w64 matmul_q4_k_w128;
    Q5K[1 4]: matmul_q5_k_w64 matmul_q5_k_w128;
    Q6K[4 4]: matmul_q6_k_w64 matmul_q6_k_w128;
    Q8_0[1 1]: matmul_q8_0_w64 matmul_q8_0_w128;
    Q4_0[1 1]: matmul_q4_0_w64 matmul_q4_0_w128;
    Q4_1[1 1]: matmul_q4_1_w64 matmul_q4_1_w128;
    Q5_0[1 1]: matmul_q5_0_w64 matmul_q5_0_w128;
    Q5_1[1 1]: matmul_q5_1_w64 matmul_q5_1_w128;
    Mxfp4[1 1]: matmul_mxfp4_w64 matmul_mxfp4_w128;
}
