//! Launcher of `read_sweep`.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::read_sweep as kernels;
use gpu_kernels::params::{READ_SWEEP_BLOCK, READ_SWEEP_LOADS, WARP};

use super::{Check, Result};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// Reads all of `x` and writes a checksum a warp to `sums`.
///
/// # Errors
/// Where `x` is empty, not whole 16-byte words or too large, or `sums` too small.
#[expect(unsafe_code, reason = "a launch")]
pub fn read_sweep<D: Device>(device: &D, x: Slice<'_, u8>, sums: Slice<'_, u32>) -> Result<u64> {
    let check = Check("read_sweep");
    device.check_owner(x)?;
    device.check_owner(sums)?;
    check.aligned("x", x, 16)?;
    check.that("x", !x.is_empty() && x.len().is_multiple_of(16), "not whole 16-byte words")?;
    let words = u32::try_from(x.len() / 16).ok().filter(|n| *n <= u32::MAX / 2);
    let Some(words) = words else { return check.fail("x", "too large") };
    let blocks = words.div_ceil(READ_SWEEP_BLOCK * READ_SWEEP_LOADS);
    check.rows("sums", sums, 1, u64::MAX, u64::from(blocks * (READ_SWEEP_BLOCK / WARP)))?;
    check.apart("sums", sums, x)?;
    let args = (x.ptr().cast(), sums.ptr_mut(), words);
    // SAFETY: sizes and alignment were checked above.
    unsafe { device.launch(kernels::read_sweep, Launch::linear(blocks, READ_SWEEP_BLOCK), args)? };
    Ok(x.len() as u64)
}
