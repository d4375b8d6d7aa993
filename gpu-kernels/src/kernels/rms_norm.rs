//! Root-mean-square norm: `y[t,i] = w[i]·x[t,i] / √(mean_i x[t,i]² + ε)`.
//!
//! Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).

use cuda_std::{pdl, prelude::*};

use crate::kernels::quantize_q8::quantize4;

/// Lanes of a block of [`rms_norm`].
pub const RMS_NORM_THREADS: u32 = 256;
/// Its dynamic shared memory: one word a warp.
pub const RMS_NORM_SHARED_BYTES: u32 = RMS_NORM_THREADS / warp::WARP_SIZE * 4;

/// `y[t,i] = w[i]·x[t,i] / √(mean_i x[t,i]² + ε)` for the rows `t` of `x [rows, n]`.
///
/// One block a row; a lane takes every 256th vector of four elements. The row is read twice, the second time
/// from L1. Used for the layers' norms, and per head for the norms of q and k (rows = heads, n = head_dim).
///
/// # Safety
/// - grid `[rows, 1, 1]`, block `[RMS_NORM_THREADS, 1, 1]`, `RMS_NORM_SHARED_BYTES` of shared memory;
/// - `n > 0`, a multiple of 4;
/// - `x` and `y`: `rows·n` elements, `w`: `n`, all 16-byte aligned;
/// - `y` may be `x`; otherwise they do not overlap. `w` overlaps neither.
#[kernel(max_threads = 256)]
pub unsafe fn rms_norm(x: *const f32, w: *const f32, y: *mut f32, n: u32, eps: f32) {
    let lane = thread::thread_idx_x();
    let n_vec = n / 4;
    let row = thread::block_idx_x() as usize * n_vec as usize;
    let x = x.cast::<F32x4>().add(row);
    let y = y.cast::<F32x4>().add(row);
    let w = w.cast::<F32x4>();

    let scale = row_scale(x, n, eps);
    let mut i = lane;
    while i < n_vec {
        st(y.add(i as usize), scaled(ld(x.add(i as usize)), scale, ld(w.add(i as usize))));
        i += RMS_NORM_THREADS;
    }
}

/// `x[t,i] += r[t,i]`, then [`rms_norm`] of the new `x`: the residual sum ahead of a layer's norm.
///
/// # Safety
/// As [`rms_norm`], with `r` of `rows·n` elements, 16-byte aligned; no two of `x`, `r` and `y` overlap.
#[kernel(max_threads = 256)]
pub unsafe fn rms_norm_add(x: *mut f32, r: *const f32, w: *const f32, y: *mut f32, n: u32, eps: f32) {
    let n_vec = n / 4;
    let row = thread::block_idx_x() as usize * n_vec as usize;
    let (x, r, y) = (x.cast::<F32x4>().add(row), r.cast::<F32x4>().add(row), y.cast::<F32x4>().add(row));
    let w = w.cast::<F32x4>();

    // Each lane takes the same vectors in all three passes, so it reads only what it wrote itself.
    let mut i = thread::thread_idx_x();
    while i < n_vec {
        let (a, b) = (ld(x.add(i as usize)), ld(r.add(i as usize)));
        st(x.add(i as usize), F32x4 { x: a.x + b.x, y: a.y + b.y, z: a.z + b.z, w: a.w + b.w });
        i += RMS_NORM_THREADS;
    }
    let scale = row_scale(x, n, eps);
    let mut i = thread::thread_idx_x();
    while i < n_vec {
        st(y.add(i as usize), scaled(ld(x.add(i as usize)), scale, ld(w.add(i as usize))));
        i += RMS_NORM_THREADS;
    }
}

/// [`rms_norm`], and the result also as [`quantize_q8`](crate::kernels::quantize_q8) gives it: to
/// `qs: [rows, n]`, `d: [rows, n/32]`, `s: [rows, n/16]`.
///
/// # Safety
/// As [`rms_norm`], with `n` a multiple of 32; the outputs have the shapes above, `qs` 16-byte aligned, and
/// overlap nothing else.
#[kernel(max_threads = 256)]
pub unsafe fn rms_norm_q8(
    x: *const f32,
    w: *const f32,
    y: *mut f32,
    qs: *mut i8,
    d: *mut f32,
    s: *mut f32,
    n: u32,
    eps: f32,
) {
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let n_vec = n / 4;
    let first = thread::block_idx_x() as usize * n_vec as usize;
    let x = x.cast::<F32x4>().add(first);
    let y = y.cast::<F32x4>().add(first);
    let w = w.cast::<F32x4>();
    let scale = row_scale(x, n, eps);
    let mut base = 0;
    while base < n_vec {
        let i = base + thread::thread_idx_x();
        // Lanes past the end are needed by the shuffles.
        let live = i < n_vec;
        let at = i.min(n_vec - 1) as usize;
        let v = scaled(ld(x.add(at)), scale, ld(w.add(at)));
        if live {
            st(y.add(at), v);
        }
        quantize4(v.to_array(), live, 4 * (first + at), qs, d, s);
        base += RMS_NORM_THREADS;
    }
}

/// `1 / √(mean x² + ε)` of a row of `n` elements, in every lane.
///
/// # Safety
/// The whole block comes here, with [`RMS_NORM_SHARED_BYTES`] of shared memory; the row has `n` elements.
#[inline(always)]
unsafe fn row_scale(x: *const F32x4, n: u32, eps: f32) -> f32 {
    let mut sum = 0.0;
    let mut i = thread::thread_idx_x();
    while i < n / 4 {
        // SAFETY: `i` is below the row's vectors.
        let v = unsafe { ld(x.add(i as usize)) };
        sum = math::fma(v.x, v.x, math::fma(v.y, v.y, math::fma(v.z, v.z, math::fma(v.w, v.w, sum))));
        i += RMS_NORM_THREADS;
    }
    // SAFETY: the caller's promise.
    let sum = unsafe { block::reduce_sum(dynamic(0), sum) };
    math::rsqrt(sum / n as f32 + eps)
}

#[inline(always)]
fn scaled(v: F32x4, scale: f32, w: F32x4) -> F32x4 {
    F32x4 { x: v.x * scale * w.x, y: v.y * scale * w.y, z: v.z * scale * w.z, w: v.w * scale * w.w }
}
