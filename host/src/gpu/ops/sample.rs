//! Launcher of `sample`.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::sample::{self as kernels, SHARED_BYTES, SampleParams, THREADS};

use super::{Check, Result};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// The longest row: a count of its tokens is exact in f32.
const MAX_VOCAB: u32 = 1 << 24;

/// Draws a token for every row of `logits`, `[token.len(), n]`; see [`gpu_kernels::kernels::sample`].
///
/// # Errors
/// Where the lengths do not agree or the operands overlap.
#[expect(unsafe_code, reason = "a launch")]
pub fn sample<D: Device>(
    device: &D,
    logits: Slice<'_, f32>,
    params: Slice<'_, SampleParams>,
    token: Slice<'_, u32>,
    n: u32,
) -> Result<u64> {
    let check = Check("sample");
    let rows = token.len();
    check.that("logits", (1..=MAX_VOCAB).contains(&n), "has rows of 0 or more than 2^24 elements")?;
    check.that("logits", logits.len() == rows.saturating_mul(n as usize), "has not n elements a row")?;
    check.that("params", params.len() == rows, "has not one element a row")?;
    device.check_owner(logits)?;
    device.check_owner(params)?;
    device.check_owner(token)?;
    check.apart("token", token, logits)?;
    check.apart("token", token, params)?;
    let Ok(blocks) = i32::try_from(rows) else { return check.fail("token", "has more rows than a grid has") };
    if rows > 0 {
        let launch = Launch::linear(blocks as u32, THREADS).shared(SHARED_BYTES);
        // SAFETY: lengths and overlap were checked above; a block a row.
        unsafe { device.launch(kernels::sample, launch, (logits.ptr(), params.ptr(), token.ptr_mut(), n))? };
    }
    Ok(4 * logits.len() as u64)
}
