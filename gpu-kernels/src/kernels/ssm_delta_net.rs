//! The gated delta rule, token by token, with the state in registers.
//!
//! For every value head, with state `S` of shape `[v, k]`, over the tokens of a sequence:
//!
//! ```text
//! q ← q / √(q² + 1e-6) / √d,  k ← k / √(k² + 1e-6),  g = softplus(alpha + dt_bias)·a,  β = σ(beta)
//! S ← e^g·S
//! δ = β·(v − S·k)
//! S ← S + δ·kᵀ
//! out = S·q
//! ```
//!
//! Rows of `S` do not depend on each other, so a warp owns a few of them for the whole span. Both products
//! are taken on the old state, `S_new·q = e^g·(S·q) + δ·(k·q)`, which makes their reductions independent.
//! Value head `h` goes with key head `h % n_head_k`: GGUF converters permute the value heads so.
//!
//! Source: Yang et al., Gated Delta Networks (2024).

use bytemuck::{Pod, Zeroable};
use cuda_std::prelude::*;

/// Lanes a block.
pub const THREADS: u32 = 256;
/// Rows of the state that a warp owns.
pub const ROWS_PER_WARP: u32 = 4;
/// Rows of the state that a block owns.
pub const ROWS_PER_BLOCK: u32 = THREADS / 32 * ROWS_PER_WARP;

/// Added to ‖x‖²: an all-zero head stays zero. The models are trained with it.
const L2_EPS: f32 = 1e-6;

/// Scalars of the delta-net kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct DeltaNetParams {
    /// Query and key heads.
    pub n_head_k: u32,
    /// Value heads.
    pub n_head_v: u32,
}

/// One body for every state size, `D = 32·E`: lane `l` of a warp holds columns `E·l ..` of its rows.
///
/// # Safety
/// As [`ssm_delta_net_128`].
#[inline(always)]
#[expect(
    clippy::too_many_arguments,
    reason = "a kernel's pointers are arguments of their own, so that they are known as global"
)]
unsafe fn ssm_delta_net<V: StateVector<E>, const E: usize>(
    qkv: *const f32,
    alpha: *const f32,
    beta: *const f32,
    dt_bias: *const f32,
    a: *const f32,
    state: *mut f32,
    span_slot: *const u32,
    span_first: *const u32,
    span_rows: *const u32,
    span_start: *const u32,
    out: *mut f32,
    p: DeltaNetParams,
) {
    const R: usize = ROWS_PER_WARP as usize;
    let d = 32 * E;
    let blocks_per_head = d as u32 / ROWS_PER_BLOCK;
    let head = (thread::block_idx_x() / blocks_per_head) as usize;
    let warp_row =
        (thread::block_idx_x() % blocks_per_head) * ROWS_PER_BLOCK + thread::thread_idx_x() / 32 * ROWS_PER_WARP;
    let span = thread::block_idx_y() as usize;
    let lane = warp::lane_id() as usize;
    let (n_head_k, n_head_v) = (p.n_head_k as usize, p.n_head_v as usize);
    // SAFETY: the launcher checks that there are key heads.
    let head_k = unsafe { math::div_rem(head as u32, p.n_head_k).1 } as usize;
    let conv_dim = (2 * n_head_k + n_head_v) * d;

    // SAFETY: head, rows, span and slot are within the caller's extents; this warp alone touches its rows
    // of the state and of the output.
    unsafe {
        let slot = ld(span_slot.add(span)) as usize;
        let state = state.add(((slot * n_head_v + head) * d + warp_row as usize) * d).cast::<V>().add(lane);
        let fresh = ld(span_start.add(span)) == 0;
        let mut s = [[0.0f32; E]; R];
        if !fresh {
            let mut r = 0;
            while r < R {
                s[r] = V::to_array(ld(state.add(r * 32)));
                r += 1;
            }
        }
        let bias = if dt_bias.is_null() { 0.0 } else { ld(dt_bias.add(head)) };
        let rate = if a.is_null() { -1.0 } else { ld(a.add(head)) };

        let first = ld(span_first.add(span)) as usize;
        let end = first + ld(span_rows.add(span)) as usize;
        let mut row = first;
        while row < end {
            let x = qkv.add(row * conv_dim);
            let q = V::to_array(ld(x.add(head_k * d).cast::<V>().add(lane)));
            let k = V::to_array(ld(x.add((n_head_k + head_k) * d).cast::<V>().add(lane)));
            let (mut qq, mut kk, mut qk) = (0.0, 0.0, 0.0);
            let mut e = 0;
            while e < E {
                qq = math::fma(q[e], q[e], qq);
                kk = math::fma(k[e], k[e], kk);
                qk = math::fma(q[e], k[e], qk);
                e += 1;
            }
            let q_scale = math::rsqrt(warp::sum(qq) + L2_EPS) * math::rsqrt(d as f32);
            let k_scale = math::rsqrt(warp::sum(kk) + L2_EPS);
            let qk = warp::sum(qk) * q_scale * k_scale;
            let decay = math::exp(math::softplus(ld(alpha.add(row * n_head_v + head)) + bias) * rate);
            let step = math::sigmoid(ld(beta.add(row * n_head_v + head)));

            let v = x.add((2 * n_head_k + head) * d + warp_row as usize);
            let o = out.add((row * n_head_v + head) * d + warp_row as usize);
            let mut r = 0;
            while r < R {
                let (mut sk, mut sq) = (0.0, 0.0);
                let mut e = 0;
                while e < E {
                    sk = math::fma(s[r][e], k[e], sk);
                    sq = math::fma(s[r][e], q[e], sq);
                    e += 1;
                }
                let sk = warp::sum(sk) * k_scale * decay;
                let sq = warp::sum(sq) * q_scale * decay;
                let delta = step * (ld(v.add(r)) - sk);
                let delta_k = delta * k_scale;
                let mut e = 0;
                while e < E {
                    s[r][e] = math::fma(delta_k, k[e], decay * s[r][e]);
                    e += 1;
                }
                if lane == 0 {
                    st(o.add(r), math::fma(delta, qk, sq));
                }
                r += 1;
            }
            row += 1;
        }
        let mut r = 0;
        while r < R {
            st(state.add(r * 32), V::from_array(s[r]));
            r += 1;
        }
    }
}

/// What a lane holds of a row of the state, as it moves in one instruction.
trait StateVector<const E: usize>: Pod {
    fn to_array(self) -> [f32; E];
    fn from_array(values: [f32; E]) -> Self;
}

impl StateVector<2> for F32x2 {
    #[inline(always)]
    fn to_array(self) -> [f32; 2] {
        F32x2::to_array(self)
    }
    #[inline(always)]
    fn from_array(values: [f32; 2]) -> Self {
        F32x2::from_array(values)
    }
}

impl StateVector<4> for F32x4 {
    #[inline(always)]
    fn to_array(self) -> [f32; 4] {
        F32x4::to_array(self)
    }
    #[inline(always)]
    fn from_array(values: [f32; 4]) -> Self {
        F32x4::from_array(values)
    }
}

macro_rules! entries {
    ($($name:ident: $vector:ty, $elems:literal, $d:literal;)+) => {$(
        #[doc = concat!("The gated delta rule with `d = ", stringify!($d), "`.")]
        ///
        /// Launch: grid `[n_head_v·d / ROWS_PER_BLOCK, spans, 1]`, block [`THREADS`].
        ///
        /// # Safety
        /// `qkv` is `[rows, (2·n_head_k + n_head_v)·d]`, 16-byte aligned; `alpha`, `beta` are
        /// `[rows, n_head_v]`; `dt_bias`, `a` have `n_head_v` elements or are null (then 0 and −1); `out` is
        /// `[rows, n_head_v·d]`; `state` is `[slots, n_head_v, d, d]`, 16-byte aligned; the `span_*` arrays have
        /// an element for each span of the grid, whose rows lie in the batch and whose slots differ.
        #[kernel(max_threads = 256)]
        pub unsafe fn $name(
            qkv: *const f32, alpha: *const f32, beta: *const f32, dt_bias: *const f32, a: *const f32,
            state: *mut f32, span_slot: *const u32, span_first: *const u32, span_rows: *const u32,
            span_start: *const u32, out: *mut f32, p: DeltaNetParams,
        ) {
            // SAFETY: the caller's promise is the same.
            unsafe {
                ssm_delta_net::<$vector, $elems>(
                    qkv, alpha, beta, dt_bias, a, state, span_slot, span_first, span_rows, span_start, out, p,
                )
            }
        }
    )+};
}

entries! {
    ssm_delta_net_64: F32x2, 2, 64;
    ssm_delta_net_128: F32x4, 4, 128;
}
