//! Launcher of `rms_norm`.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::rms_norm as kernels;

use super::{Check, Q8, Result};
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
    let rows = check_rms_norm(Check("rms_norm"), device, x, w, y)?;
    if rows > 0 {
        let launch = Launch::linear(rows, kernels::RMS_NORM_THREADS).shared(kernels::RMS_NORM_SHARED_BYTES);
        // SAFETY: lengths, alignment and overlap were checked above; a block a row.
        unsafe { device.launch(kernels::rms_norm, launch, (x.ptr(), w.ptr(), y.ptr_mut(), w.len() as u32, eps))? };
    }
    Ok(8 * x.len() as u64 + 4 * w.len() as u64)
}

/// [`rms_norm`] whose result also goes to `q8` as [`quantize_q8`](super::quantize_q8()) gives it.
///
/// # Errors
/// As there.
#[expect(unsafe_code, reason = "a launch")]
pub fn rms_norm_q8<D: Device>(
    device: &D,
    x: Slice<'_, f32>,
    w: Slice<'_, f32>,
    y: Slice<'_, f32>,
    q8: Q8<'_>,
    eps: f32,
) -> Result<u64> {
    let check = Check("rms_norm_q8");
    let rows = check_rms_norm(check, device, x, w, y)?;
    let n = w.len() as u32;
    check.that("q8", q8.cols == n, "has another number of columns")?;
    q8.check_output(check, device, u64::from(rows), &[x, w, y])?;
    if rows > 0 {
        let launch = Launch::linear(rows, kernels::RMS_NORM_THREADS).shared(kernels::RMS_NORM_SHARED_BYTES);
        let (qs, d, s) = (q8.qs.ptr_mut(), q8.d.ptr_mut(), q8.s.ptr_mut());
        let args = (x.ptr(), w.ptr(), y.ptr_mut(), qs, d, s, n, eps);
        // SAFETY: lengths, alignment and overlap were checked above; a block a row; the kernel waits for the
        // grid ahead before it reads.
        unsafe { device.launch(kernels::rms_norm_q8, launch.dependent(), args)? };
    }
    Ok(8 * x.len() as u64 + 4 * w.len() as u64 + Q8::bytes(x.len() as u64))
}

/// `x += r`, then `y` = [`rms_norm`] of the new `x`.
///
/// # Errors
/// As there.
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
    let rows = check_rms_norm(check, device, x, w, y)?;
    device.check_owner(r)?;
    check.that("r", r.len() == x.len(), "has another number of elements than x")?;
    check.aligned("r", r, 16)?;
    check.apart("x", x, r)?;
    check.apart("x", x, w)?;
    check.apart("y", y, x)?;
    check.apart("y", y, r)?;
    if rows > 0 {
        let launch = Launch::linear(rows, kernels::RMS_NORM_THREADS).shared(kernels::RMS_NORM_SHARED_BYTES);
        let args = (x.ptr_mut(), r.ptr(), w.ptr(), y.ptr_mut(), w.len() as u32, eps);
        // SAFETY: lengths, alignment and overlap were checked above; a block a row.
        unsafe { device.launch(kernels::rms_norm_add, launch, args)? };
    }
    Ok(16 * x.len() as u64 + 4 * w.len() as u64)
}

/// Checks the operands and returns the number of rows.
fn check_rms_norm<D: Device>(
    check: Check,
    device: &D,
    x: Slice<'_, f32>,
    w: Slice<'_, f32>,
    y: Slice<'_, f32>,
) -> Result<u32> {
    let n = w.len();
    check.that(
        "w",
        n > 0 && n.is_multiple_of(4) && n <= u32::MAX as usize,
        "has no positive multiple of 4 elements",
    )?;
    check.that("x", x.len().is_multiple_of(n), "is not whole rows")?;
    check.that("y", y.len() == x.len(), "has another number of elements than x")?;
    check.that("y", y.address() == x.address() || !y.overlaps(x), "overlaps x in part")?;
    check.apart("y", y, w)?;
    for (name, slice) in [("x", x), ("w", w), ("y", y)] {
        device.check_owner(slice)?;
        check.aligned(name, slice, 16)?;
    }
    let rows = x.len() / n;
    match i32::try_from(rows) {
        Ok(rows) => Ok(rows as u32),
        Err(_) => check.fail("x", format!("{rows} rows are more than a grid has")),
    }
}
