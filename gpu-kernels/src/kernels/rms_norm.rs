//! Root-mean-square norm: `y[t,i] = w[i]·x[t,i] / √(mean_i x[t,i]² + ε)`.
//!
//! Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).

use cuda_std::{pdl, prelude::*};

use crate::kernels::quantize_q8::quantize4;

/// Lanes of a block that norms a row: the same in every kernel, for the order of the sum hangs on it.
pub const RMS_NORM_THREADS: u32 = 512;
/// Its dynamic shared memory: one word a warp.
pub const RMS_NORM_SHARED_BYTES: u32 = RMS_NORM_THREADS / warp::WARP_SIZE * 4;

/// `y[t,i] = w[i]·x[t,i] / √(mean_i x[t,i]² + ε)` for the rows `t` of `x [rows, n]`.
///
/// One block a row; a lane takes every 512th vector of four elements. The row is read twice, the second time
/// from L1. Used for the layers' norms, and per head for the norms of q and k (rows = heads, n = head_dim).
///
/// # Safety
/// - grid `[rows, 1, 1]`, block `[RMS_NORM_THREADS, 1, 1]`, `RMS_NORM_SHARED_BYTES` of shared memory;
/// - `n > 0`, a multiple of 4;
/// - `x` and `y`: `rows·n` elements, `w`: `n`, all 16-byte aligned;
/// - `y` may be `x`; otherwise they do not overlap. `w` overlaps neither.
#[kernel(max_threads = 512)]
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
#[kernel(max_threads = 512)]
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

/// Vectors of a row that a lane keeps in registers: rows of up to 4096 elements are read once.
const HELD: usize = 2;

/// [`rms_norm`], and the result also as [`quantize_q8`](crate::kernels::quantize_q8) gives it: to
/// `qs: [rows, n]`, `d: [rows, n/16]`, `s: [rows, n/16]`. The weights are loaded ahead of the wait.
///
/// # Safety
/// As [`rms_norm`], with `n` a multiple of 32; the outputs have the shapes above, `qs` 16-byte aligned, and
/// overlap nothing else; no kernel writes `w`.
#[kernel(max_threads = 512)]
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
    let first = thread::block_idx_x() as usize * n as usize;
    let y = y.add(first);
    let row = NormedRow::new(w, n);
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let x = x.add(first);
    row.norm(x, row.fetch(x), eps, |at, live, v| {
        // SAFETY: the vector is in the row; the whole block comes here with consecutive vectors.
        unsafe {
            if live {
                st(y.add(at as usize).cast(), v);
            }
            quantize4(v.to_array(), live, first + at as usize, qs, d, s);
        }
    });
}

/// A row that a block of [`RMS_NORM_THREADS`] lanes norms, of which each takes every so many vectors of four elements.
pub(super) struct NormedRow {
    w: *const F32x4,
    n: u32,
    /// The weights of a lane's first vectors.
    held: Vectors,
}

/// A lane's first vectors.
pub(super) type Vectors = [F32x4; HELD];

impl NormedRow {
    /// Loads the first weights.
    ///
    /// # Safety
    /// `w` has `n` elements, a positive multiple of 4, and is 16-byte aligned.
    #[inline(always)]
    pub(super) unsafe fn new(w: *const f32, n: u32) -> Self {
        let w = w.cast::<F32x4>();
        // SAFETY: the caller's promise.
        Self { w, n, held: unsafe { first(w, n) } }
    }

    /// Loads the first vectors of the row.
    ///
    /// # Safety
    /// `x` has `n` elements and is 16-byte aligned.
    #[inline(always)]
    pub(super) unsafe fn fetch(&self, x: *const f32) -> Vectors {
        // SAFETY: the caller's promise.
        unsafe { first(x.cast(), self.n) }
    }

    /// A word that takes part of each weight that was loaded.
    #[inline(always)]
    pub(super) fn word(&self) -> u32 {
        word(&self.held)
    }

    /// Calls `finish` with each of the lane's normed vectors, behind the place of its first element and whether there
    /// is one.
    ///
    /// # Safety
    /// The whole block comes here, of [`RMS_NORM_THREADS`] lanes, with [`RMS_NORM_SHARED_BYTES`] that nobody uses; `x` has
    /// `n` elements and is 16-byte aligned, and `loaded` are those that [`NormedRow::fetch`] gave.
    #[inline(always)]
    pub(super) unsafe fn norm(
        &self,
        x: *const f32,
        loaded: Vectors,
        eps: f32,
        mut finish: impl FnMut(u32, bool, F32x4),
    ) {
        let (x, n) = (x.cast::<F32x4>(), self.n);
        // SAFETY: the caller's promise.
        let scale = unsafe { scale(squares(x, n, &loaded), n, eps) };
        for k in 0..HELD {
            let (at, live) = place(k as u32, n);
            if k as u32 * RMS_NORM_THREADS < n / 4 {
                finish(4 * at as u32, live, scaled(loaded[k], scale, self.held[k]));
            }
        }
        let mut k = HELD as u32;
        while k * RMS_NORM_THREADS < n / 4 {
            let (at, live) = place(k, n);
            // SAFETY: the vectors are in the row.
            let (v, w) = unsafe { (ld(x.add(at)), ld(self.w.add(at))) };
            finish(4 * at as u32, live, scaled(v, scale, w));
            k += 1;
        }
    }
}

/// A word that takes part of each vector.
#[inline(always)]
pub(super) fn word(vectors: &Vectors) -> u32 {
    let mut word = 0;
    for k in 0..HELD {
        word ^= vectors[k].x.to_bits();
    }
    word
}

/// The lane's `k`-th vector, and whether there is one. Lanes past the end are needed by shuffles.
#[inline(always)]
fn place(k: u32, n: u32) -> (usize, bool) {
    let i = k * RMS_NORM_THREADS + thread::thread_idx_x();
    (i.min(n / 4 - 1) as usize, i < n / 4)
}

/// The lane's first vectors of `x`; the last one for those past the end.
///
/// # Safety
/// `x` has `n` elements.
#[inline(always)]
unsafe fn first(x: *const F32x4, n: u32) -> Vectors {
    // SAFETY: the vectors are in the row.
    core::array::from_fn(|k| unsafe { ld(x.add(place(k as u32, n).0)) })
}

/// `Σ v²` over the lane's vectors, of which it has loaded the first `N`.
///
/// # Safety
/// `x` has `n` elements.
#[inline(always)]
unsafe fn squares<const N: usize>(x: *const F32x4, n: u32, loaded: &[F32x4; N]) -> f32 {
    let (mut i, mut sum) = (thread::thread_idx_x(), 0.0);
    for k in 0..N {
        sum = if i < n / 4 { add_squares(sum, loaded[k]) } else { sum };
        i += RMS_NORM_THREADS;
    }
    while i < n / 4 {
        // SAFETY: `i` is below the row's vectors.
        sum = add_squares(sum, unsafe { ld(x.add(i as usize)) });
        i += RMS_NORM_THREADS;
    }
    sum
}

/// `sum + Σ v²`.
#[inline(always)]
fn add_squares(sum: f32, v: F32x4) -> f32 {
    math::fma(v.x, v.x, math::fma(v.y, v.y, math::fma(v.z, v.z, math::fma(v.w, v.w, sum))))
}

/// `1 / √(mean x² + ε)` of a row of `n` elements, in every lane.
///
/// # Safety
/// The whole block comes here, with [`RMS_NORM_SHARED_BYTES`] of shared memory; the row has `n` elements.
#[inline(always)]
unsafe fn row_scale(x: *const F32x4, n: u32, eps: f32) -> f32 {
    // SAFETY: the caller's promise.
    let sum = unsafe { squares(x, n, &[]) };
    // SAFETY: the caller's promise.
    unsafe { scale(sum, n, eps) }
}

/// The same from each lane's share of `Σ x²`.
///
/// # Safety
/// As [`row_scale`].
#[inline(always)]
unsafe fn scale(sum: f32, n: u32, eps: f32) -> f32 {
    // SAFETY: the caller's promise.
    let sum = unsafe { block::reduce_sum(dynamic(0), sum) };
    math::rsqrt(sum / n as f32 + eps)
}

#[inline(always)]
fn scaled(v: F32x4, scale: f32, w: F32x4) -> F32x4 {
    F32x4 { x: v.x * scale * w.x, y: v.y * scale * w.y, z: v.z * scale * w.z, w: v.w * scale * w.w }
}
