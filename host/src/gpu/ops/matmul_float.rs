//! Launchers of `matmul_f32`, `matmul_f16` and `matmul_bf16`, and of their forms for tensor cores.

use cuda_std::launch::Launch;
use gpu_kernels::blocks::GgmlType;
use gpu_kernels::kernels::matmul_float::{
    self as kernels, FEW_ROWS, FEW_SHARED_BYTES, FEW_THREADS, FEW_TOKENS, MatmulFloatParams, ROWS, SHARED_BYTES,
    THREADS, TOKENS,
};
use gpu_kernels::kernels::matmul_split as split;

use super::{Check, Matvec, OpError, Product, Result};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// Tokens from which on they are taken in tiles of 64: fewer would leave most of a tile, or of the device, idle.
const TILE_MIN_TOKENS: u32 = 128;

/// Whether so few tokens are taken at a time that [`matmul_float`] may take a second matrix beside.
pub fn takes_beside(tokens: u32) -> bool {
    (1..TILE_MIN_TOKENS).contains(&tokens)
}

/// How float weights and activations are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FloatProduct {
    /// In f32.
    Exact,
    /// On the tensor cores, to about 2⁻¹⁶ of each product.
    Split,
}

/// The dense product of float weights with f32 activations, whose rows are `x_stride` elements apart, for
/// several tokens at a time. Where [`takes_beside`] says so, a second product of the same activations in the same launch.
///
/// # Errors
/// As [`matvec`](super::matvec); [`OpError::Type`] for quantised weights.
#[expect(unsafe_code, reason = "launches")]
pub fn matmul_float<D: Device>(
    device: &D,
    op: &Matvec<'_>,
    beside: Option<Product<'_>>,
    x: Slice<'_, f32>,
    x_stride: u32,
    form: FloatProduct,
) -> Result<u64> {
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
    if let Some(beside) = beside {
        check.that(
            "beside",
            few && form == FloatProduct::Exact && beside.w.ty() == w.ty(),
            "is of another type, or there are too many tokens",
        )?;
        beside.check(check, device, op.tokens, w.cols())?;
        check.apart("beside", beside.y, x)?;
        check.apart("beside", beside.y, op.y)?;
        check.apart("beside", beside.y, w.data())?;
        check.apart("y", op.y, beside.w.data())?;
        if let Some(bias) = op.bias {
            check.apart("beside", beside.y, bias)?;
        }
    }
    let beside_rows = beside.map_or(0, |beside| beside.w.rows());
    let (rows, tokens) = (w.rows(), op.tokens);
    let launch = match form {
        FloatProduct::Exact if few => {
            let blocks = rows.div_ceil(FEW_ROWS) + beside_rows.div_ceil(FEW_ROWS);
            Launch::grid([blocks, tokens.div_ceil(FEW_TOKENS), 1], FEW_THREADS).shared(FEW_SHARED_BYTES)
        }
        FloatProduct::Exact => {
            Launch::grid([tokens.div_ceil(TOKENS), rows.div_ceil(ROWS), 1], THREADS).shared(SHARED_BYTES)
        }
        FloatProduct::Split => {
            let grid = [tokens.div_ceil(split::TOKENS), rows.div_ceil(split::ROWS), 1];
            Launch::grid(grid, split::THREADS).shared(split::SHARED_BYTES)
        }
    };
    check.grid_yz("w", launch.grid[1])?;
    let params = MatmulFloatParams {
        rows,
        cols: w.cols(),
        tokens,
        x_stride,
        y_stride: op.y_stride,
        accumulate: u32::from(op.accumulate),
        beside_rows,
        beside_stride: beside.map_or(0, |beside| beside.y_stride),
    };
    let (_, bias) = op.optional();
    let launch = Launch { pdl: op.dependent && device.properties().capability >= (9, 0), ..launch };
    let args = (w.data().ptr(), x.ptr(), op.y.ptr_mut(), bias, params);
    // What is not there is not read or written.
    let beside_w = beside.map_or(std::ptr::null(), |beside| beside.w.data().ptr());
    let beside_y = beside.map_or(std::ptr::null_mut(), |beside| beside.y.ptr_mut());
    let few_args = (w.data().ptr(), beside_w, x.ptr(), op.y.ptr_mut(), beside_y, bias, params);
    macro_rules! launch {
        ($($ty:ident: $many:ident $few:ident $split:ident),+) => {
            match (w.ty(), form, few) {
                $(
                    // SAFETY: `Matrix` has checked the weights, `Matvec::check` and the lines above the other
                    // operands; the grid covers rows and tokens, of which there are some.
                    (GgmlType::$ty, FloatProduct::Exact, false) => unsafe {
                        device.launch(kernels::$many, launch, args)?
                    },
                    // SAFETY: as above.
                    (GgmlType::$ty, FloatProduct::Exact, true) => unsafe { device.launch(kernels::$few, launch, few_args)? },
                    // SAFETY: as above.
                    (GgmlType::$ty, FloatProduct::Split, _) => unsafe { device.launch(split::$split, launch, args)? },
                )+
                (ty, ..) => return Err(OpError::Type { op: "matmul_float", ty }),
            }
        };
    }
    launch!(
        F32: matmul_f32 matmul_f32_few matmul_f32_split,
        F16: matmul_f16 matmul_f16_few matmul_f16_split,
        Bf16: matmul_bf16 matmul_bf16_few matmul_bf16_split
    );
    let (rows, cols, y_bytes) = (u64::from(rows), u64::from(w.cols()), if op.accumulate { 8 } else { 4 });
    let beside_rows = u64::from(beside_rows);
    Ok((rows + beside_rows) * w.row_bytes() + x_rows * (4 * (cols + beside_rows) + y_bytes * rows))
}
