//! Launchers of the gated delta net: convolution, recurrence, gated norm.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::ssm_delta_net::{DeltaNetParams, ROWS_PER_BLOCK};
use gpu_kernels::kernels::{ssm_conv1d, ssm_delta_net, ssm_gated_norm};

use super::{Check, Q8, Result};
use crate::backend::DeltaNetShape;
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// The spans of a batch, one element each: device arrays that were checked when the batch was made.
#[derive(Clone, Copy, Debug)]
pub struct Spans<'a> {
    /// Slot of the recurrent state.
    pub slot: Slice<'a, u32>,
    /// First row.
    pub first: Slice<'a, u32>,
    /// Number of rows.
    pub rows: Slice<'a, u32>,
    /// Position of the first row.
    pub start: Slice<'a, u32>,
}

impl Spans<'_> {
    /// Checks the arrays' sizes and returns the number of spans.
    fn check<D: Device>(&self, check: Check, device: &D) -> Result<u32> {
        for slice in [self.slot, self.first, self.rows, self.start] {
            device.check_owner(slice)?;
            check.that("spans", slice.len() == self.slot.len(), "differ in length")?;
        }
        let Ok(n) = u32::try_from(self.slot.len()) else { return check.fail("spans", "too many") };
        check.grid_yz("spans", n)?;
        Ok(n)
    }
}

/// Whether there are kernels for a delta net's shape.
pub fn takes_delta_net(shape: &DeltaNetShape) -> bool {
    shape.d_conv == 4 && matches!(shape.d_state, 64 | 128)
}

/// The causal convolution of `x`, `[rows, channels]`, with taps `w`, `[channels, 4]`, over each span.
///
/// # Errors
/// Where the lengths do not agree, the operands overlap, or there is no kernel for the number of taps.
///
/// # Safety
/// The spans' rows lie in `x` and do not overlap; their slots differ and lie in `state`,
/// `[slots, d_conv − 1, channels]`.
#[expect(unsafe_code, reason = "a launch, whose indices live on the device")]
pub unsafe fn ssm_conv1d<D: Device>(
    device: &D,
    x: Slice<'_, f32>,
    w: Slice<'_, f32>,
    state: Slice<'_, f32>,
    spans: Spans<'_>,
    out: Slice<'_, f32>,
    shape: &DeltaNetShape,
) -> Result<u64> {
    let check = Check("ssm_conv1d");
    let n_spans = spans.check(check, device)?;
    let channels = shape.conv_dim();
    check.that("w", shape.d_conv == 4, "has no kernel for its number of taps: 4 has")?;
    check.that("w", w.len() == 4 * channels as usize, "has not 4 taps a channel")?;
    check.that("x", channels > 0 && x.len().is_multiple_of(channels as usize), "is not whole rows")?;
    check.that("out", out.len() == x.len(), "has another length than x")?;
    check.that("state", state.len().is_multiple_of(3 * channels as usize), "is not whole slots")?;
    for slice in [x, w, state, out] {
        device.check_owner(slice)?;
    }
    check.apart("out", out, x)?;
    check.apart("out", out, state)?;
    if n_spans > 0 {
        let launch = Launch::grid([channels.div_ceil(ssm_conv1d::THREADS), n_spans, 1], ssm_conv1d::THREADS);
        let Spans { slot, first, rows, start } = spans;
        let args = (
            x.ptr(),
            w.ptr(),
            state.ptr_mut(),
            slot.ptr(),
            first.ptr(),
            rows.ptr(),
            start.ptr(),
            out.ptr_mut(),
            channels,
        );
        // SAFETY: lengths were checked above; rows and slots are the caller's promise.
        unsafe { device.launch(ssm_conv1d::ssm_conv1d_4, launch, args)? };
    }
    Ok(8 * x.len() as u64 + u64::from(n_spans) * 24 * u64::from(channels))
}

/// A layer's decay parameters, one a value head.
#[derive(Clone, Copy, Debug)]
pub struct Decay<'a> {
    /// Added to alpha; none is 0.
    pub dt_bias: Option<Slice<'a, f32>>,
    /// Multiplies the softplus; none is −1.
    pub a: Option<Slice<'a, f32>>,
}

/// The gated delta rule over each span; see [`gpu_kernels::kernels::ssm_delta_net`].
///
/// # Errors
/// Where the lengths do not agree, the operands overlap, or there is no kernel for the state size.
///
/// # Safety
/// As [`ssm_conv1d`], with `state` of `[slots, n_head_v, d_state, d_state]`.
#[expect(unsafe_code, reason = "a launch, whose indices live on the device")]
#[expect(clippy::too_many_arguments, reason = "the operation has that many operands")]
pub unsafe fn ssm_delta_net<D: Device>(
    device: &D,
    qkv: Slice<'_, f32>,
    (alpha, beta): (Slice<'_, f32>, Slice<'_, f32>),
    decay: Decay<'_>,
    state: Slice<'_, f32>,
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
    let rows = qkv.len() / conv_dim;
    check.that("alpha", alpha.len() == rows * heads, "has not one element a row and head")?;
    check.that("beta", beta.len() == rows * heads, "has not one element a row and head")?;
    check.that("out", out.len() == rows * d_inner, "has another number of rows")?;
    check.that("state", state.len().is_multiple_of(d_inner * shape.d_state as usize), "is not whole slots")?;
    check.aligned("qkv", qkv, 16)?;
    check.aligned("state", state, 16)?;
    for (name, slice) in [("dt_bias", decay.dt_bias), ("a", decay.a)] {
        check.that(name, slice.is_none_or(|s| s.len() == heads), "has not one element a head")?;
    }
    for slice in [qkv, alpha, beta, state, out].into_iter().chain(decay.dt_bias).chain(decay.a) {
        device.check_owner(slice)?;
    }
    check.apart("out", out, qkv)?;
    check.apart("out", out, state)?;
    if n_spans > 0 {
        let blocks = d_inner as u32 / ROWS_PER_BLOCK;
        let launch = Launch::grid([blocks, n_spans, 1], ssm_delta_net::THREADS);
        let Spans { slot, first, rows, start } = spans;
        let optional = |s: Option<Slice<'_, f32>>| s.map_or(std::ptr::null(), Slice::ptr);
        let p = DeltaNetParams { n_head_k: shape.n_head_k, n_head_v: shape.n_head_v };
        let args = (
            qkv.ptr(),
            alpha.ptr(),
            beta.ptr(),
            optional(decay.dt_bias),
            optional(decay.a),
            state.ptr_mut(),
            slot.ptr(),
            first.ptr(),
            rows.ptr(),
            start.ptr(),
            out.ptr_mut(),
            p,
        );
        // SAFETY: lengths and alignment were checked above; rows and slots are the caller's promise.
        unsafe {
            match shape.d_state {
                64 => device.launch(ssm_delta_net::ssm_delta_net_64, launch, args)?,
                _ => device.launch(ssm_delta_net::ssm_delta_net_128, launch, args)?,
            }
        }
    }
    let state_bytes = u64::from(n_spans) * 8 * (d_inner * shape.d_state as usize) as u64;
    Ok(state_bytes + 4 * (qkv.len() + out.len()) as u64)
}

/// `x = rms_norm(x, w)·SiLU(z)` for every head of `w.len()` dimensions.
///
/// # Errors
/// Where the lengths do not agree or the operands overlap.
#[expect(unsafe_code, reason = "a launch")]
pub fn ssm_gated_norm<D: Device>(
    device: &D,
    x: Slice<'_, f32>,
    z: Slice<'_, f32>,
    w: Slice<'_, f32>,
    eps: f32,
) -> Result<u64> {
    let heads = check_gated_norm(Check("ssm_gated_norm"), device, x, z, w)?;
    if heads > 0 {
        let blocks = heads.div_ceil(ssm_gated_norm::HEADS_PER_BLOCK);
        let args = (x.ptr_mut(), z.ptr(), w.ptr(), eps, w.len() as u32, heads);
        // SAFETY: lengths and overlap were checked above; a warp a head.
        unsafe {
            device.launch(ssm_gated_norm::ssm_gated_norm, Launch::linear(blocks, ssm_gated_norm::THREADS), args)?;
        }
    }
    Ok(12 * x.len() as u64)
}

/// [`ssm_gated_norm`] whose result also goes to `q8` as [`quantize_q8`](super::quantize_q8()) gives it.
///
/// # Errors
/// As there, and where heads are no multiple of 32.
#[expect(unsafe_code, reason = "a launch")]
pub fn ssm_gated_norm_q8<D: Device>(
    device: &D,
    x: Slice<'_, f32>,
    z: Slice<'_, f32>,
    w: Slice<'_, f32>,
    q8: Q8<'_>,
    eps: f32,
) -> Result<u64> {
    let check = Check("ssm_gated_norm_q8");
    let heads = check_gated_norm(check, device, x, z, w)?;
    check.that("w", w.len().is_multiple_of(32), "is no multiple of 32")?;
    check.that("q8", q8.cols > 0 && x.len().is_multiple_of(q8.cols as usize), "does not divide x into rows")?;
    for (name, slice) in [("x", x), ("z", z), ("w", w)] {
        check.aligned(name, slice, 16)?;
    }
    q8.check_output(check, device, (x.len() / q8.cols as usize) as u64, &[x, z, w])?;
    if heads > 0 {
        let blocks = heads.div_ceil(ssm_gated_norm::HEADS_PER_BLOCK);
        let launch = Launch::linear(blocks, ssm_gated_norm::THREADS).dependent();
        let (qs, d, s) = (q8.qs.ptr_mut(), q8.d.ptr_mut(), q8.s.ptr_mut());
        let args = (x.ptr_mut(), z.ptr(), w.ptr(), qs, d, s, eps, w.len() as u32, heads);
        // SAFETY: lengths, alignment and overlap were checked above; a warp a head; the kernel waits for the grid
        // ahead before it reads.
        unsafe { device.launch(ssm_gated_norm::ssm_gated_norm_q8, launch, args)? };
    }
    Ok(12 * x.len() as u64 + Q8::bytes(x.len() as u64))
}

/// Checks the operands and returns the number of heads in all rows.
fn check_gated_norm<D: Device>(
    check: Check,
    device: &D,
    x: Slice<'_, f32>,
    z: Slice<'_, f32>,
    w: Slice<'_, f32>,
) -> Result<u32> {
    check.that("w", !w.is_empty() && x.len().is_multiple_of(w.len()), "does not divide x into heads")?;
    check.that("z", z.len() == x.len(), "has another length than x")?;
    for slice in [x, z, w] {
        device.check_owner(slice)?;
    }
    check.apart("x", x, z)?;
    check.apart("x", x, w)?;
    let heads = x.len() / w.len();
    // A lane's number, 32·head + lane, has to fit 32 bits.
    check.that("x", heads < 1 << 26, "has too many heads")?;
    Ok(heads as u32)
}
