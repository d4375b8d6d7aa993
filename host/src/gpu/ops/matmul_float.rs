//! Launcher of `matmul_f32`, `matmul_f16` and `matmul_bf16`.

use cuda_std::launch::Launch;
use gpu_kernels::blocks::GgmlType;
use gpu_kernels::kernels::matmul_float::{
    self as kernels, FEW_ROWS, FEW_THREADS, FEW_TOKENS, MatmulFloatParams, ROWS, SHARED_BYTES, THREADS, TOKENS,
};

use super::{Check, Matvec, OpError, Result};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// Tokens from which on they are taken in tiles of 64: fewer would leave most of a tile idle.
const TILE_MIN_TOKENS: u32 = 48;

/// The dense product of float weights with f32 activations, whose rows are `x_stride` elements apart, for
/// several tokens at a time.
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
    let few = op.tokens < TILE_MIN_TOKENS;
    let launch = if few {
        Launch::grid([w.rows().div_ceil(FEW_ROWS), op.tokens.div_ceil(FEW_TOKENS), 1], FEW_THREADS)
    } else {
        let grid = [op.tokens.div_ceil(TOKENS), w.rows().div_ceil(ROWS), 1];
        Launch::grid(grid, THREADS).shared(SHARED_BYTES)
    };
    check.grid_yz("w", launch.grid[1])?;
    let params = MatmulFloatParams {
        rows: w.rows(),
        cols: w.cols(),
        tokens: op.tokens,
        x_stride,
        y_stride: op.y_stride,
        accumulate: u32::from(op.accumulate),
    };
    let (_, bias) = op.optional();
    let launch = Launch { pdl: op.dependent && device.properties().capability >= (9, 0), ..launch };
    let args = (w.data().ptr(), x.ptr(), op.y.ptr_mut(), bias, params);
    macro_rules! launch {
        ($($ty:ident: $many:ident $few:ident),+) => {
            match (w.ty(), few) {
                $(
                    // SAFETY: `Matrix` has checked the weights, `Matvec::check` and the lines above the other
                    // operands; the grid covers rows and tokens, of which there are some.
                    (GgmlType::$ty, false) => unsafe { device.launch(kernels::$many, launch, args)? },
                    // SAFETY: as above.
                    (GgmlType::$ty, true) => unsafe { device.launch(kernels::$few, launch, args)? },
                )+
                (ty, _) => return Err(OpError::Type { op: "matmul_float", ty }),
            }
        };
    }
    launch!(F32: matmul_f32 matmul_f32_few, F16: matmul_f16 matmul_f16_few, Bf16: matmul_bf16 matmul_bf16_few);
    let (rows, cols, y_bytes) = (u64::from(w.rows()), u64::from(w.cols()), if op.accumulate { 8 } else { 4 });
    Ok(rows * w.row_bytes() + x_rows * (4 * cols + y_bytes * rows))
}
