//! Launcher of `feed`.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::feed as kernels;

use super::{Check, Result};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

pub use kernels::NOT_FED;

/// The metadata of a batch that [`feed`] brings up to date.
#[derive(Clone, Copy, Debug)]
pub struct Fed<'a> {
    /// Token of every row.
    pub tokens: Slice<'a, u32>,
    /// Position of every row.
    pub pos: Slice<'a, u32>,
    /// First position of every span.
    pub start: Slice<'a, u32>,
    /// For every row, the element of `chosen` that is its token, or [`NOT_FED`].
    pub from: Slice<'a, u32>,
    /// One word: whether positions are those of this step already.
    pub fresh: Slice<'a, u32>,
}

/// Gives rows the tokens that the step before chose; see [`gpu_kernels::kernels::feed`]. A dependent launch, which
/// waits for what is ahead of it.
///
/// # Errors
/// Where the lengths do not agree or the operands overlap.
///
/// # Safety
/// The elements of `batch.from` are [`NOT_FED`] or below `chosen.len()`.
#[expect(unsafe_code, reason = "a launch, and indices in device memory")]
pub unsafe fn feed<D: Device>(device: &D, batch: &Fed<'_>, chosen: Slice<'_, u32>) -> Result<u64> {
    let check = Check("feed");
    let Fed { tokens, pos, start, from, fresh } = *batch;
    let rows = tokens.len();
    check.that("pos", pos.len() == rows, "has not one element a row")?;
    check.that("from", from.len() == rows, "has not one element a row")?;
    check.that("fresh", fresh.len() == 1, "is not one word")?;
    let operands =
        [("tokens", tokens), ("pos", pos), ("start", start), ("from", from), ("fresh", fresh), ("chosen", chosen)];
    for (i, (name, operand)) in operands.into_iter().enumerate() {
        device.check_owner(operand)?;
        operands[..i].iter().try_for_each(|(_, other)| check.apart(name, operand, *other))?;
    }
    let (Ok(n_rows), Ok(n_spans)) = (u32::try_from(rows), u32::try_from(start.len())) else {
        return check.fail("tokens", "has too many rows");
    };
    check.that("tokens", n_rows.max(n_spans) <= u32::MAX - kernels::THREADS, "has too many rows")?;
    let (tokens, pos, start, fresh) = (tokens.ptr_mut(), pos.ptr_mut(), start.ptr_mut(), fresh.ptr_mut());
    let args = (tokens, pos, start, from.ptr(), fresh, chosen.ptr(), n_rows, n_spans);
    // SAFETY: lengths and overlap were checked above, the indices are the caller's promise.
    unsafe { device.launch(kernels::feed, Launch::linear(1, kernels::THREADS).dependent(), args)? };
    Ok(4 * (5 * rows as u64 + 2 * u64::from(n_spans) + 2))
}
