//! Launcher of `embedding_*`.

use cuda_std::launch::Launch;
use gpu_kernels::blocks::GgmlType;
use gpu_kernels::kernels::embedding as kernels;
use gpu_kernels::params::{EmbeddingParams, FLAT_BLOCK};

use super::{Check, Matrix, Result};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// `y[t, :] = w[tokens[t], :]` for every token; rows of `y` are `y_stride` elements apart.
///
/// Token ids live on the device, so they are not checked here; the kernel reads one past the end as the
/// last row.
///
/// # Errors
/// Where a shape, an alignment or an overlap is not as [`gpu_kernels::kernels::embedding`] asks.
#[expect(unsafe_code, reason = "a launch")]
pub fn embedding<D: Device>(
    device: &D,
    w: Matrix<'_>,
    tokens: Slice<'_, u32>,
    y: Slice<'_, f32>,
    y_stride: u32,
) -> Result<u64> {
    let check = Check("embedding");
    if tokens.is_empty() {
        return Ok(0);
    }
    check.that("w", w.n_expert() == 1, "a table has no experts")?;
    let Ok(n_tokens) = u32::try_from(tokens.len()) else { return check.fail("tokens", "too many") };
    check.grid_yz("tokens", n_tokens)?;
    device.check_owner(w.data())?;
    device.check_owner(tokens)?;
    device.check_owner(y)?;
    check.rows("y", y, u64::from(n_tokens), u64::from(y_stride), u64::from(w.cols()))?;
    check.that("y", y_stride.is_multiple_of(4), "stride is no multiple of 4")?;
    check.aligned("y", y, 16)?;
    check.apart("y", y, w.data())?;
    check.apart("y", y, tokens)?;

    let launch = Launch::grid([w.chunks().div_ceil(FLAT_BLOCK), n_tokens, 1], FLAT_BLOCK).dependent();
    let params = EmbeddingParams { planes: w.planes(), rows: w.rows(), chunks: w.chunks(), y_stride, reserved: 0 };
    let args = (w.data().ptr(), tokens.ptr(), y.ptr_mut(), params);
    macro_rules! launch {
        ($($ty:ident: $name:ident),+) => {
            match w.ty() {
                // SAFETY: `Matrix` has checked the table; `y` and the grid were checked above; the kernel waits for
                // the grid ahead before it reads.
                $(GgmlType::$ty => unsafe { device.launch(kernels::$name, launch, args)? },)+
            }
        };
    }
    launch!(
        Q4K: embedding_q4_k, Q5K: embedding_q5_k, Q6K: embedding_q6_k, Q8_0: embedding_q8_0, Q4_0: embedding_q4_0,
        Q4_1: embedding_q4_1, Q5_0: embedding_q5_0, Q5_1: embedding_q5_1, Mxfp4: embedding_mxfp4,
        F16: embedding_f16, Bf16: embedding_bf16, F32: embedding_f32
    );
    Ok(u64::from(n_tokens) * (w.row_bytes() + 4 * u64::from(w.cols())))
}
