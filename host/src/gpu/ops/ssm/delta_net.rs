//! Launcher of the gated delta rule over spans of many tokens.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::spans::n_tiles;
use gpu_kernels::kernels::ssm_delta_chunk::{self as chunk, CHUNK, DeltaNetParams, TOKEN_VECTORS};
use gpu_kernels::kernels::ssm_delta_net::{self as kernels, BLOCK_ROWS, shared_bytes};

use super::{Decay, Spans};
use crate::backend::DeltaNetShape;
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;
use crate::gpu::ops::{Check, Result};

/// Elements of [`ssm_delta_net`]'s `chunks` for a batch of up to so many rows and spans.
pub fn chunk_elems(shape: &DeltaNetShape, rows: u32, n_spans: u32) -> usize {
    n_tiles(CHUNK, rows, n_spans) as usize * shape.n_head_v as usize * (CHUNK * 4 * TOKEN_VECTORS) as usize
}

/// The gated delta rule over each span; see [`gpu_kernels::kernels::ssm_delta_net`]. `chunks` is overwritten; it has
/// [`chunk_elems`] elements or more.
///
/// # Errors
/// Where the lengths do not agree, the operands overlap, or there is no kernel for the state size.
///
/// # Safety
/// As [`ssm_conv1d`](super::ssm_conv1d()), with `state` of `[slots, n_head_v, d_state, d_state]`.
#[expect(unsafe_code, reason = "two launches, whose indices live on the device")]
#[expect(clippy::too_many_arguments, reason = "the operation has that many operands")]
pub unsafe fn ssm_delta_net<D: Device>(
    device: &D,
    qkv: Slice<'_, f32>,
    (alpha, beta): (Slice<'_, f32>, Slice<'_, f32>),
    decay: Decay<'_>,
    state: Slice<'_, f32>,
    chunks: Slice<'_, f32>,
    spans: Spans<'_>,
    out: Slice<'_, f32>,
    shape: &DeltaNetShape,
) -> Result<u64> {
    let check = Check("ssm_delta_net");
    let n_spans = spans.check(check, device)?;
    let (conv_dim, d_inner, heads) = (shape.conv_dim() as usize, shape.d_inner() as usize, shape.n_head_v as usize);
    check.that("d_state", matches!(shape.d_state, 64 | 128), "has no delta-net kernel: 64 and 128 have")?;
    check.that("n_head_k", shape.n_head_k > 0 && heads > 0, "is 0")?;
    check.that("qkv", qkv.len().is_multiple_of(conv_dim), "is not whole rows")?;
    let Ok(rows) = u32::try_from(qkv.len() / conv_dim) else { return check.fail("qkv", "has too many rows") };
    let per_row = |slice: Slice<'_, f32>, n: usize| slice.len() == rows as usize * n;
    check.that("alpha", per_row(alpha, heads), "has not one element a row and head")?;
    check.that("beta", per_row(beta, heads), "has not one element a row and head")?;
    check.that("out", per_row(out, d_inner), "has another number of rows")?;
    check.that("state", state.len().is_multiple_of(d_inner * shape.d_state as usize), "is not whole slots")?;
    check.that("chunks", chunks.len() >= chunk_elems(shape, rows, n_spans), "is too small")?;
    decay.check(check, device, heads)?;
    for (name, slice) in [("qkv", qkv), ("state", state), ("chunks", chunks)] {
        check.aligned(name, slice, 16)?;
    }
    for slice in [qkv, alpha, beta, state, chunks, out] {
        device.check_owner(slice)?;
    }
    for (name, output) in [("out", out), ("state", state), ("chunks", chunks)] {
        for input in [qkv, alpha, beta].into_iter().chain(decay.dt_bias).chain(decay.a) {
            check.apart(name, output, input)?;
        }
    }
    check.apart("out", out, state)?;
    check.apart("out", out, chunks)?;
    check.apart("state", state, chunks)?;
    if n_spans > 0 && rows > 0 {
        let p = DeltaNetParams { n_head_k: shape.n_head_k, n_head_v: shape.n_head_v, n_spans };
        let tiles = n_tiles(CHUNK, rows, n_spans);
        check.grid_yz("qkv", tiles)?;
        let chunk_launch = Launch::grid([(32 * shape.n_head_k).div_ceil(chunk::THREADS), tiles, 1], chunk::THREADS);
        let launch = Launch::grid([d_inner as u32 / BLOCK_ROWS, n_spans, 1], kernels::THREADS);
        let launch = launch.shared(shared_bytes(shape.d_state));
        let (slot, first, rows, start) = (spans.slot.ptr(), spans.first.ptr(), spans.rows.ptr(), spans.start.ptr());
        let (dt_bias, a) = decay.pointers();
        let (qkv, alpha, beta) = (qkv.ptr(), alpha.ptr(), beta.ptr());
        let chunk_args = (qkv, alpha, beta, dt_bias, a, slot, first, rows, start, chunks.ptr_mut(), p);
        let args = (qkv, chunks.ptr(), state.ptr_mut(), slot, first, rows, start, out.ptr_mut(), p);
        // SAFETY: lengths, alignment and overlap were checked above, and that there are heads; the first launch makes
        // the chunks that the second reads; spans and slots are the caller's promise.
        unsafe {
            if shape.d_state == 64 {
                device.launch(chunk::ssm_delta_chunk_64, chunk_launch, chunk_args)?;
                device.launch(kernels::ssm_delta_net_64, launch, args)?;
            } else {
                device.launch(chunk::ssm_delta_chunk_128, chunk_launch, chunk_args)?;
                device.launch(kernels::ssm_delta_net_128, launch, args)?;
            }
        }
    }
    let state_bytes = u64::from(n_spans) * 8 * (d_inner * shape.d_state as usize) as u64;
    Ok(state_bytes + 4 * (qkv.len() + out.len()) as u64)
}
