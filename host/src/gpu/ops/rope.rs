//! Launcher of `rope`.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::rope as kernels;
use gpu_kernels::kernels::rope::RopeParams;

use super::{Check, Result};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// Turns a position in units of 2⁻⁶⁴, for each of a rope's frequencies in radians a position.
///
/// The fractional part alone matters: the kernel's product wraps at whole turns.
pub fn turns(inv_freq: impl IntoIterator<Item = f64>) -> Vec<u64> {
    /// 2⁶⁴.
    const UNITS: f64 = 18_446_744_073_709_551_616.0;
    // `as` saturates, and the fraction is below 1 even where it rounds up to 2⁶⁴ − 1.
    inv_freq.into_iter().map(|radians| ((radians / std::f64::consts::TAU).rem_euclid(1.0) * UNITS) as u64).collect()
}

/// Rotates the heads of `x`, `[pos.len(), n_head, head_dim]`, in place.
///
/// # Errors
/// Where the lengths do not agree.
#[expect(unsafe_code, reason = "a launch")]
pub fn rope<D: Device>(
    device: &D,
    x: Slice<'_, f32>,
    pos: Slice<'_, u32>,
    turns: Slice<'_, u64>,
    p: RopeParams,
) -> Result<u64> {
    let check = Check("rope");
    device.check_owner(x)?;
    device.check_owner(pos)?;
    device.check_owner(turns)?;
    check.that("n_rot", p.n_rot.is_multiple_of(2) && p.n_rot <= p.head_dim, "is odd or larger than a head")?;
    check.that("turns", turns.len() == p.n_rot as usize / 2, "has not one frequency a pair")?;
    let cols = u64::from(p.n_head) * u64::from(p.head_dim);
    check.that("x", x.len() as u64 == (pos.len() as u64).saturating_mul(cols), "is not one row a position")?;
    let Ok(rows) = u32::try_from(pos.len()) else { return check.fail("pos", "too many") };
    check.grid_yz("pos", rows)?;
    let pairs = u64::from(p.n_head) * u64::from(p.n_rot) / 2;
    let Ok(pairs) = u32::try_from(pairs) else { return check.fail("x", "has too many pairs in a row") };
    if rows > 0 && pairs > 0 {
        let launch = Launch::grid([pairs.div_ceil(kernels::THREADS), rows, 1], kernels::THREADS);
        // SAFETY: lengths were checked above; the grid covers every pair of every row.
        unsafe { device.launch(kernels::rope, launch, (x.ptr_mut(), pos.ptr(), turns.ptr(), p))? };
    }
    Ok(u64::from(rows) * u64::from(pairs) * 16)
}
