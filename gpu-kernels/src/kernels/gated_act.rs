//! The gated activations of feed-forward networks.
//!
//! Launch: `Launch::linear(ceil(n / THREADS), THREADS)`; one lane an element of `[rows, n_ff]`.

use cuda_std::{pdl, prelude::*};

use crate::kernels::quantize_q8::quantize4;

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

/// Four elements a lane: the activation, stored and quantised.
///
/// # Safety
/// As [`swiglu_q8`].
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "a kernel's pointers are arguments of their own")]
unsafe fn activate_q8(
    value: impl Fn(f32, f32) -> f32,
    gate: *const f32,
    up: *const f32,
    out: *mut f32,
    qs: *mut i8,
    d: *mut f32,
    s: *mut f32,
    n: u32,
) {
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let i = thread::index_1d() * 4;
    // Lanes past the end are needed by the shuffles.
    let live = i < n;
    let at = i.min(n - 4) as usize;
    // SAFETY: `at + 4` is at most `n`, and this lane alone touches these elements.
    unsafe {
        let zero = F32x4 { x: 0.0, y: 0.0, z: 0.0, w: 0.0 };
        let (g, u) =
            if live { (ld(gate.add(at).cast::<F32x4>()), ld(up.add(at).cast::<F32x4>())) } else { (zero, zero) };
        let v = F32x4 { x: value(g.x, u.x), y: value(g.y, u.y), z: value(g.z, u.z), w: value(g.w, u.w) };
        if live {
            st(out.add(at).cast::<F32x4>(), v);
        }
        quantize4(v.to_array(), live, at, qs, d, s);
    }
}

/// [`swiglu`], and the result also as [`quantize_q8`](crate::kernels::quantize_q8) gives it: to `qs: [n]`,
/// `d: [n/16]`, `s: [n/16]`.
///
/// Launch: `Launch::linear(ceil(n / (4·THREADS)), THREADS)`; four elements a lane.
///
/// # Safety
/// As [`swiglu`], with `n` a positive multiple of 32, `out` apart from the inputs, everything 16-byte aligned; the
/// outputs have the sizes above and overlap nothing else.
#[kernel(max_threads = 256)]
pub unsafe fn swiglu_q8(
    gate: *const f32,
    up: *const f32,
    out: *mut f32,
    qs: *mut i8,
    d: *mut f32,
    s: *mut f32,
    n: u32,
) {
    // SAFETY: the caller's promise is the same.
    unsafe { activate_q8(swiglu_value, gate, up, out, qs, d, s, n) }
}

/// [`swiglu_oai`], as [`swiglu_q8`] does it.
///
/// # Safety
/// As [`swiglu_q8`].
#[kernel(max_threads = 256)]
pub unsafe fn swiglu_oai_q8(
    gate: *const f32,
    up: *const f32,
    out: *mut f32,
    qs: *mut i8,
    d: *mut f32,
    s: *mut f32,
    n: u32,
) {
    // SAFETY: the caller's promise is the same.
    unsafe { activate_q8(swiglu_oai_value, gate, up, out, qs, d, s, n) }
}

/// `out = x·σ(gate)`, as [`swiglu_q8`] does it; `out` may be `x`.
///
/// # Safety
/// As [`swiglu_q8`], where `out` may be `gate`.
#[kernel(max_threads = 256)]
pub unsafe fn sigmoid_mul_q8(
    x: *const f32,
    gate: *const f32,
    out: *mut f32,
    qs: *mut i8,
    d: *mut f32,
    s: *mut f32,
    n: u32,
) {
    // SAFETY: the caller's promise is the same; a lane reads its elements before it writes them.
    unsafe { activate_q8(|x, gate| x * math::sigmoid(gate), x, gate, out, qs, d, s, n) }
}
