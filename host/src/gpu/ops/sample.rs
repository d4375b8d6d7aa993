//! Launcher of the passes of `sample`.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::sample::{
    self as kernels, BINS, MARKS, MAX_LOGITS, PASSES, SHARE, SHARED_BYTES, SampleParams, SampleState, THREADS,
};

use super::{Check, Result};
use crate::backend::Draw;
use crate::gpu::device::{Device, DeviceError};
use crate::gpu::memory::{Buffer, Slice};

/// What the passes leave for each other. A use leaves it as it found it.
pub struct SampleRoom<D: Device> {
    state: Buffer<D, SampleState>,
    bins: Buffer<D, u64>,
    marks: Buffer<D, u32>,
    part_weight: Buffer<D, u64>,
    part_equal: Buffer<D, u32>,
    rows: usize,
    n: u32,
}

impl<D: Device> SampleRoom<D> {
    /// Room for up to `rows` rows of up to `n` logits.
    ///
    /// # Errors
    /// The device's.
    pub fn new(device: &D, rows: usize, n: u32) -> std::result::Result<Self, DeviceError> {
        let parts = rows.saturating_mul(n.div_ceil(SHARE) as usize);
        Ok(SampleRoom {
            state: device.alloc_zeroed(rows)?,
            bins: device.alloc_zeroed(rows.saturating_mul(BINS as usize))?,
            marks: device.alloc_zeroed(rows.saturating_mul(MARKS))?,
            part_weight: device.alloc(parts)?,
            part_equal: device.alloc(parts)?,
            rows,
            n,
        })
    }

    /// Whether so many rows of so many logits fit.
    pub fn fits(&self, rows: usize, n: u32) -> bool {
        rows <= self.rows && n <= self.n
    }
}

/// A draw as the kernels take it. A temperature so small that its reciprocal is no f32 counts as the smallest.
pub fn sample_params(draw: &Draw) -> SampleParams {
    SampleParams {
        uniform: draw.uniform,
        // 2^64 and more is all: the conversion saturates.
        top_p: (f64::from(draw.top_p) * 2f64.powi(64)) as u64,
        inv_temperature: draw.temperature.recip().clamp(f32::MIN_POSITIVE, f32::MAX),
        min_p: draw.min_p,
        top_k: draw.top_k,
        reserved: 0,
    }
}

/// Draws one of the first `n` tokens for every row of `logits`, `[token.len(), at least n]`; see
/// [`gpu_kernels::kernels::sample`]. The kernels are dependent launches, and wait for what is ahead of them.
///
/// # Errors
/// Where the lengths do not agree or the operands overlap.
#[expect(unsafe_code, reason = "launches")]
pub fn sample<D: Device>(
    device: &D,
    logits: Slice<'_, f32>,
    params: Slice<'_, SampleParams>,
    room: &SampleRoom<D>,
    token: Slice<'_, u32>,
    n: u32,
) -> Result<u64> {
    let check = Check("sample");
    let rows = token.len();
    let stride = logits.len().checked_div(rows).unwrap_or(n as usize);
    check.that("logits", (1..=MAX_LOGITS).contains(&n), "has rows of 0 or more than 2^23 elements")?;
    check.that("logits", stride * rows == logits.len(), "is not whole rows")?;
    check.that("logits", stride >= n as usize, "has not n elements a row")?;
    let Ok(stride) = u32::try_from(stride) else { return check.fail("logits", "has too long rows") };
    check.that("params", params.len() == rows, "has not one element a row")?;
    check.that("room", room.fits(rows, n), "is too small")?;
    device.check_owner(logits)?;
    device.check_owner(params)?;
    device.check_owner(room.marks.slice())?;
    device.check_owner(token)?;
    check.apart("token", token, logits)?;
    check.apart("token", token, params)?;
    let Ok(grid_rows) = u32::try_from(rows) else { return check.fail("token", "has too many rows") };
    check.grid_yz("token", grid_rows)?;
    if rows > 0 {
        let launch = Launch::grid([n.div_ceil(SHARE), grid_rows, 1], THREADS).shared(SHARED_BYTES).dependent();
        let (state, marks) = (room.state.slice(), room.marks.slice());
        for pass in 0..PASSES {
            let bins = room.bins.slice().ptr_mut();
            let args = (logits.ptr(), params.ptr(), state.ptr_mut(), bins, marks.ptr_mut(), n, stride, pass);
            // SAFETY: lengths and overlap were checked above; the room is this call's alone, was zero when it was
            // made, and is left so; each kernel waits for the one ahead before it reads.
            unsafe { device.launch(kernels::sample_search, launch, args)? };
        }
        let (weight, equal) = (room.part_weight.slice().ptr_mut(), room.part_equal.slice().ptr_mut());
        let (logits, params, token) = (logits.ptr(), params.ptr(), token.ptr_mut());
        let args = (logits, params, state.ptr(), weight, equal, marks.ptr_mut(), token, n, stride);
        // SAFETY: as above; the parts have room for every block of every row.
        unsafe { device.launch(kernels::sample_draw, launch, args)? };
    }
    Ok(4 * rows as u64 * u64::from(n))
}
