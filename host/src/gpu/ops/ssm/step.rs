//! Launcher of a gated delta net's middle for spans of a few tokens.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::ssm_conv1d::RING;
use gpu_kernels::kernels::ssm_delta_step::{self as kernels, DeltaStepParams, MAX_ROWS, shared_bytes, threads};

use super::{Decay, Spans, takes_delta_net};
use crate::backend::DeltaNetShape;
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;
use crate::gpu::ops::{Check, Q8, Result};

/// Rows that a span may have in [`ssm_delta_step`].
pub const MAX_STEP_ROWS: u32 = MAX_ROWS;

/// The operands of [`ssm_delta_step`]. With `conv_dim = (2·n_head_k + n_head_v)·d_state` and
/// `d_inner = n_head_v·d_state`:
#[derive(Clone, Copy, Debug)]
pub struct DeltaStep<'a> {
    /// Queries, keys and values as projected, `[rows, conv_dim]`.
    pub qkv: Slice<'a, f32>,
    /// Output gates, `[rows, d_inner]`.
    pub z: Slice<'a, f32>,
    /// Decay logits, `[rows, n_head_v]`.
    pub alpha: Slice<'a, f32>,
    /// Step-size logits, `[rows, n_head_v]`.
    pub beta: Slice<'a, f32>,
    /// The convolution's taps, `[conv_dim, 4]`.
    pub conv1d: Slice<'a, f32>,
    /// The layer's decay parameters.
    pub decay: Decay<'a>,
    /// Weights of the gated norm, `[d_state]`.
    pub norm: Slice<'a, f32>,
    /// Of the gated norm.
    pub eps: f32,
    /// The convolution's inputs so far, `[slots, RING, conv_dim]`.
    pub ring: Slice<'a, f32>,
    /// `[slots, n_head_v, d_state, d_state]`.
    pub state: Slice<'a, f32>,
    /// The spans.
    pub spans: Spans<'a>,
    /// Gated and normed, `[rows, d_inner]`.
    pub out: Slice<'a, f32>,
    /// The same as int8, where that is wanted.
    pub q8: Option<Q8<'a>>,
    /// Whether the kernel may start while the grid ahead of it still runs.
    pub dependent: bool,
}

/// Convolution, delta rule and gated norm over each span; see [`gpu_kernels::kernels::ssm_delta_step`].
///
/// # Errors
/// Where the lengths do not agree, the operands overlap, or there is no kernel for the shape.
///
/// # Safety
/// - The spans have at most [`MAX_STEP_ROWS`] rows, which lie within the operands' and in one span only; their slots
///   differ and lie in `ring` and `state`.
/// - With `dependent`, the grid ahead in the stream writes neither spans, weights, `ring` nor `state`.
#[expect(unsafe_code, reason = "a launch, whose indices live on the device")]
pub unsafe fn ssm_delta_step<D: Device>(device: &D, op: &DeltaStep<'_>, shape: &DeltaNetShape) -> Result<u64> {
    let check = Check("ssm_delta_step");
    let n_spans = op.spans.check(check, device)?;
    let rows = op.check(check, device, shape)?;
    let state_elems = u64::from(shape.d_inner()) * u64::from(shape.d_state);
    if n_spans > 0 && rows > 0 {
        let d = shape.d_state;
        let launch = Launch::grid([shape.n_head_v, n_spans, 1], threads(d)).shared(shared_bytes(d));
        let launch = if op.dependent && device.properties().capability >= (9, 0) { launch.dependent() } else { launch };
        let (dt_bias, a) = op.decay.pointers();
        let Spans { slot, first, rows, start } = op.spans;
        let qs = op.q8.map_or(std::ptr::null_mut(), |q8| q8.qs.ptr_mut());
        let scales = op.q8.map_or(std::ptr::null_mut(), |q8| q8.d.ptr_mut());
        let sums = op.q8.map_or(std::ptr::null_mut(), |q8| q8.s.ptr_mut());
        let args = (
            op.qkv.ptr(),
            op.z.ptr(),
            op.alpha.ptr(),
            op.beta.ptr(),
            op.conv1d.ptr(),
            dt_bias,
            a,
            op.norm.ptr(),
            op.ring.ptr_mut(),
            op.state.ptr_mut(),
            slot.ptr(),
            first.ptr(),
            rows.ptr(),
            start.ptr(),
            op.out.ptr_mut(),
            qs,
            scales,
            sums,
            DeltaStepParams { n_head_k: shape.n_head_k, n_head_v: shape.n_head_v, eps: op.eps },
        );
        // SAFETY: `check` has checked lengths, alignment and overlap, and that there are heads; block and shared memory
        // are those of the state size, a block a head and span; rows, slots and the grid ahead are the caller's promise.
        unsafe {
            if d == 64 {
                device.launch(kernels::ssm_delta_step_64, launch, args)?;
            } else {
                device.launch(kernels::ssm_delta_step_128, launch, args)?;
            }
        }
    }
    // The state and three rows of the ring are read, the state and one row are written.
    let per_span = 8 * state_elems + 16 * u64::from(shape.conv_dim());
    let q8_bytes = op.q8.map_or(0, |_| Q8::bytes(op.out.len() as u64));
    Ok(u64::from(n_spans) * per_span + 4 * (op.qkv.len() + op.z.len() + op.out.len()) as u64 + q8_bytes)
}

impl DeltaStep<'_> {
    /// Checks the operands and returns the number of rows.
    fn check<D: Device>(&self, check: Check, device: &D, shape: &DeltaNetShape) -> Result<usize> {
        let (conv_dim, d_inner) = (shape.conv_dim() as usize, shape.d_inner() as usize);
        let (heads, d) = (shape.n_head_v as usize, shape.d_state as usize);
        check.that("d_state", takes_delta_net(shape), "has no kernel: 64 and 128 with four taps have")?;
        check.that("n_head_k", shape.n_head_k > 0 && heads > 0, "is 0")?;
        let counted = conv_dim < (u32::MAX / RING) as usize && u32::try_from(self.qkv.len()).is_ok();
        check.that("qkv", counted, "has more elements than are counted")?;
        check.that("qkv", self.qkv.len().is_multiple_of(conv_dim), "is not whole rows")?;
        let rows = self.qkv.len() / conv_dim;
        for (name, slice, cols) in [
            ("z", self.z, d_inner),
            ("alpha", self.alpha, heads),
            ("beta", self.beta, heads),
            ("out", self.out, d_inner),
        ] {
            check.that(name, slice.len() == rows * cols, "has another number of rows than qkv")?;
        }
        check.that("conv1d", self.conv1d.len() == 4 * conv_dim, "has not 4 taps a channel")?;
        check.that("norm", self.norm.len() == d, "has another size than the state")?;
        check.that("ring", self.ring.len().is_multiple_of(RING as usize * conv_dim), "is not whole slots")?;
        check.that("state", self.state.len().is_multiple_of(d_inner * d), "is not whole slots")?;
        self.decay.check(check, device, heads)?;
        let vectors =
            [("conv1d", self.conv1d), ("z", self.z), ("norm", self.norm), ("state", self.state), ("out", self.out)];
        for (name, slice) in vectors {
            check.aligned(name, slice, 16)?;
        }
        let inputs = [self.qkv, self.z, self.alpha, self.beta, self.conv1d, self.norm];
        let inputs = || inputs.into_iter().chain(self.decay.dt_bias).chain(self.decay.a);
        let outputs = [("ring", self.ring), ("state", self.state), ("out", self.out)];
        for (i, (name, output)) in outputs.into_iter().enumerate() {
            for other in inputs().chain(outputs[..i].iter().map(|(_, slice)| *slice)) {
                check.apart(name, output, other)?;
            }
        }
        for slice in inputs().chain(outputs.map(|(_, slice)| slice)) {
            device.check_owner(slice)?;
        }
        if let Some(q8) = self.q8 {
            check.that("q8", q8.cols as usize == d_inner, "has another number of columns than out")?;
            let others: Vec<_> = inputs().chain(outputs.map(|(_, slice)| slice)).collect();
            q8.check_output(check, device, rows as u64, &others)?;
        }
        Ok(rows)
    }
}
