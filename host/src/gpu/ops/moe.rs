//! Launchers of the router and of joining the experts' outputs.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::moe;
use gpu_kernels::kernels::softmax_topk::{self, MAX_EXPERTS, MAX_USED, ROWS_PER_BLOCK, SoftmaxTopkParams};
use gpu_kernels::kernels::topk_groups::{self, TopkGroupsParams};

use super::{Check, Result, RouteGroups};
use crate::backend::RouterRule;
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// Rows of `logits`, once the operands of the router have been checked.
#[expect(clippy::too_many_arguments, reason = "the operation has that many operands")]
fn check_topk<D: Device>(
    check: Check,
    device: &D,
    logits: Slice<'_, f32>,
    bias: Option<Slice<'_, f32>>,
    ids: Slice<'_, u32>,
    weights: Slice<'_, f32>,
    n_expert: u32,
    n_used: u32,
) -> Result<u32> {
    check.that("n_expert", (1..=MAX_EXPERTS).contains(&n_expert), "is 0 or more than 1024")?;
    check.that("n_used", (1..=MAX_USED.min(n_expert)).contains(&n_used), "is 0, or more than 32 or n_expert")?;
    check.that("logits", logits.len().is_multiple_of(n_expert as usize), "is not whole rows")?;
    let rows = logits.len() / n_expert as usize;
    check.that("ids", ids.len() == rows * n_used as usize, "has not n_used elements a row")?;
    check.that("weights", weights.len() == ids.len(), "has not n_used elements a row")?;
    check.that("bias", bias.is_none_or(|b| b.len() == n_expert as usize), "has not one element an expert")?;
    check.that("logits", rows < 1 << 26, "has too many rows")?;
    for slice in [logits, weights].into_iter().chain(bias) {
        device.check_owner(slice)?;
    }
    device.check_owner(ids)?;
    check.apart("weights", weights, logits)?;
    check.apart("ids", ids, logits)?;
    Ok(rows as u32)
}

/// Chooses the `n_used` largest of `logits + bias`, `[rows, n_expert]`, into `ids` and `weights`,
/// `[rows, n_used]`.
///
/// # Errors
/// Where the lengths do not agree, or there are more experts than the kernel takes.
#[expect(unsafe_code, reason = "a launch")]
#[expect(clippy::too_many_arguments, reason = "the operation has that many operands")]
pub fn softmax_topk<D: Device>(
    device: &D,
    logits: Slice<'_, f32>,
    bias: Option<Slice<'_, f32>>,
    ids: Slice<'_, u32>,
    weights: Slice<'_, f32>,
    n_expert: u32,
    n_used: u32,
    rule: RouterRule,
) -> Result<u64> {
    let check = Check("softmax_topk");
    let rows = check_topk(check, device, logits, bias, ids, weights, n_expert, n_used)?;
    if rows > 0 {
        let p = SoftmaxTopkParams { rows, n_expert, n_used, over_all: u32::from(rule == RouterRule::SoftmaxAll) };
        let launch = Launch::linear(rows.div_ceil(ROWS_PER_BLOCK), softmax_topk::THREADS).dependent();
        let bias = bias.map_or(std::ptr::null(), Slice::ptr);
        // SAFETY: lengths were checked above; a warp a row; the kernel waits for the grid ahead before it reads.
        unsafe {
            let args = (logits.ptr(), bias, ids.ptr_mut(), weights.ptr_mut(), p);
            device.launch(softmax_topk::softmax_topk, launch, args)?;
        }
    }
    Ok(4 * logits.len() as u64 + 8 * ids.len() as u64)
}

/// Whether [`topk_groups`] takes so many tokens and experts.
pub fn takes_topk_groups(tokens: u32, n_expert: u32, n_used: u32) -> bool {
    (1..=topk_groups::MAX_TOKENS).contains(&tokens)
        && n_expert <= topk_groups::MAX_EXPERTS
        && (1..=MAX_USED.min(n_expert)).contains(&n_used)
}

/// [`softmax_topk`], and the routes by expert as [`route_groups`](super::route_groups) gives them.
///
/// # Errors
/// As these two, and where [`takes_topk_groups`] says no.
#[expect(unsafe_code, reason = "a launch")]
#[expect(clippy::too_many_arguments, reason = "the operation has that many operands")]
pub fn topk_groups<D: Device>(
    device: &D,
    logits: Slice<'_, f32>,
    bias: Option<Slice<'_, f32>>,
    ids: Slice<'_, u32>,
    weights: Slice<'_, f32>,
    n_expert: u32,
    n_used: u32,
    rule: RouterRule,
    out: RouteGroups<'_>,
) -> Result<u64> {
    let check = Check("topk_groups");
    let rows = check_topk(check, device, logits, bias, ids, weights, n_expert, n_used)?;
    if rows == 0 {
        return Ok(0);
    }
    check.that("logits", takes_topk_groups(rows, n_expert, n_used), "more tokens or experts than the kernel takes")?;
    out.check(check, device, rows * n_used, n_expert)?;
    let inputs = [logits.as_bytes(), ids.as_bytes(), weights.as_bytes()];
    for input in inputs.into_iter().chain(bias.map(Slice::as_bytes)) {
        check.apart("order", out.order, input)?;
        check.apart("tiles", out.tiles, input)?;
    }
    check.apart("ids", ids, weights)?;
    check.apart("tiles", out.tiles, out.order)?;
    let over_all = u32::from(rule == RouterRule::SoftmaxAll);
    let p = TopkGroupsParams {
        topk: SoftmaxTopkParams { rows, n_expert, n_used, over_all },
        tile: out.tile.tokens,
        n_tiles: out.n_tiles(rows * n_used, n_expert),
    };
    let launch = Launch::linear(1, topk_groups::THREADS).shared(topk_groups::SHARED_BYTES).dependent();
    let args = (
        logits.ptr(),
        bias.map_or(std::ptr::null(), Slice::ptr),
        ids.ptr_mut(),
        weights.ptr_mut(),
        out.order.ptr_mut(),
        out.tiles.ptr_mut(),
        p,
    );
    // SAFETY: extents, alignment and overlap were checked above; the kernel waits for the grid ahead before it reads.
    unsafe { device.launch(topk_groups::topk_groups, launch, args)? };
    Ok(4 * logits.len() as u64 + 12 * ids.len() as u64 + 16 * u64::from(p.n_tiles))
}

/// The output of the expert that every token goes to.
#[derive(Clone, Copy, Debug)]
pub struct SharedOut<'a> {
    /// `[rows, cols]`.
    pub y: Slice<'a, f32>,
    /// `[rows]`: the logit of its weight, which is 1 without.
    pub gate: Option<Slice<'a, f32>>,
}

/// `x[m] += Σ_j weights[m, j]·y[m·n_used + j]`, rows of `cols` elements, and with a shared expert
/// `x[m] += σ(gate[m])·shared[m]`.
///
/// # Errors
/// Where the lengths do not agree or the operands overlap.
#[expect(unsafe_code, reason = "a launch")]
pub fn moe_weighted_acc<D: Device>(
    device: &D,
    x: Slice<'_, f32>,
    y: Slice<'_, f32>,
    weights: Slice<'_, f32>,
    shared: Option<SharedOut<'_>>,
    n_used: u32,
    cols: u32,
) -> Result<u64> {
    let check = Check("moe_weighted_acc");
    check.that("x", cols > 0 && x.len().is_multiple_of(cols as usize), "is not whole rows")?;
    let rows = x.len() / cols as usize;
    check.that("weights", n_used > 0, "of no experts")?;
    check.that("weights", weights.len() == rows * n_used as usize, "has not n_used elements a row")?;
    check.that("y", y.len() == weights.len() * cols as usize, "has not n_used rows a row of x")?;
    let (shared_y, gate) = (shared.map(|shared| shared.y), shared.and_then(|shared| shared.gate));
    check.that("shared", shared_y.is_none_or(|y| y.len() == x.len()), "has not the rows of x")?;
    check.that("gate", gate.is_none_or(|gate| gate.len() == rows), "has not an element for each row")?;
    device.check_owner(x)?;
    for slice in [y, weights].into_iter().chain(shared_y).chain(gate) {
        device.check_owner(slice)?;
        check.apart("x", x, slice)?;
    }
    let Ok(grid_rows) = u32::try_from(rows) else { return check.fail("x", "has too many rows") };
    check.grid_yz("x", grid_rows)?;
    if rows > 0 {
        let launch = Launch::grid([cols.div_ceil(moe::THREADS), grid_rows, 1], moe::THREADS).dependent();
        let float = |slice: Option<Slice<'_, f32>>| slice.map_or(std::ptr::null(), Slice::ptr);
        let args = (x.ptr_mut(), y.ptr(), weights.ptr(), float(shared_y), float(gate), n_used, cols);
        // SAFETY: lengths and overlap were checked above; the grid covers every element of `x`; the kernel waits for the
        // grid ahead before it reads.
        unsafe { device.launch(moe::moe_weighted_acc, launch, args)? };
    }
    Ok(8 * x.len() as u64 + 4 * (y.len() + shared_y.map_or(0, Slice::len)) as u64)
}
