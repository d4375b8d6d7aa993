//! Launcher of `route_groups`.

use cuda_std::U32x4;
use cuda_std::launch::Launch;
use gpu_kernels::kernels::matmul::wide::WIDE_TILES;
use gpu_kernels::kernels::matmul::{TILES, Tile};
use gpu_kernels::kernels::route_groups as kernels;
use gpu_kernels::kernels::softmax_topk::MAX_EXPERTS;

use super::{Check, Experts, Result};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// Routes sorted by expert and cut into tiles, on the device.
#[derive(Clone, Copy, Debug)]
pub struct RouteGroups<'a> {
    /// Every route once, `[routes]`.
    pub order: Slice<'a, u32>,
    /// `(expert, first of order, how many, 0)`, [`max_tiles`] of them.
    pub tiles: Slice<'a, U32x4>,
    /// What the tiles are cut for.
    pub tile: Tile,
}

impl RouteGroups<'_> {
    /// Blocks of a product along the tiles.
    pub(super) fn n_tiles(&self, routes: u32, n_expert: u32) -> u32 {
        kernels::n_tiles(routes, n_expert, self.tile.tokens)
    }

    /// Checks that there is room for so many routes.
    pub(super) fn check<D: Device>(&self, check: Check, device: &D, routes: u32, n_expert: u32) -> Result<()> {
        let there = TILES.contains(&self.tile) || WIDE_TILES.contains(&self.tile);
        check.that("tiles", there, "for a tile that no kernel has")?;
        check.rows("order", self.order, 1, u64::from(routes), u64::from(routes))?;
        let n_tiles = u64::from(self.n_tiles(routes, n_expert));
        check.rows("tiles", self.tiles, 1, n_tiles, n_tiles)?;
        check.aligned("tiles", self.tiles, 16)?;
        device.check_owner(self.order)?;
        Ok(device.check_owner(self.tiles)?)
    }
}

/// The most tiles that so many routes can take, whatever the tile.
pub const fn max_tiles(routes: u32, n_expert: u32) -> u32 {
    kernels::n_tiles(routes, n_expert, TILES[0].tokens)
}

/// Groups the routes of `tokens` tokens among `n_expert` experts. Ids past the last expert count as the last.
///
/// # Errors
/// Where ids are not next to each other, or an extent, an alignment or an overlap is not as
/// [`gpu_kernels::kernels::route_groups`] asks.
#[expect(unsafe_code, reason = "a launch")]
pub fn route_groups<D: Device>(
    device: &D,
    experts: &Experts<'_>,
    tokens: u32,
    n_expert: u32,
    out: RouteGroups<'_>,
) -> Result<u64> {
    let check = Check("route_groups");
    let Some(routes) = tokens.checked_mul(experts.n_used).filter(|routes| *routes > 0) else {
        return check.fail("ids", format!("{tokens} tokens of {} routes", experts.n_used));
    };
    check.that("ids", experts.ids_stride == experts.n_used || tokens == 1, "not next to each other")?;
    check.rows("ids", experts.ids, 1, u64::from(routes), u64::from(routes))?;
    check.that("tiles", (1..=MAX_EXPERTS).contains(&n_expert), "more experts than there are counters, or none")?;
    // A lane's number of a route stays in 32 bits.
    check.that("ids", routes <= 1 << 30, "too many")?;
    device.check_owner(experts.ids)?;
    out.check(check, device, routes, n_expert)?;
    check.apart("order", out.order, experts.ids)?;
    check.apart("tiles", out.tiles, experts.ids)?;
    check.apart("tiles", out.tiles, out.order)?;
    let params = kernels::RouteGroupsParams { routes, tile: out.tile.tokens };
    let launch = Launch::linear(n_expert, kernels::THREADS).shared(kernels::SHARED_BYTES);
    let args = (experts.ids.ptr(), out.order.ptr_mut(), out.tiles.ptr_mut(), params);
    // SAFETY: extents, alignment and overlap were checked above; there is a block and a counter for each expert.
    unsafe { device.launch(kernels::route_groups, launch, args)? };
    Ok(u64::from(routes) * 8 + 16 * u64::from(out.n_tiles(routes, n_expert)))
}
