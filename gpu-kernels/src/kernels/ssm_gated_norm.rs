//! The gated normalisation after a delta net.
//!
//! Per head: `x[i] ← x[i]·rsqrt(mean(x²) + eps)·w[i]·SiLU(z[i])`.

use cuda_std::{pdl, prelude::*};

use crate::kernels::quantize_q8::quantize4;

/// Lanes a block; a warp takes one head of one row.
pub const THREADS: u32 = 128;
/// Heads a block.
pub const HEADS_PER_BLOCK: u32 = THREADS / 32;

/// Normalises and gates `x`, `[heads, d]`, in place; `heads` counts those of all rows.
///
/// Launch: `Launch::linear(ceil(heads / HEADS_PER_BLOCK), THREADS)`.
///
/// # Safety
/// `x` and `z` have `heads·d` elements, `w` has `d`.
#[kernel(max_threads = 128)]
pub unsafe fn ssm_gated_norm(x: *mut f32, z: *const f32, w: *const f32, eps: f32, d: u32, heads: u32) {
    let head = thread::index_1d() / 32;
    if head >= heads {
        return; // the whole warp at once
    }
    let lane = warp::lane_id();
    // SAFETY: `head < heads`; this warp alone touches the head, each lane its own elements.
    unsafe {
        let (x, z) = (x.add(head as usize * d as usize), z.add(head as usize * d as usize));
        let scale = head_scale(x, d, eps);
        let mut i = lane;
        while i < d {
            let at = i as usize;
            st(x.add(at), ld(x.add(at)) * scale * ld(w.add(at)) * math::silu(ld(z.add(at))));
            i += 32;
        }
    }
}

/// `1 / √(mean x² + ε)` of a head, in every lane.
///
/// # Safety
/// The whole warp comes here; the head has `d` elements.
#[inline(always)]
unsafe fn head_scale(x: *const f32, d: u32, eps: f32) -> f32 {
    let mut sum = 0.0;
    let mut i = warp::lane_id();
    while i < d {
        // SAFETY: `i < d`.
        let value = unsafe { ld(x.add(i as usize)) };
        sum = math::fma(value, value, sum);
        i += 32;
    }
    // SAFETY: the caller's promise.
    math::rsqrt(unsafe { warp::sum(sum) } / d as f32 + eps)
}

/// [`ssm_gated_norm`], and the result also as [`quantize_q8`](crate::kernels::quantize_q8) gives it: to
/// `qs: [heads, d]`, `scales: [heads, d/16]`, `sums: [heads, d/16]`.
///
/// # Safety
/// As [`ssm_gated_norm`], with `d` a multiple of 32 and everything 16-byte aligned; the outputs have the shapes
/// above and overlap nothing else.
#[kernel(max_threads = 128)]
pub unsafe fn ssm_gated_norm_q8(
    x: *mut f32,
    z: *const f32,
    w: *const f32,
    qs: *mut i8,
    scales: *mut f32,
    sums: *mut f32,
    eps: f32,
    d: u32,
    heads: u32,
) {
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let head = thread::index_1d() / 32;
    if head >= heads {
        return; // the whole warp at once
    }
    let first = head as usize * d as usize;
    // SAFETY: `head < heads`; this warp alone touches the head, each lane its own elements.
    unsafe {
        let (x, z) = (x.add(first), z.add(first));
        let scale = head_scale(x, d, eps);
        warp::sync_warp(u32::MAX); // every lane has read the head before any writes to it
        let mut base = 0;
        while base < d {
            let i = base + warp::lane_id() * 4;
            // Lanes past the end are needed by the shuffles.
            let live = i < d;
            let at = i.min(d - 4) as usize;
            let mut v = F32x4 { x: 0.0, y: 0.0, z: 0.0, w: 0.0 };
            if live {
                let (x, z, w) =
                    (ld(x.add(at).cast::<F32x4>()), ld(z.add(at).cast::<F32x4>()), ld(w.add(at).cast::<F32x4>()));
                v = F32x4 {
                    x: x.x * scale * w.x * math::silu(z.x),
                    y: x.y * scale * w.y * math::silu(z.y),
                    z: x.z * scale * w.z * math::silu(z.z),
                    w: x.w * scale * w.w * math::silu(z.w),
                };
            }
            if live {
                st(x.add(at).cast::<F32x4>(), v);
            }
            quantize4(v.to_array(), live, first + at, qs, scales, sums);
            base += 128;
        }
    }
}
