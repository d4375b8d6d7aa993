//! Joining the experts' outputs.

use cuda_std::prelude::*;

/// Lanes a block.
pub const THREADS: u32 = 256;

/// `x[m, i] += Σ_j weights[m, j]·y[m·n_used + j, i]`.
///
/// Launch: grid `[ceil(cols / THREADS), rows, 1]`, block [`THREADS`].
///
/// # Safety
/// `x` is `[rows, cols]`, `y` `[rows·n_used, cols]`, `weights` `[rows, n_used]`.
#[kernel(max_threads = 256)]
pub unsafe fn moe_weighted_acc(x: *mut f32, y: *const f32, weights: *const f32, n_used: u32, cols: u32) {
    let i = thread::index_1d();
    if i >= cols {
        return;
    }
    let row = thread::block_idx_y() as usize;
    let at = row * cols as usize + i as usize;
    // SAFETY: row, route and column are below their counts; this lane alone touches its element of `x`.
    unsafe {
        let mut sum = 0.0;
        let mut route = row * n_used as usize;
        while route < (row + 1) * n_used as usize {
            sum = math::fma(ld(weights.add(route)), ld(y.add(route * cols as usize + i as usize)), sum);
            route += 1;
        }
        st(x.add(at), ld(x.add(at)) + sum);
    }
}
