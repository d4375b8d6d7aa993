//! Launchers of `matmul_*`.

use cuda_std::U32x4;
use cuda_std::launch::Launch;
use gpu_kernels::blocks::GgmlType;
use gpu_kernels::kernels::matmul::{self as kernels, MatmulParams, TILES, Tile};

use super::{Check, Matvec, OpError, Q8, Result, RouteGroups};
use crate::gpu::device::{Device, Properties};

/// The tile for a dense product: no larger than its tokens need, and the largest that leaves three blocks for every
/// two multiprocessors, for two blocks at least fit on one. `None` for so few tokens that the matvec is better: up to
/// four, for which it reads the weights once, without a detour through shared memory; and up to eight where tiles
/// would leave multiprocessors without a block, for its second reading comes from the cache.
pub fn dense_tile(device: &Properties, rows: u32, tokens: u32) -> Option<Tile> {
    let needed = TILES.iter().position(|tile| tile.tokens >= tokens).unwrap_or(TILES.len() - 1);
    let blocks = |tile: &Tile| u64::from(rows.div_ceil(tile.rows)) * u64::from(tokens.div_ceil(tile.tokens));
    let n_sm = u64::from(device.n_sm);
    if tokens <= 4 || tokens <= 8 && blocks(&TILES[0]) < n_sm {
        return None;
    }
    let tile = TILES[..=needed].iter().rev().find(|tile| blocks(tile) >= n_sm * 3 / 2);
    Some(*tile.unwrap_or(&TILES[0]))
}

/// The tile for routes that are spread over so many experts: a quarter more than they have on average, so that most
/// experts' weights are unpacked once. The largest only where most experts fill it, for its block of sixteen warps is
/// alone on a multiprocessor.
pub fn expert_tile(routes: u32, n_expert: u32) -> Tile {
    let (routes, n_expert) = (u64::from(routes), u64::from(n_expert));
    let [.., second, largest] = TILES;
    if routes >= u64::from(second.tokens) * n_expert * 3 / 2 {
        return largest;
    }
    let fits = |tile: &&Tile| u64::from(tile.tokens) * n_expert >= routes * 5 / 4;
    *TILES[..TILES.len() - 1].iter().find(fits).unwrap_or(&second)
}

/// What the rows of a product are cut into.
#[derive(Clone, Copy, Debug)]
pub enum Tiles<'a> {
    /// Consecutive tokens of a dense product.
    Dense(Tile),
    /// Routes of one expert each: those of the product's own routing.
    Experts(RouteGroups<'a>),
}

impl Tiles<'_> {
    /// Their size.
    pub fn tile(self) -> Tile {
        match self {
            Tiles::Dense(tile) => tile,
            Tiles::Experts(groups) => groups.tile,
        }
    }
}

/// A product's rows, cut into tiles.
pub(super) struct Cut {
    pub(super) tile: Tile,
    n_tiles: u32,
    routes: u32,
    /// What the kernels take; null for dense products.
    pub(super) order: *const u32,
    pub(super) list: *const U32x4,
}

impl Cut {
    /// Checks the tiles of an operation, which are among `there`.
    pub(super) fn new<D: Device>(
        check: Check,
        device: &D,
        op: &Matvec<'_>,
        tiles: Tiles<'_>,
        there: &[Tile],
    ) -> Result<Cut> {
        let of_experts = matches!(tiles, Tiles::Experts(_));
        check.that("tiles", of_experts == op.experts.is_some(), "tiles of experts are for products of experts")?;
        let (n_expert, routes) = (op.w.n_expert(), op.tokens * op.n_used());
        let cut = match tiles {
            Tiles::Dense(tile) => {
                let n_tiles = routes.div_ceil(tile.tokens);
                Cut { tile, n_tiles, routes, order: std::ptr::null(), list: std::ptr::null() }
            }
            Tiles::Experts(groups) => {
                groups.check(check, device, routes, n_expert)?;
                check.apart("y", op.y, groups.order)?;
                check.apart("y", op.y, groups.tiles)?;
                let n_tiles = groups.n_tiles(routes, n_expert);
                Cut { tile: groups.tile, n_tiles, routes, order: groups.order.ptr(), list: groups.tiles.ptr() }
            }
        };
        check.that("tiles", there.contains(&cut.tile), "no kernel has such tiles")?;
        Ok(cut)
    }

    /// The grid.
    pub(super) fn grid(&self, check: Check, op: &Matvec<'_>) -> Result<[u32; 3]> {
        let blocks = op.w.rows().div_ceil(self.tile.rows);
        check.grid_yz("w", blocks)?;
        Ok([self.n_tiles, blocks, 1])
    }

    /// The kernels' scalars.
    pub(super) fn params(&self, op: &Matvec<'_>) -> MatmulParams {
        let w = op.w;
        MatmulParams {
            planes: w.planes(),
            rows: w.rows(),
            cols: w.cols(),
            chunks: w.chunks(),
            routes: self.routes,
            y_stride: op.y_stride,
            x_div: op.experts.filter(|experts| experts.shared_x).map_or(1, |experts| experts.n_used),
            accumulate: u32::from(op.accumulate),
            warp_blocks: kernels::WARP_BLOCKS,
        }
    }

    /// Bytes of weights and results: each expert's weights once, at most as many experts as routes.
    pub(super) fn bytes(&self, op: &Matvec<'_>) -> u64 {
        let (w, y_bytes) = (op.w, if op.accumulate { 8 } else { 4 });
        let matrices = if op.experts.is_some() { w.n_expert().min(self.routes) } else { 1 };
        u64::from(matrices) * u64::from(w.rows()) * w.row_bytes()
            + u64::from(self.routes) * u64::from(w.rows()) * y_bytes
    }
}

/// The product with quantised activations, in tiles.
///
/// # Errors
/// As [`matvec_q8`](super::matvec_q8); tiles that are not those of a dense product, or of experts.
#[expect(unsafe_code, reason = "a launch")]
pub fn matmul_q8<D: Device>(device: &D, op: &Matvec<'_>, x: Q8<'_>, tiles: Tiles<'_>) -> Result<u64> {
    let check = Check("matmul_q8");
    if op.tokens == 0 || op.n_used() == 0 {
        return Ok(0);
    }
    let x_rows = op.check(check, device)?;
    check.that("x", x.cols == op.w.cols(), "columns differ from the weights'")?;
    x.check(check, device, x_rows)?;
    check.apart("y", op.y, x.qs)?;
    check.apart("y", op.y, x.d)?;
    check.apart("y", op.y, x.s)?;
    check.that("x", x_rows * u64::from(x.cols) <= 1 << 32, "more than 2^32 elements")?;
    let cut = Cut::new(check, device, op, tiles, &TILES)?;
    let (w, tile) = (op.w, cut.tile);
    let (_, bias) = op.optional();
    let (qs, d, s) = (x.qs.ptr(), x.d.ptr(), x.s.ptr());
    let args = (w.data().ptr(), qs, d, s, op.y.ptr_mut(), bias, cut.order, cut.list, cut.params(op));
    let launch = Launch::grid(cut.grid(check, op)?, tile.threads).shared(tile.shared_bytes(w.ty()));
    let launch = Launch { pdl: op.dependent && device.properties().capability >= (9, 0), ..launch };
    macro_rules! launch {
        ($($ty:ident: $n8:ident $n16:ident $n32:ident $n64:ident $n128:ident),+) => {
            match (w.ty(), tile.tokens) {
                $(
                    // SAFETY: `Matrix` has checked the weights, `Matvec::check` and `Q8::check` the other operands;
                    // geometry and shared memory are the tile's. Order and tiles have the extents that the kernel
                    // reads; `route_groups` alone writes them, from the routing that `op` has.
                    (GgmlType::$ty, 8) => unsafe { device.launch(kernels::$n8, launch, args)? },
                    // SAFETY: as above.
                    (GgmlType::$ty, 16) => unsafe { device.launch(kernels::$n16, launch, args)? },
                    // SAFETY: as above.
                    (GgmlType::$ty, 32) => unsafe { device.launch(kernels::$n32, launch, args)? },
                    // SAFETY: as above.
                    (GgmlType::$ty, 64) => unsafe { device.launch(kernels::$n64, launch, args)? },
                    // SAFETY: as above; there is no other tile.
                    (GgmlType::$ty, _) => unsafe { device.launch(kernels::$n128, launch, args)? },
                )+
                (ty @ (GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16), _) => {
                    return Err(OpError::Type { op: "matmul_q8", ty });
                }
            }
        };
    }
    launch!(
        Q4K: matmul_q4_k_n8 matmul_q4_k_n16 matmul_q4_k_n32 matmul_q4_k_n64 matmul_q4_k_n128,
        Q5K: matmul_q5_k_n8 matmul_q5_k_n16 matmul_q5_k_n32 matmul_q5_k_n64 matmul_q5_k_n128,
        Q6K: matmul_q6_k_n8 matmul_q6_k_n16 matmul_q6_k_n32 matmul_q6_k_n64 matmul_q6_k_n128,
        Q8_0: matmul_q8_0_n8 matmul_q8_0_n16 matmul_q8_0_n32 matmul_q8_0_n64 matmul_q8_0_n128,
        Q4_0: matmul_q4_0_n8 matmul_q4_0_n16 matmul_q4_0_n32 matmul_q4_0_n64 matmul_q4_0_n128,
        Q4_1: matmul_q4_1_n8 matmul_q4_1_n16 matmul_q4_1_n32 matmul_q4_1_n64 matmul_q4_1_n128,
        Q5_0: matmul_q5_0_n8 matmul_q5_0_n16 matmul_q5_0_n32 matmul_q5_0_n64 matmul_q5_0_n128,
        Q5_1: matmul_q5_1_n8 matmul_q5_1_n16 matmul_q5_1_n32 matmul_q5_1_n64 matmul_q5_1_n128,
        Mxfp4: matmul_mxfp4_n8 matmul_mxfp4_n16 matmul_mxfp4_n32 matmul_mxfp4_n64 matmul_mxfp4_n128
    );
    Ok(cut.bytes(op) + Q8::bytes(x_rows * u64::from(w.cols())))
}
