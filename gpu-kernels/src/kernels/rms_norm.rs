//! Root-mean-square norm: `y[t,i] = w[i]·x[t,i] / √(mean_i x[t,i]² + ε)`.
//!
//! Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).

use cuda_std::prelude::*;

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
    let row = thread::block_idx_x() as usize * (n / 4) as usize;
    let x = x.cast::<F32x4>().add(row);
    let sum = sum_of_squares(n, |i| ld(x.add(i)));
    scale_row(x, w.cast(), y.cast::<F32x4>().add(row), n, math::rsqrt(sum / n as f32 + eps));
}

/// `x[t,i] += r[t,i]`, then [`rms_norm`] of the new `x`: the residual sum that precedes a layer's norm.
///
/// # Safety
/// As [`rms_norm`], with `r` of `rows·n` elements, 16-byte aligned; no two of `x`, `r` and `y` overlap.
#[kernel(max_threads = 256)]
pub unsafe fn rms_norm_add(x: *mut f32, r: *const f32, w: *const f32, y: *mut f32, n: u32, eps: f32) {
    let row = thread::block_idx_x() as usize * (n / 4) as usize;
    let (x, r) = (x.cast::<F32x4>().add(row), r.cast::<F32x4>().add(row));
    let sum = sum_of_squares(n, |i| {
        let (a, b) = (ld(x.add(i)), ld(r.add(i)));
        let sum = F32x4 { x: a.x + b.x, y: a.y + b.y, z: a.z + b.z, w: a.w + b.w };
        st(x.add(i), sum); // a lane reads only its own vectors again
        sum
    });
    scale_row(x, w.cast(), y.cast::<F32x4>().add(row), n, math::rsqrt(sum / n as f32 + eps));
}

/// `Σ v²` over the row's vectors, each asked for once, in every lane.
///
/// # Safety
/// The whole block comes here; [`RMS_NORM_SHARED_BYTES`] of shared memory.
#[inline(always)]
unsafe fn sum_of_squares(n: u32, vector: impl Fn(usize) -> F32x4) -> f32 {
    let mut sum = 0.0;
    let mut i = thread::thread_idx_x();
    while i < n / 4 {
        let v = vector(i as usize);
        sum = math::fma(v.x, v.x, math::fma(v.y, v.y, math::fma(v.z, v.z, math::fma(v.w, v.w, sum))));
        i += RMS_NORM_THREADS;
    }
    // SAFETY: the caller's promise.
    unsafe { block::reduce_sum(dynamic(0), sum) }
}

/// `y = x·scale·w`.
///
/// # Safety
/// The three have `n / 4` vectors; `y` is `x` or apart.
#[inline(always)]
unsafe fn scale_row(x: *const F32x4, w: *const F32x4, y: *mut F32x4, n: u32, scale: f32) {
    let mut i = thread::thread_idx_x();
    while i < n / 4 {
        // SAFETY: the caller's promise.
        unsafe {
            let (v, w) = (ld(x.add(i as usize)), ld(w.add(i as usize)));
            let scaled =
                F32x4 { x: v.x * scale * w.x, y: v.y * scale * w.y, z: v.z * scale * w.z, w: v.w * scale * w.w };
            st(y.add(i as usize), scaled);
        }
        i += RMS_NORM_THREADS;
    }
}
