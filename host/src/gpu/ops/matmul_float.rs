//! Launcher of `matmul_f32`, `matmul_f16` and `matmul_bf16`.

use cuda_std::launch::Launch;
use gpu_kernels::blocks::GgmlType;
use gpu_kernels::kernels::matmul_float::{self as kernels, MatmulFloatParams, ROWS, SHARED_BYTES, THREADS, TOKENS};

use super::{Check, Matvec, OpError, Result};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// The dense product of float weights with f32 activations, whose rows are `x_stride` elements apart, in tiles.
///
/// # Errors
/// As [`matvec`](super::matvec); [`OpError::Type`] for quantised weights.
#[expect(unsafe_code, reason = "a launch")]
pub fn matmul_float<D: Device>(device: &D, op: &Matvec<'_>, x: Slice<'_, f32>, x_stride: u32) -> Result<u64> {
    let check = Check("matmul_float");
    if op.tokens == 0 {
        return Ok(0);
    }
    check.that("ids", op.experts.is_none(), "there are no such tiles for experts")?;
    let x_rows = op.check(check, device)?;
    let w = op.w;
    device.check_owner(x)?;
    check.rows("x", x, x_rows, u64::from(x_stride), u64::from(w.cols()))?;
    check.that("x", x_stride.is_multiple_of(4), "stride is no multiple of 4")?;
    check.aligned("x", x, 16)?;
    check.apart("y", op.y, x)?;
    let blocks = w.rows().div_ceil(ROWS);
    check.grid_yz("w", blocks)?;
    let params = MatmulFloatParams {
        rows: w.rows(),
        cols: w.cols(),
        tokens: op.tokens,
        x_stride,
        y_stride: op.y_stride,
        accumulate: u32::from(op.accumulate),
    };
    let (_, bias) = op.optional();
    let launch = Launch::grid([op.tokens.div_ceil(TOKENS), blocks, 1], THREADS).shared(SHARED_BYTES);
    let launch = Launch { pdl: op.dependent && device.properties().capability >= (9, 0), ..launch };
    let args = (w.data().ptr(), x.ptr(), op.y.ptr_mut(), bias, params);
    match w.ty() {
        // SAFETY: `Matrix` has checked the weights, `Matvec::check` and the lines above the other operands; the grid
        // covers rows and tokens, of which there are some.
        GgmlType::F32 => unsafe { device.launch(kernels::matmul_f32, launch, args)? },
        // SAFETY: as above.
        GgmlType::F16 => unsafe { device.launch(kernels::matmul_f16, launch, args)? },
        // SAFETY: as above.
        GgmlType::Bf16 => unsafe { device.launch(kernels::matmul_bf16, launch, args)? },
        ty => return Err(OpError::Type { op: "matmul_float", ty }),
    }
    let (rows, cols, y_bytes) = (u64::from(w.rows()), u64::from(w.cols()), if op.accumulate { 8 } else { 4 });
    Ok(rows * w.row_bytes() + x_rows * (4 * cols + y_bytes * rows))
}
