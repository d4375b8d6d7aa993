//! Launcher of `quantize_q8`.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::quantize_q8 as kernels;
use gpu_kernels::params::{FLAT_BLOCK, Q8_BLOCK, Q8_COLS, QUANTIZE_Q8_LANE_ELEMS, QuantizeQ8Params};

use super::{Check, Result};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// Quantised activations `[rows, cols]`: `x[i] ≈ d[i / 16]·qs[i]`, and `s[i / 16] = d·Σ qs` over 16.
#[derive(Clone, Copy, Debug)]
pub struct Q8<'a> {
    /// `[rows, cols]`.
    pub qs: Slice<'a, i8>,
    /// `[rows, cols/16]`.
    pub d: Slice<'a, f32>,
    /// `[rows, cols/16]`.
    pub s: Slice<'a, f32>,
    /// Elements of a row, a multiple of 32.
    pub cols: u32,
}

impl Q8<'_> {
    /// Checks that there are `n_rows` rows, as the kernels want them.
    pub(super) fn check<D: Device>(&self, check: Check, device: &D, n_rows: u64) -> Result<()> {
        check.that("qs", self.cols.is_multiple_of(Q8_COLS), "columns are no multiple of 32")?;
        let per = |elems: u32| u64::from(self.cols / elems);
        check.rows("qs", self.qs, n_rows, per(1), per(1))?;
        check.rows("d", self.d, n_rows, per(Q8_BLOCK), per(Q8_BLOCK))?;
        check.rows("s", self.s, n_rows, per(Q8_BLOCK), per(Q8_BLOCK))?;
        check.aligned("qs", self.qs, 16)?;
        device.check_owner(self.qs)?;
        device.check_owner(self.d)?;
        Ok(device.check_owner(self.s)?)
    }
}

impl Q8<'_> {
    /// As [`Q8::check`], for a kernel that writes it.
    pub(super) fn check_output<D: Device>(
        &self,
        check: Check,
        device: &D,
        n_rows: u64,
        others: &[Slice<'_, f32>],
    ) -> Result<()> {
        self.check(check, device, n_rows)?;
        for other in others {
            check.apart("qs", self.qs, *other)?;
            check.apart("d", self.d, *other)?;
            check.apart("s", self.s, *other)?;
        }
        let overlap = self.qs.overlaps(self.d) || self.qs.overlaps(self.s) || self.d.overlaps(self.s);
        check.that("qs", !overlap, "outputs overlap")
    }

    /// Bytes of `n` elements: one each, a scale and a sum for 16.
    pub(super) fn bytes(n: u64) -> u64 {
        n * 3 / 2
    }
}

/// Quantises `rows` rows of `x`, which are `x_stride` elements apart.
///
/// # Errors
/// Where a shape, an alignment or an overlap is not as [`gpu_kernels::kernels::quantize_q8`] asks.
#[expect(unsafe_code, reason = "a launch")]
pub fn quantize_q8<D: Device>(device: &D, x: Slice<'_, f32>, x_stride: u32, out: Q8<'_>, rows: u32) -> Result<u64> {
    let check = Check("quantize_q8");
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
    check.apart("qs", out.qs, x)?;
    check.apart("d", out.d, x)?;
    check.apart("s", out.s, x)?;
    check.that(
        "qs",
        !out.qs.overlaps(out.d) && !out.qs.overlaps(out.s) && !out.d.overlaps(out.s),
        "outputs overlap",
    )?;

    let launch = Launch::grid([cols.div_ceil(FLAT_BLOCK * QUANTIZE_Q8_LANE_ELEMS), rows, 1], FLAT_BLOCK).dependent();
    let params = QuantizeQ8Params { cols, x_stride };
    let args = (x.ptr(), out.qs.ptr_mut(), out.d.ptr_mut(), out.s.ptr_mut(), params);
    // SAFETY: shapes, strides, alignment and overlap were checked above; the grid covers the columns; the kernel
    // waits for the grid ahead before it reads.
    unsafe { device.launch(kernels::quantize_q8, launch, args)? };
    let n = u64::from(rows) * u64::from(cols);
    Ok(4 * n + Q8::bytes(n))
}
