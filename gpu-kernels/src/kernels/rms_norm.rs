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
    let lane = thread::thread_idx_x();
    let n_vec = n / 4;
    let row = thread::block_idx_x() as usize * n_vec as usize;
    let x = x.cast::<F32x4>().add(row);
    let y = y.cast::<F32x4>().add(row);
    let w = w.cast::<F32x4>();

    let mut sum = 0.0;
    let mut i = lane;
    while i < n_vec {
        let v = ld(x.add(i as usize));
        sum = math::fma(v.x, v.x, math::fma(v.y, v.y, math::fma(v.z, v.z, math::fma(v.w, v.w, sum))));
        i += RMS_NORM_THREADS;
    }
    let sum = block::reduce_sum(dynamic(0), sum);
    let scale = math::rsqrt(sum / n as f32 + eps);

    let mut i = lane;
    while i < n_vec {
        let v = ld(x.add(i as usize));
        let w = ld(w.add(i as usize));
        let scaled = F32x4 { x: v.x * scale * w.x, y: v.y * scale * w.y, z: v.z * scale * w.z, w: v.w * scale * w.w };
        st(y.add(i as usize), scaled);
        i += RMS_NORM_THREADS;
    }
}
