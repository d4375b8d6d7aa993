//! Launcher of `rms_norm`.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::rms_norm as kernels;

use super::{Check, Result};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// `y[t] = w·x[t]/√(mean(x[t]²) + eps)` for the rows of `x`, `[rows, w.len()]`; `y` may be `x`.
///
/// # Errors
/// Where a shape or an alignment is not as [`gpu_kernels::kernels::rms_norm`] asks.
#[expect(unsafe_code, reason = "a launch")]
pub fn rms_norm<D: Device>(
    device: &D,
    x: Slice<'_, f32>,
    w: Slice<'_, f32>,
    y: Slice<'_, f32>,
    eps: f32,
) -> Result<u64> {
    let check = Check("rms_norm");
    let n = w.len();
    check.that("w", n > 0 && n.is_multiple_of(4) && n <= u32::MAX as usize, "has no positive multiple of 4 elements")?;
    check.that("x", x.len().is_multiple_of(n), "is not whole rows")?;
    check.that("y", y.len() == x.len(), "has another number of elements than x")?;
    check.that("y", y.address() == x.address() || !y.overlaps(x), "overlaps x in part")?;
    check.apart("y", y, w)?;
    for (name, slice) in [("x", x), ("w", w), ("y", y)] {
        device.check_owner(slice)?;
        check.aligned(name, slice, 16)?;
    }
    let rows = x.len() / n;
    let Ok(blocks) = i32::try_from(rows) else { return check.fail("x", format!("{rows} rows are more than a grid has")) };
    if rows > 0 {
        let launch =
            Launch::linear(blocks as u32, kernels::RMS_NORM_THREADS).shared(kernels::RMS_NORM_SHARED_BYTES);
        // SAFETY: lengths, alignment and overlap were checked above; a block a row.
        unsafe { device.launch(kernels::rms_norm, launch, (x.ptr(), w.ptr(), y.ptr_mut(), n as u32, eps))? };
    }
    Ok(8 * x.len() as u64 + 4 * n as u64)
}
