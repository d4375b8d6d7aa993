//! Launchers of `rms_norm` and `rms_norm_add`.

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
    let rows = check_rows(check, device, w, &[("x", x), ("y", y)])?;
    check.that("y", y.address() == x.address() || !y.overlaps(x), "overlaps x in part")?;
    check.apart("y", y, w)?;
    if rows > 0 {
        let args = (x.ptr(), w.ptr(), y.ptr_mut(), w.len() as u32, eps);
        // SAFETY: lengths, alignment and overlap were checked above; a block a row.
        unsafe { device.launch(kernels::rms_norm, launch(rows), args)? };
    }
    Ok(8 * x.len() as u64 + 4 * w.len() as u64)
}

/// `x += r`, then `y` = [`rms_norm`] of the new `x`.
///
/// # Errors
/// Where a shape or an alignment is not as [`gpu_kernels::kernels::rms_norm`] asks.
#[expect(unsafe_code, reason = "a launch")]
pub fn rms_norm_add<D: Device>(
    device: &D,
    x: Slice<'_, f32>,
    r: Slice<'_, f32>,
    w: Slice<'_, f32>,
    y: Slice<'_, f32>,
    eps: f32,
) -> Result<u64> {
    let check = Check("rms_norm_add");
    let rows = check_rows(check, device, w, &[("x", x), ("r", r), ("y", y)])?;
    check.apart("x", x, r)?;
    check.apart("x", x, w)?;
    check.apart("y", y, x)?;
    check.apart("y", y, r)?;
    check.apart("y", y, w)?;
    if rows > 0 {
        let args = (x.ptr_mut(), r.ptr(), w.ptr(), y.ptr_mut(), w.len() as u32, eps);
        // SAFETY: lengths, alignment and overlap were checked above; a block a row.
        unsafe { device.launch(kernels::rms_norm_add, launch(rows), args)? };
    }
    Ok(16 * x.len() as u64 + 4 * w.len() as u64)
}

fn launch(rows: u32) -> Launch {
    Launch::linear(rows, kernels::RMS_NORM_THREADS).shared(kernels::RMS_NORM_SHARED_BYTES)
}

/// Checks that the operands are the same number of rows of `w.len()` elements, and returns that number.
fn check_rows<D: Device>(
    check: Check,
    device: &D,
    w: Slice<'_, f32>,
    operands: &[(&'static str, Slice<'_, f32>)],
) -> Result<u32> {
    let n = w.len();
    check.that(
        "w",
        n > 0 && n.is_multiple_of(4) && n <= u32::MAX as usize,
        "has no positive multiple of 4 elements",
    )?;
    let len = operands[0].1.len();
    for &(name, slice) in operands.iter().chain(&[("w", w)]) {
        device.check_owner(slice)?;
        check.aligned(name, slice, 16)?;
    }
    for &(name, slice) in operands {
        check.that(name, slice.len() == len, "has another number of elements than x")?;
        check.that(name, slice.len().is_multiple_of(n), "is not whole rows")?;
    }
    match i32::try_from(len / n) {
        Ok(rows) => Ok(rows as u32),
        Err(_) => check.fail("x", format!("{} rows are more than a grid has", len / n)),
    }
}
