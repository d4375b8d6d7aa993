//! Launchers of the gated norm after a delta net.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::ssm_gated_norm;

use crate::gpu::device::Device;
use crate::gpu::memory::Slice;
use crate::gpu::ops::{Check, Q8, Result};

/// `x = rms_norm(x, w)·SiLU(z)` for every head of `w.len()` dimensions.
///
/// # Errors
/// Where the lengths do not agree or the operands overlap.
#[expect(unsafe_code, reason = "a launch")]
pub fn ssm_gated_norm<D: Device>(
    device: &D,
    x: Slice<'_, f32>,
    z: Slice<'_, f32>,
    w: Slice<'_, f32>,
    eps: f32,
) -> Result<u64> {
    let heads = check_gated_norm(Check("ssm_gated_norm"), device, x, z, w)?;
    if heads > 0 {
        let blocks = heads.div_ceil(ssm_gated_norm::HEADS_PER_BLOCK);
        let args = (x.ptr_mut(), z.ptr(), w.ptr(), eps, w.len() as u32, heads);
        // SAFETY: lengths and overlap were checked above; a warp a head.
        unsafe {
            device.launch(ssm_gated_norm::ssm_gated_norm, Launch::linear(blocks, ssm_gated_norm::THREADS), args)?;
        }
    }
    Ok(12 * x.len() as u64)
}

/// [`ssm_gated_norm`] whose result also goes to `q8` as [`quantize_q8`](crate::gpu::ops::quantize_q8()) gives it.
///
/// # Errors
/// As there, and where heads are no multiple of 32.
#[expect(unsafe_code, reason = "a launch")]
pub fn ssm_gated_norm_q8<D: Device>(
    device: &D,
    x: Slice<'_, f32>,
    z: Slice<'_, f32>,
    w: Slice<'_, f32>,
    q8: Q8<'_>,
    eps: f32,
) -> Result<u64> {
    let check = Check("ssm_gated_norm_q8");
    let heads = check_gated_norm(check, device, x, z, w)?;
    check.that("w", w.len().is_multiple_of(32), "is no multiple of 32")?;
    check.that("q8", q8.cols > 0 && x.len().is_multiple_of(q8.cols as usize), "does not divide x into rows")?;
    for (name, slice) in [("x", x), ("z", z), ("w", w)] {
        check.aligned(name, slice, 16)?;
    }
    q8.check_output(check, device, (x.len() / q8.cols as usize) as u64, &[x, z, w])?;
    if heads > 0 {
        let blocks = heads.div_ceil(ssm_gated_norm::HEADS_PER_BLOCK);
        let launch = Launch::linear(blocks, ssm_gated_norm::THREADS).dependent();
        let (qs, d, s) = (q8.qs.ptr_mut(), q8.d.ptr_mut(), q8.s.ptr_mut());
        let args = (x.ptr_mut(), z.ptr(), w.ptr(), qs, d, s, eps, w.len() as u32, heads);
        // SAFETY: lengths, alignment and overlap were checked above; a warp a head; the kernel waits for the grid
        // ahead before it reads.
        unsafe { device.launch(ssm_gated_norm::ssm_gated_norm_q8, launch, args)? };
    }
    Ok(12 * x.len() as u64 + Q8::bytes(x.len() as u64))
}

/// Checks the operands and returns the number of heads in all rows.
fn check_gated_norm<D: Device>(
    check: Check,
    device: &D,
    x: Slice<'_, f32>,
    z: Slice<'_, f32>,
    w: Slice<'_, f32>,
) -> Result<u32> {
    check.that("w", !w.is_empty() && x.len().is_multiple_of(w.len()), "does not divide x into heads")?;
    check.that("z", z.len() == x.len(), "has another length than x")?;
    for slice in [x, z, w] {
        device.check_owner(slice)?;
    }
    check.apart("x", x, z)?;
    check.apart("x", x, w)?;
    let heads = x.len() / w.len();
    // A lane's number, 32·head + lane, has to fit 32 bits.
    check.that("x", heads < 1 << 26, "has too many heads")?;
    Ok(heads as u32)
}
