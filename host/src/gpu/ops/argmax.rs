//! Launchers of the two phases of `argmax`.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::argmax::{self as kernels, SHARED_BYTES, THREADS};

use super::{Check, Result};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// Blocks that share a row: 64 of them read a 1 MB row of logits at full speed.
const MAX_PARTS: u32 = 64;

/// Blocks that share a row of `n` logits: at least four rounds for each lane.
pub fn n_part(n: u32) -> u32 {
    n.div_ceil(4 * THREADS).clamp(1, MAX_PARTS)
}

/// Room between the phases.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// At least `rows·n_part(n)` elements.
    pub value: Slice<'a, f32>,
    /// As many.
    pub index: Slice<'a, u32>,
}

/// `index[m]` = the lowest index of the largest of the first `n` elements of row `m` of `logits`,
/// `[index.len(), at least n]`, or [`NO_INDEX`](kernels::NO_INDEX) where one of them is NaN or +∞.
///
/// # Errors
/// Where the lengths do not agree or the operands overlap.
#[expect(unsafe_code, reason = "a launch")]
pub fn argmax<D: Device>(
    device: &D,
    logits: Slice<'_, f32>,
    parts: Parts<'_>,
    index: Slice<'_, u32>,
    n: u32,
) -> Result<u64> {
    let check = Check("argmax");
    let rows = index.len();
    let stride = logits.len().checked_div(rows).unwrap_or(n as usize);
    check.that("logits", stride * rows == logits.len(), "is not whole rows")?;
    check.that("logits", n > 0 && stride >= n as usize, "has not n elements a row")?;
    let Ok(stride) = u32::try_from(stride) else { return check.fail("logits", "has too long rows") };
    // A lane steps past the end by at most one stride of the whole grid.
    check.that("logits", n <= u32::MAX - THREADS * MAX_PARTS, "has too long rows")?;
    let n_part = n_part(n);
    check.that("parts", parts.value.len() >= rows * n_part as usize, "has too few elements")?;
    check.that("parts", parts.index.len() >= rows * n_part as usize, "has too few elements")?;
    device.check_owner(logits)?;
    device.check_owner(parts.value)?;
    device.check_owner(parts.index)?;
    device.check_owner(index)?;
    check.apart("parts", parts.value, logits)?;
    check.apart("parts", parts.index, logits)?;
    check.apart("index", index, parts.index)?;
    let Ok(grid_rows) = u32::try_from(rows) else { return check.fail("index", "has too many rows") };
    check.grid_yz("index", grid_rows)?;
    if rows > 0 {
        let first = Launch::grid([n_part, grid_rows, 1], THREADS).shared(SHARED_BYTES).dependent();
        let second = Launch::linear(grid_rows, THREADS).shared(SHARED_BYTES).dependent();
        // SAFETY: lengths and overlap were checked above; the second phase reads what the first wrote;
        // each waits for the grid ahead before it reads.
        unsafe {
            let args = (logits.ptr(), parts.value.ptr_mut(), parts.index.ptr_mut(), n, stride);
            device.launch(kernels::argmax_partial, first, args)?;
            let args = (parts.value.ptr(), parts.index.ptr(), index.ptr_mut(), n_part);
            device.launch(kernels::argmax, second, args)?;
        }
    }
    Ok(4 * logits.len() as u64)
}
