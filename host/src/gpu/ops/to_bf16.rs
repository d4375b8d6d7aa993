//! Launcher of `to_bf16`.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::to_bf16::{self as kernels, LANE_ELEMS, ToBf16Params};
use gpu_kernels::params::FLAT_BLOCK;

use super::{Check, Result};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// Activations `[rows, cols]` as bf16, in the order of [`gpu_kernels::kernels::to_bf16`].
#[derive(Clone, Copy, Debug)]
pub struct Bf16<'a> {
    /// `[rows, cols]`.
    pub x: Slice<'a, u16>,
    /// Elements of a row, a multiple of 16.
    pub cols: u32,
}

impl Bf16<'_> {
    /// Checks that there are `n_rows` rows, as the kernels want them.
    pub(super) fn check<D: Device>(&self, check: Check, device: &D, n_rows: u64) -> Result<()> {
        let cols = u64::from(self.cols);
        check.that("x", self.cols.is_multiple_of(16), "columns are no multiple of 16")?;
        check.rows("x", self.x, n_rows, cols, cols)?;
        check.aligned("x", self.x, 16)?;
        Ok(device.check_owner(self.x)?)
    }
}

/// Rounds `rows` rows of `x`, which are `x_stride` elements apart.
///
/// # Errors
/// Where a shape, an alignment or an overlap is not as [`gpu_kernels::kernels::to_bf16`] asks.
#[expect(unsafe_code, reason = "a launch")]
pub fn to_bf16<D: Device>(device: &D, x: Slice<'_, f32>, x_stride: u32, out: Bf16<'_>, rows: u32) -> Result<u64> {
    let check = Check("to_bf16");
    let cols = out.cols;
    if rows == 0 || cols == 0 {
        return Ok(0);
    }
    check.grid_yz("rows", rows)?;
    out.check(check, device, u64::from(rows))?;
    device.check_owner(x)?;
    check.rows("x", x, u64::from(rows), u64::from(x_stride), u64::from(cols))?;
    check.that("x", x_stride.is_multiple_of(4), "stride is no multiple of 4")?;
    check.aligned("x", x, 16)?;
    check.apart("y", out.x, x)?;
    let launch = Launch::grid([cols.div_ceil(FLAT_BLOCK * LANE_ELEMS), rows, 1], FLAT_BLOCK).dependent();
    let args = (x.ptr(), out.x.ptr_mut().cast(), ToBf16Params { cols, x_stride });
    // SAFETY: shapes, strides, alignment and overlap were checked above; the grid covers the columns; the kernel
    // waits for the grid ahead before it reads.
    unsafe { device.launch(kernels::to_bf16, launch, args)? };
    Ok(u64::from(rows) * u64::from(cols) * (4 + 2))
}
