//! Joining the experts' outputs.

use cuda_std::{pdl, prelude::*};

/// Lanes a block.
pub const THREADS: u32 = 256;
/// Experts whose outputs a lane loads together.
const TOGETHER: u32 = 8;

/// `x[m, i] += Σ_j weights[m, j]·y[m·n_used + j, i]`, and with a shared expert `x[m, i] += σ(gate[m])·shared[m, i]`,
/// without a gate `1` for `σ`.
///
/// Launch: grid `[ceil(cols / THREADS), rows, 1]`, block [`THREADS`].
///
/// # Safety
/// `x` is `[rows, cols]`, `y` `[rows·n_used, cols]`, `weights` `[rows, n_used]`, `shared` `[rows, cols]` or null, `gate`
/// `[rows]` or null; `n_used` is not 0.
#[kernel(max_threads = 256)]
pub unsafe fn moe_weighted_acc(
    x: *mut f32,
    y: *const f32,
    weights: *const f32,
    shared: *const f32,
    gate: *const f32,
    n_used: u32,
    cols: u32,
) {
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let i = thread::index_1d();
    if i >= cols {
        return;
    }
    let row = thread::block_idx_y() as usize;
    let at = row * cols as usize + i as usize;
    // SAFETY: row, route and column are below their counts; this lane alone touches its element of `x`.
    unsafe {
        let before = ld(x.add(at));
        let (weights, y) =
            (weights.add(row * n_used as usize), y.add(row * n_used as usize * cols as usize + i as usize));
        let mut sum = 0.0;
        let mut first = 0;
        while first < n_used {
            // All loads before the first use. Past the last, the last: it counts as nothing.
            let terms: [[f32; 2]; TOGETHER as usize] = core::array::from_fn(|j| {
                let j = (first + j as u32).min(n_used - 1) as usize;
                [ld(weights.add(j)), ld(y.add(j * cols as usize))]
            });
            for j in 0..TOGETHER {
                let [weight, y] = terms[j as usize];
                sum = core::hint::select_unpredictable(first + j < n_used, math::fma(weight, y, sum), sum);
            }
            first += TOGETHER;
        }
        let mut sum = before + sum;
        if !shared.is_null() {
            let scale = if gate.is_null() { 1.0 } else { math::sigmoid(ld(gate.add(row))) };
            sum = math::fma(scale, ld(shared.add(at)), sum);
        }
        st(x.add(at), sum);
    }
}
