//! Rotary position embedding.
//!
//! Pair `i` of a head turns by `pos·inv_freq[i]`:
//! `(a, b) → (a·cos − b·sin, a·sin + b·cos)·magnitude`.
//!
//! A pair is `(2i, 2i + 1)` or `(i, i + n_rot/2)`; dimensions from `n_rot` on pass through. Frequencies come
//! as turns per position in 64-bit fixed point, so that `pos · turns` wraps exactly: the angle is right to
//! 2⁻³² of a turn at any position, where an f32 product would be off by 0.06 rad at position 10⁶.
//!
//! Source: Su et al., RoFormer (2021); YaRN's scaling (Peng et al., 2023) is in `inv_freq` and `magnitude`.

use bytemuck::{Pod, Zeroable};
use cuda_std::prelude::*;

/// Lanes a block.
pub const THREADS: u32 = 128;

/// Scalars of [`rope`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct RopeParams {
    /// Heads in a row.
    pub n_head: u32,
    /// Dimensions of a head.
    pub head_dim: u32,
    /// Rotated dimensions, even, at most `head_dim`.
    pub n_rot: u32,
    /// 1: pairs `(2i, 2i + 1)`; 0: pairs `(i, i + n_rot/2)`.
    pub adjacent: u32,
    /// Multiplies cos and sin.
    pub magnitude: f32,
}

/// Rotates the heads of `x`, `[rows, n_head, head_dim]`, in place.
///
/// Launch: grid `[ceil(n_head·n_rot/2 / THREADS), rows, 1]`, block `THREADS`; one lane a pair.
///
/// # Safety
/// `x` has `rows·n_head·head_dim` elements, `pos` has `rows`, `turns` has `n_rot/2`.
#[kernel(max_threads = 128)]
pub unsafe fn rope(x: *mut f32, pos: *const u32, turns: *const u64, p: RopeParams) {
    let n_pair = p.n_rot / 2;
    let i = thread::index_1d();
    if i >= p.n_head * n_pair {
        return;
    }
    // SAFETY: `i < n_head · n_pair`, so there are pairs.
    let (head, pair) = unsafe { math::div_rem(i, n_pair) };
    let row = thread::block_idx_y();
    let (first, second) = if p.adjacent != 0 { (2 * pair, 2 * pair + 1) } else { (pair, pair + n_pair) };
    // SAFETY: the head and both dimensions are below their counts; this lane alone touches the pair.
    unsafe {
        let (sin, cos) = math::sin_cos(angle(ld(pos.add(row as usize)), ld(turns.add(pair as usize))));
        let (sin, cos) = (sin * p.magnitude, cos * p.magnitude);
        let base = x.add((row as usize * p.n_head as usize + head as usize) * p.head_dim as usize);
        let (a, b) = (ld(base.add(first as usize)), ld(base.add(second as usize)));
        st(base.add(first as usize), a * cos - b * sin);
        st(base.add(second as usize), a * sin + b * cos);
    }
}

/// The angle in [−π, π) at `pos`, for `turns` of 2⁻⁶⁴ of a turn a position.
#[inline(always)]
pub fn angle(pos: u32, turns: u64) -> f32 {
    /// Radians in 2⁻³² of a turn.
    const UNIT: f32 = core::f32::consts::TAU / 4_294_967_296.0;
    let phase = (u64::from(pos).wrapping_mul(turns) >> 32) as u32;
    phase as i32 as f32 * UNIT
}
