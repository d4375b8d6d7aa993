//! The gated normalisation after a delta net.
//!
//! Per head: `x[i] ← x[i]·rsqrt(mean(x²) + eps)·w[i]·SiLU(z[i])`.

use cuda_std::prelude::*;

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
        let mut sum = 0.0;
        let mut i = lane;
        while i < d {
            let value = ld(x.add(i as usize));
            sum = math::fma(value, value, sum);
            i += 32;
        }
        let scale = math::rsqrt(warp::sum(sum) / d as f32 + eps);
        let mut i = lane;
        while i < d {
            let at = i as usize;
            st(x.add(at), ld(x.add(at)) * scale * ld(w.add(at)) * math::silu(ld(z.add(at))));
            i += 32;
        }
    }
}
