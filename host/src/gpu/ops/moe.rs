//! Launchers of the router and of joining the experts' outputs.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::moe;
use gpu_kernels::kernels::softmax_topk::{self, MAX_EXPERTS, MAX_USED, ROWS_PER_BLOCK, SoftmaxTopkParams};

use super::{Check, Result};
use crate::backend::RouterRule;
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

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
    if rows > 0 {
        let p = SoftmaxTopkParams {
            rows: rows as u32,
            n_expert,
            n_used,
            over_all: u32::from(rule == RouterRule::SoftmaxAll),
        };
        let launch = Launch::linear((rows as u32).div_ceil(ROWS_PER_BLOCK), softmax_topk::THREADS).dependent();
        let bias = bias.map_or(std::ptr::null(), Slice::ptr);
        // SAFETY: lengths were checked above; a warp a row; the kernel waits for the grid ahead before it reads.
        unsafe {
            let args = (logits.ptr(), bias, ids.ptr_mut(), weights.ptr_mut(), p);
            device.launch(softmax_topk::softmax_topk, launch, args)?;
        }
    }
    Ok(4 * logits.len() as u64 + 8 * ids.len() as u64)
}

/// `x[m] += Σ_j weights[m, j]·y[m·n_used + j]`, rows of `cols` elements.
///
/// # Errors
/// Where the lengths do not agree or the operands overlap.
#[expect(unsafe_code, reason = "a launch")]
pub fn moe_weighted_acc<D: Device>(
    device: &D,
    x: Slice<'_, f32>,
    y: Slice<'_, f32>,
    weights: Slice<'_, f32>,
    n_used: u32,
    cols: u32,
) -> Result<u64> {
    let check = Check("moe_weighted_acc");
    check.that("x", cols > 0 && x.len().is_multiple_of(cols as usize), "is not whole rows")?;
    let rows = x.len() / cols as usize;
    check.that("weights", weights.len() == rows * n_used as usize, "has not n_used elements a row")?;
    check.that("y", y.len() == weights.len() * cols as usize, "has not n_used rows a row of x")?;
    for slice in [x, y, weights] {
        device.check_owner(slice)?;
    }
    check.apart("x", x, y)?;
    check.apart("x", x, weights)?;
    let Ok(grid_rows) = u32::try_from(rows) else { return check.fail("x", "has too many rows") };
    check.grid_yz("x", grid_rows)?;
    if rows > 0 {
        let launch = Launch::grid([cols.div_ceil(moe::THREADS), grid_rows, 1], moe::THREADS);
        let args = (x.ptr_mut(), y.ptr(), weights.ptr(), n_used, cols);
        // SAFETY: lengths and overlap were checked above; the grid covers every element of `x`.
        unsafe { device.launch(moe::moe_weighted_acc, launch, args)? };
    }
    Ok(8 * x.len() as u64 + 4 * y.len() as u64)
}
