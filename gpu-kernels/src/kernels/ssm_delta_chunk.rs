//! What the gated delta rule has to know of a chunk of [`CHUNK`] tokens, besides the state.
//!
//! With `k̂`, `q̂` the normalised keys and queries, `D_i = Π_{l ≤ i} e^{g_l}` and `G_ij = D_i / D_j` over the tokens of
//! a chunk, unrolling the rule (see [`ssm_delta_net`](crate::kernels::ssm_delta_net)) over them gives
//!
//! ```text
//! base_i = β_i·v_i − β_i·D_i·(S₀·k̂_i)
//! δ      = T·base,                           T = (1 + M)⁻¹,  M_ij = β_i·G_ij·(k̂_i·k̂_j) for j < i
//! out_i  = D_i·(S₀·q̂_i) + Σ_{j ≤ i} N_ij·base_j,             N = (G ∘ q̂k̂ᵀ)·T
//! S_C    = D_C·S₀ + Σ_i (Σ_{j ≤ i} W_ij·base_j)·k_iᵀ,        W_ij = G_Ci·T_ij / ‖k_i‖
//! ```
//!
//! (the WY form of a product of Householder-like factors). The matrices are the same for all rows of a head's state,
//! so a warp makes them once. `G` is a product of decays, not a quotient: nothing overflows where decay is strong.
//!
//! Source: Yang et al., Gated Delta Networks (2024), section 3.3.

use bytemuck::{Pod, Zeroable};
use cuda_std::prelude::*;

use crate::kernels::spans::Spans;

/// Tokens of a chunk.
pub const CHUNK: u32 = 4;
/// 16-byte vectors a token and value head; [`CHUNK`] times as many a chunk. For token `i`, by slots `s` (token
/// `i ^ s`): `W`, `N`, and `β`, `β·D/‖k‖`, `D/(‖q‖·√d)`, `D_C`.
pub const TOKEN_VECTORS: u32 = 3;
/// Lanes a block; a warp takes one key head of one chunk.
pub const THREADS: u32 = 128;

/// Added to ‖x‖²: an all-zero head stays zero. The models are trained with it.
pub(crate) const L2_EPS: f32 = 1e-6;

const C: usize = CHUNK as usize;
/// A lower triangle of a chunk.
type Triangle = [[f32; C]; C];

/// Scalars of the delta-net kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct DeltaNetParams {
    /// Query and key heads.
    pub n_head_k: u32,
    /// Value heads.
    pub n_head_v: u32,
    /// Spans.
    pub n_spans: u32,
}

/// `e^g`.
#[inline(always)]
pub(crate) fn decay(alpha: f32, dt_bias: f32, a: f32) -> f32 {
    math::exp(math::softplus(alpha + dt_bias) * a)
}

/// `dt_bias` and `a` of a value head; null pointers stand for 0 and −1.
///
/// # Safety
/// Those that are not null have the head.
#[inline(always)]
pub(crate) unsafe fn head_rates(dt_bias: *const f32, a: *const f32, head: usize) -> (f32, f32) {
    // SAFETY: the caller's promise.
    unsafe {
        (if dt_bias.is_null() { 0.0 } else { ld(dt_bias.add(head)) }, if a.is_null() { -1.0 } else { ld(a.add(head)) })
    }
}

/// What a lane holds of a head of `32·E` elements, as it moves in one instruction.
trait HeadVector<const E: usize>: Pod {
    fn to_array(self) -> [f32; E];
}
impl HeadVector<2> for F32x2 {
    #[inline(always)]
    fn to_array(self) -> [f32; 2] {
        F32x2::to_array(self)
    }
}
impl HeadVector<4> for F32x4 {
    #[inline(always)]
    fn to_array(self) -> [f32; 4] {
        F32x4::to_array(self)
    }
}

/// `a·b` over the warp, in every lane.
///
/// # Safety
/// The whole warp comes here.
#[inline(always)]
unsafe fn dot<const E: usize>(a: &[f32; E], b: &[f32; E]) -> f32 {
    let mut sum = 0.0;
    let mut e = 0;
    while e < E {
        sum = math::fma(a[e], b[e], sum);
        e += 1;
    }
    // SAFETY: the caller's promise.
    unsafe { warp::sum(sum) }
}

/// `k̂k̂ᵀ`, `q̂k̂ᵀ` and the scales of both; a token that is not there has scales of 0.
struct Products {
    kk: Triangle,
    qk: Triangle,
    k_scale: [f32; C],
    q_scale: [f32; C],
}

impl Products {
    /// # Safety
    /// The whole warp comes here; `q` and `k` are at a lane's elements of the chunk's first token, whose next
    /// `live − 1 < C` tokens are `stride` vectors apart.
    #[inline(always)]
    unsafe fn new<V: HeadVector<E>, const E: usize>(q: *const V, k: *const V, stride: usize, live: u32) -> Self {
        let (mut qs, mut ks) = ([[0.0; E]; C], [[0.0; E]; C]);
        let mut i = 0;
        while i < C {
            let row = (i as u32).min(live - 1) as usize * stride;
            // SAFETY: a token that is there.
            unsafe {
                qs[i] = ld(q.add(row)).to_array();
                ks[i] = ld(k.add(row)).to_array();
            }
            i += 1;
        }
        let mut p = Products { kk: [[0.0; C]; C], qk: [[0.0; C]; C], k_scale: [0.0; C], q_scale: [0.0; C] };
        let inverse_root = math::rsqrt((32 * E) as f32);
        let mut i = 0;
        while i < C {
            let there = if (i as u32) < live { 1.0 } else { 0.0 };
            // SAFETY: the whole warp, and below too.
            unsafe {
                p.k_scale[i] = there * math::rsqrt(dot(&ks[i], &ks[i]) + L2_EPS);
                p.q_scale[i] = there * math::rsqrt(dot(&qs[i], &qs[i]) + L2_EPS) * inverse_root;
            }
            let mut j = 0;
            while j <= i {
                // SAFETY: as above.
                unsafe {
                    p.qk[i][j] = dot(&qs[i], &ks[j]) * p.q_scale[i] * p.k_scale[j];
                    if j < i {
                        p.kk[i][j] = dot(&ks[i], &ks[j]) * p.k_scale[i] * p.k_scale[j];
                    }
                }
                j += 1;
            }
            i += 1;
        }
        p
    }

    /// The vectors of a value head with these decays and steps, [`TOKEN_VECTORS`] a token.
    #[inline(always)]
    fn vectors(&self, decay: [f32; C], beta: [f32; C]) -> [[F32x4; TOKEN_VECTORS as usize]; C] {
        // G, its diagonal 1; and D, the products from the chunk's beginning.
        let mut g: Triangle = [[0.0; C]; C];
        let mut d = [0.0; C];
        let mut i = 0;
        while i < C {
            d[i] = if i > 0 { decay[i] * d[i - 1] } else { decay[i] };
            g[i][i] = 1.0;
            let mut j = 0;
            while j < i {
                g[i][j] = decay[i] * g[i - 1][j];
                j += 1;
            }
            i += 1;
        }
        // T by forward substitution, row after row: T_ij = −Σ_{j ≤ l < i} M_il·T_lj; then N.
        let (mut t, mut n): (Triangle, Triangle) = ([[0.0; C]; C], [[0.0; C]; C]);
        let mut i = 0;
        while i < C {
            t[i][i] = 1.0;
            let mut j = 0;
            while j < i {
                let mut l = j;
                while l < i {
                    t[i][j] = math::fma(-beta[i] * g[i][l] * self.kk[i][l], t[l][j], t[i][j]);
                    l += 1;
                }
                j += 1;
            }
            let mut j = 0;
            while j <= i {
                let mut l = j;
                while l <= i {
                    n[i][j] = math::fma(g[i][l] * self.qk[i][l], t[l][j], n[i][j]);
                    l += 1;
                }
                j += 1;
            }
            i += 1;
        }
        let mut out = [[F32x4::splat(0.0); TOKEN_VECTORS as usize]; C];
        let mut i = 0;
        while i < C {
            let to_end = g[C - 1][i] * self.k_scale[i];
            out[i] = [
                F32x4 {
                    x: to_end * t[i][i],
                    y: to_end * t[i][i ^ 1],
                    z: to_end * t[i][i ^ 2],
                    w: to_end * t[i][i ^ 3],
                },
                F32x4 { x: n[i][i], y: n[i][i ^ 1], z: n[i][i ^ 2], w: n[i][i ^ 3] },
                F32x4 { x: beta[i], y: beta[i] * d[i] * self.k_scale[i], z: d[i] * self.q_scale[i], w: d[C - 1] },
            ];
            i += 1;
        }
        out
    }
}

/// One body for every state size, `D = 32·E`.
///
/// # Safety
/// As [`ssm_delta_chunk_128`].
#[inline(always)]
#[expect(
    clippy::too_many_arguments,
    reason = "a kernel's pointers are arguments of their own, so that they are known as global"
)]
unsafe fn ssm_delta_chunk<V: HeadVector<E>, const E: usize>(
    qkv: *const f32,
    alpha: *const f32,
    beta: *const f32,
    dt_bias: *const f32,
    a: *const f32,
    spans: Spans,
    chunks: *mut f32,
    p: DeltaNetParams,
) {
    let head_k = thread::index_1d() / warp::WARP_SIZE;
    let (lane, tile) = (warp::lane_id(), thread::block_idx_y());
    let (n_head_k, n_head_v) = (p.n_head_k as usize, p.n_head_v as usize);
    let stride = (2 * n_head_k + n_head_v) * 32;
    // SAFETY: key head, chunk and its rows are within the caller's extents; this warp alone writes the vectors of its
    // key head's value heads. Whole warps return.
    unsafe {
        let (span, row) = spans.of_tile::<CHUNK>(p.n_spans, tile);
        if row >= span.rows || head_k >= p.n_head_k {
            return;
        }
        let (row, live) = ((span.first + row) as usize, span.rows - row);
        let head = qkv.cast::<V>().add(row * stride + lane as usize);
        let (q, k) = (head.add(head_k as usize * 32), head.add((n_head_k + head_k as usize) * 32));
        let products = Products::new(q, k, stride, live.min(CHUNK));

        // A lane takes a value head of this key head.
        let mut head = (head_k + lane * p.n_head_k) as usize;
        while head < n_head_v {
            let (bias, rate) = head_rates(dt_bias, a, head);
            let (mut decays, mut steps) = ([1.0; C], [0.0; C]);
            let mut i = 0;
            while i < C {
                if (i as u32) < live {
                    let at = (row + i) * n_head_v + head;
                    decays[i] = decay(ld(alpha.add(at)), bias, rate);
                    steps[i] = math::sigmoid(ld(beta.add(at)));
                }
                i += 1;
            }
            let vectors = products.vectors(decays, steps);
            let n = C * TOKEN_VECTORS as usize;
            let to = chunks.cast::<F32x4>().add((tile as usize * n_head_v + head) * n);
            let mut i = 0;
            while i < C {
                let mut j = 0;
                while j < TOKEN_VECTORS as usize {
                    st(to.add(i * TOKEN_VECTORS as usize + j), vectors[i][j]);
                    j += 1;
                }
                i += 1;
            }
            head += 32 * n_head_k;
        }
    }
}

macro_rules! entries {
    ($($name:ident: $vector:ty, $elems:literal, $d:literal;)+) => {$(
        #[doc = concat!("The chunks of a delta net with `d = ", stringify!($d), "`.")]
        ///
        /// Launch: grid `[ceil(32·n_head_k / THREADS), n_tiles(CHUNK, rows, n_spans), 1]`, block [`THREADS`].
        ///
        /// # Safety
        /// - `qkv` is `[rows, (2·n_head_k + n_head_v)·d]`, 16-byte aligned; `alpha`, `beta` are `[rows, n_head_v]`;
        ///   `dt_bias`, `a` have `n_head_v` elements or are null (then 0 and −1).
        /// - `chunks` is `[n_tiles(CHUNK, rows, n_spans), n_head_v, CHUNK, 4·TOKEN_VECTORS]`, 16-byte aligned, and
        ///   overlaps nothing else; there are key heads.
        /// - The `span_*` arrays have `n_spans > 0` elements; spans follow each other from row 0 on and end within the
        ///   rows.
        #[kernel(max_threads = 128)]
        pub unsafe fn $name(
            qkv: *const f32, alpha: *const f32, beta: *const f32, dt_bias: *const f32, a: *const f32,
            span_slot: *const u32, span_first: *const u32, span_rows: *const u32, span_start: *const u32,
            chunks: *mut f32, p: DeltaNetParams,
        ) {
            let spans = Spans { slot: span_slot, first: span_first, rows: span_rows, start: span_start };
            // SAFETY: the caller's promise is the same.
            unsafe { ssm_delta_chunk::<$vector, $elems>(qkv, alpha, beta, dt_bias, a, spans, chunks, p) }
        }
    )+};
}

entries! {
    ssm_delta_chunk_64: F32x2, 2, 64;
    ssm_delta_chunk_128: F32x4, 4, 128;
}
