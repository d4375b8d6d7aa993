//! The gated activations of feed-forward networks.
//!
//! Launch: `Launch::linear(ceil(n / THREADS), THREADS)`; one lane an element of `[rows, n_ff]`.

use cuda_std::prelude::*;

/// Lanes a block.
pub const THREADS: u32 = 256;

/// gpt-oss: slope inside the sigmoid.
const OAI_ALPHA: f32 = 1.702;
/// gpt-oss: gate and up are clamped to this magnitude.
const OAI_LIMIT: f32 = 7.0;

/// `g·σ(g)·u`.
#[inline(always)]
pub fn swiglu_value(gate: f32, up: f32) -> f32 {
    math::silu(gate) * up
}

/// `g'·σ(1.702·g')·(u' + 1)` with `g' = min(g, 7)` and `u' = clamp(u, ±7)`.
///
/// Source: the gpt-oss reference implementation.
#[inline(always)]
pub fn swiglu_oai_value(gate: f32, up: f32) -> f32 {
    let gate = math::min(gate, OAI_LIMIT);
    let up = math::max(math::min(up, OAI_LIMIT), -OAI_LIMIT);
    gate * math::sigmoid(OAI_ALPHA * gate) * (up + 1.0)
}

/// `out[i] = swiglu(gate[i], up[i])`.
///
/// # Safety
/// Grid covers `n` lanes; the three arrays have `n` elements; `out` may be `gate` or `up`.
#[kernel(max_threads = 256)]
pub unsafe fn swiglu(gate: *const f32, up: *const f32, out: *mut f32, n: u32) {
    let i = thread::index_1d();
    if i < n {
        // SAFETY: `i < n`, and this lane alone touches element `i`.
        unsafe { st(out.add(i as usize), swiglu_value(ld(gate.add(i as usize)), ld(up.add(i as usize)))) }
    }
}

/// `out[i] = swiglu_oai(gate[i], up[i])`, the clamped form of gpt-oss.
///
/// # Safety
/// As [`swiglu`].
#[kernel(max_threads = 256)]
pub unsafe fn swiglu_oai(gate: *const f32, up: *const f32, out: *mut f32, n: u32) {
    let i = thread::index_1d();
    if i < n {
        // SAFETY: `i < n`, and this lane alone touches element `i`.
        unsafe { st(out.add(i as usize), swiglu_oai_value(ld(gate.add(i as usize)), ld(up.add(i as usize)))) }
    }
}
