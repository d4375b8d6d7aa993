//! Launchers of `matmul_*_w64` and `matmul_*_w128`, the products of warpgroups.

use cuda_std::launch::Launch;
use gpu_kernels::blocks::GgmlType;
use gpu_kernels::kernels::matmul::wide::{self as kernels, WIDE_TILES};
use gpu_kernels::kernels::matmul::{Tile, wide};

use super::matmul::{Cut, Tiles};
use super::{Bf16, Check, Matvec, OpError, Result};
use crate::gpu::device::{Device, Properties};

/// The tile of a dense product by warpgroups: the larger one where its blocks are enough for the multiprocessors. `None`
/// where the GPU has no such products, or the matrix too few rows to fill a tile.
pub fn wide_dense_tile(device: &Properties, rows: u32, tokens: u32) -> Option<Tile> {
    let [small, large] = WIDE_TILES;
    let blocks = |tile: Tile| u64::from(rows.div_ceil(tile.rows)) * u64::from(tokens.div_ceil(tile.tokens));
    if !device.wgmma || rows < small.rows {
        return None;
    }
    Some(if blocks(large) >= u64::from(device.n_sm) { large } else { small })
}

/// The tile of products by warpgroups for routes that are spread over so many experts: the larger one where it has
/// more than the smaller one's tokens in many of its tiles. `None` where the GPU has no such products, or so few routes
/// that a product takes as long as reading the weights in either way.
pub fn wide_expert_tile(device: &Properties, routes: u32, n_expert: u32) -> Option<Tile> {
    let [small, large] = WIDE_TILES;
    let each = routes / n_expert.max(1);
    (device.wgmma && each >= 4).then_some(if each >= 32 { large } else { small })
}

/// The product with bf16 activations, in tiles of [`WIDE_TILES`].
///
/// # Errors
/// As [`matmul_q8`](super::matmul_q8); [`OpError::Operand`] where the device has no such products.
#[expect(unsafe_code, reason = "a launch")]
pub fn matmul_wide<D: Device>(device: &D, op: &Matvec<'_>, x: Bf16<'_>, tiles: Tiles<'_>) -> Result<u64> {
    let check = Check("matmul_wide");
    if op.tokens == 0 || op.n_used() == 0 {
        return Ok(0);
    }
    check.that("w", device.properties().wgmma, "the device has no products of warpgroups")?;
    let x_rows = op.check(check, device)?;
    check.that("x", x.cols == op.w.cols(), "columns differ from the weights'")?;
    x.check(check, device, x_rows)?;
    check.apart("y", op.y, x.x)?;
    check.that("x", x_rows * u64::from(x.cols) <= 1 << 32, "more than 2^32 elements")?;
    let cut = Cut::new(check, device, op, tiles, &WIDE_TILES)?;
    let (w, tile) = (op.w, cut.tile);
    let (_, bias) = op.optional();
    let args = (w.data().ptr(), x.x.ptr().cast(), op.y.ptr_mut(), bias, cut.order, cut.list, cut.params(op));
    let launch = Launch::grid(cut.grid(check, op)?, tile.threads).shared(wide::shared_bytes(tile, w.ty()));
    let launch = Launch { pdl: op.dependent, ..launch };
    macro_rules! launch {
        ($($ty:ident: $w64:ident $w128:ident),+) => {
            match (w.ty(), tile.tokens) {
                $(
                    // SAFETY: `Matrix` has checked the weights, `Matvec::check` and `Bf16::check` the other operands;
                    // geometry and shared memory are the tile's, and the device has the instructions. Order and tiles
                    // have the extents that the kernel reads; `route_groups` alone writes them, from the routing that
                    // `op` has.
                    (GgmlType::$ty, 64) => unsafe { device.launch(kernels::$w64, launch, args)? },
                    // SAFETY: as above; there is no other tile.
                    (GgmlType::$ty, _) => unsafe { device.launch(kernels::$w128, launch, args)? },
                )+
                (ty @ (GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16), _) => {
                    return Err(OpError::Type { op: "matmul_wide", ty });
                }
            }
        };
    }
    launch!(
        Q4K: matmul_q4_k_w64 matmul_q4_k_w128,
        Q5K: matmul_q5_k_w64 matmul_q5_k_w128,
        Q6K: matmul_q6_k_w64 matmul_q6_k_w128,
        Q8_0: matmul_q8_0_w64 matmul_q8_0_w128,
        Q4_0: matmul_q4_0_w64 matmul_q4_0_w128,
        Q4_1: matmul_q4_1_w64 matmul_q4_1_w128,
        Q5_0: matmul_q5_0_w64 matmul_q5_0_w128,
        Q5_1: matmul_q5_1_w64 matmul_q5_1_w128,
        Mxfp4: matmul_mxfp4_w64 matmul_mxfp4_w128
    );
    Ok(cut.bytes(op) + 2 * x_rows * u64::from(w.cols()))
}
