//! The second half of a mixture of experts in one launch: every expert's output, their weighted sum, the residual.
//!
//! `x[t, r] += Σ_j weights[t, j]·(Σ_k w[e, r, k]·h[t·n + j, k] + bias[e, r])` with `e = ids[t, j]`, and where there is a
//! shared expert `x[t, r] += σ(gate[t])·Σ_k shared_w[r, k]·shared_h[t, k]`, without a gate `1` for `σ`.
//!
//! A warp takes one row of `x`. Rows of experts are short, so that a part of the warp is enough for each; the parts
//! take different experts, and each lane has the next chunk of four of them in flight. The sums are those of
//! [`matvec`](super::matvec) and are added in the order of `j`: to the bits of the operations one by one.

use bytemuck::{Pod, Zeroable};
use cuda_std::{pdl, prelude::*};

use super::format::{self, Format, FormatQ8, Row};
use super::matvec::{Lane, Operand, Quantized, group_sum};
use crate::blocks::GgmlType;
use crate::layout::MAX_PLANES;
use crate::params::{Activations, MatvecShape, WARP};

/// Lanes of a block.
pub const THREADS: u32 = 128;
/// Rows of `x` that a block computes.
pub const ROWS: u32 = THREADS / WARP;
/// The most experts of a token: a lane keeps the weight of one.
pub const MAX_USED: u32 = WARP;
/// Experts that a lane works on together.
const TOGETHER: usize = 4;

/// Scalars of `expert_down_*`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct ExpertDownParams {
    /// Byte offsets of the planes of `w`.
    pub planes: [u64; MAX_PLANES],
    /// Those of `shared_w`.
    pub shared_planes: [u64; MAX_PLANES],
    /// Rows of one expert's matrix: elements of a row of `x`.
    pub rows: u32,
    /// 16-byte chunks in a row of `w`.
    pub chunks: u32,
    /// [`MatvecShape::lanes_log2`] of its type with quantised activations.
    pub lanes_log2: u32,
    /// Columns of `w`.
    pub cols: u32,
    /// Experts; larger ids are read as the last.
    pub n_expert: u32,
    /// Experts of a token.
    pub n_used: u32,
    /// 16-byte chunks in a row of `shared_w`.
    pub shared_chunks: u32,
    /// Lanes that share a row of it, as the dense product has them.
    pub shared_lanes_log2: u32,
    /// Columns of `shared_w`.
    pub shared_cols: u32,
    /// Zero.
    pub reserved: u32,
}

/// The operands.
struct Pointers {
    w: *const u8,
    h: Quantized,
    ids: *const u32,
    weights: *const f32,
    bias: *const f32,
    shared_w: *const u8,
    shared_h: Quantized,
    shared_gate: *const f32,
    x: *mut f32,
}

/// The route that is a lane's `i`-th of those from the `base`-th on: of the parts of the warp, each takes the next, and
/// again. Past the last, the last: its sum is not used.
#[inline(always)]
fn route(p: &ExpertDownParams, token: u32, base: u32, i: usize) -> u32 {
    let (part, parts) = (warp::lane_id() >> p.lanes_log2, WARP >> p.lanes_log2);
    token * p.n_used + (base + i as u32 * parts + part).min(p.n_used - 1)
}

/// The block at which row `row` starts in each of a lane's experts. Of a place in every plane there would not be
/// registers enough.
///
/// # Safety
/// The token has `p.n_used` ids.
#[inline(always)]
unsafe fn first_blocks<F: Format>(
    o: &Pointers,
    p: &ExpertDownParams,
    token: u32,
    base: u32,
    row: u32,
) -> [u32; TOGETHER] {
    core::array::from_fn(|i| {
        // SAFETY: the caller's promise. A bad id becomes the last expert.
        let id = unsafe { ld(o.ids.add(route(p, token, base, i) as usize)) }.min(p.n_expert - 1);
        (id * p.rows + row) * (p.chunks / F::BLOCK_CHUNKS)
    })
}

/// A lane's next chunk of each row, `done` chunks after its first.
///
/// # Safety
/// The rows exist; `done` is a multiple of a block's chunks, and below theirs.
#[inline(always)]
unsafe fn load<F: Format>(
    o: &Pointers,
    p: &ExpertDownParams,
    place: Lane,
    first: &[u32; TOGETHER],
    done: u32,
) -> [F::Raw; TOGETHER] {
    let chunk = place.lane.min(place.chunks - 1 - done);
    // SAFETY: the caller's promise.
    core::array::from_fn(|i| unsafe {
        let row = Row::from_block::<F>(o.w, &p.planes, u64::from(first[i] + done / F::BLOCK_CHUNKS));
        F::load(&row, chunk)
    })
}

/// A lane's share of each expert's product with its own activations.
///
/// # Safety
/// The rows exist, and the activations have as many chunks.
#[inline(always)]
unsafe fn sums<F: FormatQ8>(
    o: &Pointers,
    p: &ExpertDownParams,
    place: Lane,
    first: &[u32; TOGETHER],
    token: u32,
    base: u32,
) -> [f32; TOGETHER] {
    let (start, phase) = (F::start(place.lane), place.lane % F::BLOCK_CHUNKS);
    let mut sums = [0.0; TOGETHER];
    let mut done = 0;
    // SAFETY: a live chunk exists in the activations as in the weights, and chunk 0 does in any case.
    unsafe {
        let mut raw = load::<F>(o, p, place, first, 0);
        loop {
            let live = place.lane + done < place.chunks;
            let at = format::select(live, start + done * F::CHUNK_ELEMS, 0);
            // The weights are under way; activations come from nearby, and for all experts at once there are not
            // registers enough.
            for i in 0..TOGETHER {
                let h = Operand::<F>::row(o.h, route(p, token, base, i), p.cols);
                let h = Operand::<F>::load(h, at, live);
                sums[i] += F::dot_q8(&raw[i], &h, phase);
            }
            done += 1 << place.lanes_log2;
            if done >= place.chunks {
                return sums;
            }
            raw = load::<F>(o, p, place, first, done);
        }
    }
}

/// One lane: experts of format `F`, a shared one of format `G` with `S` chunks of its row a step.
///
/// # Safety
/// As [`expert_down_q8_0`], for the formats.
#[inline(always)]
unsafe fn expert_down<F: FormatQ8, G: FormatQ8, const S: usize>(o: &Pointers, p: &ExpertDownParams) {
    let (lane, token) = (warp::lane_id(), thread::block_idx_z());
    let wanted = thread::block_idx_x() * ROWS + thread::thread_idx_x() / WARP;
    // Warps past the end compute the last row again and don't store it.
    let row = wanted.min(p.rows - 1);
    let place = Lane { lane: lane & ((1 << p.lanes_log2) - 1), lanes_log2: p.lanes_log2, chunks: p.chunks };
    let shared_lanes = 1 << p.shared_lanes_log2;
    let shared_place =
        Lane { lane: lane & (shared_lanes - 1), lanes_log2: p.shared_lanes_log2, chunks: p.shared_chunks };
    let has_shared = !o.shared_w.is_null();
    // SAFETY: the row exists, in every expert and in the shared one; the whole warp is here for the shuffles.
    unsafe {
        let shared = if has_shared {
            let rows = [Row::new::<G>(o.shared_w, &p.shared_planes, u64::from(row), p.shared_chunks)];
            Some((rows, shared_place.load_step::<G, 1, S>(&rows, 0)))
        } else {
            None
        };
        pdl::grid_dependency_wait();
        pdl::launch_dependents();

        let mut first = first_blocks::<F>(o, p, token, 0, row);
        // What a lane is asked for below: the weight and the bias of expert `lane`.
        let (mut weight, mut bias) = (0.0, 0.0);
        if lane < p.n_used {
            let route = (token * p.n_used + lane) as usize;
            weight = ld(o.weights.add(route));
            if !o.bias.is_null() {
                let id = ld(o.ids.add(route)).min(p.n_expert - 1);
                bias = ld(o.bias.add(id as usize * p.rows as usize + row as usize));
            }
        }
        let at = || o.x.add(token as usize * p.rows as usize + row as usize);
        let stored = lane == 0 && wanted < p.rows;
        let residual = if stored { ld(at()) } else { 0.0 };
        let mut shared_sum = 0.0;
        let mut shared_scale = 1.0;
        if let Some((rows, raw)) = shared {
            let h = Operand::<G>::row(o.shared_h, token, p.shared_cols);
            let [sums] = shared_place.sums::<G, _, 1, S, 1>(&rows, raw, &[h]);
            [shared_sum] = group_sum(sums, shared_lanes);
            if !o.shared_gate.is_null() {
                shared_scale = math::sigmoid(ld(o.shared_gate.add(token as usize)));
            }
        }

        let parts = WARP >> p.lanes_log2;
        let (mut total, mut base) = (0.0, 0);
        loop {
            let sums = group_sum(sums::<F>(o, p, place, &first, token, base), 1 << p.lanes_log2);
            let mut add = |i: u32, sum: f32| {
                let mut part = 0;
                while part < parts {
                    let j = base + i * parts + part;
                    let mut y = warp::shuffle_idx(sum, part << p.lanes_log2);
                    let (weight, bias) = (warp::shuffle_idx(weight, j), warp::shuffle_idx(bias, j));
                    if !o.bias.is_null() {
                        y += bias;
                    }
                    if j < p.n_used {
                        total = math::fma(weight, y, total);
                    }
                    part += 1;
                }
            };
            // Written out: an index that the compiler knows keeps the sums in registers.
            add(0, sums[0]);
            add(1, sums[1]);
            add(2, sums[2]);
            add(3, sums[3]);
            base += parts * TOGETHER as u32;
            if base >= p.n_used {
                break;
            }
            first = first_blocks::<F>(o, p, token, base, row);
        }
        if stored {
            let routed = residual + total;
            st(at(), if has_shared { math::fma(shared_scale, shared_sum, routed) } else { routed });
        }
    }
}

macro_rules! entry {
    ($ty:ident, $shared:ident, $name:ident, $blocks:tt) => {
        #[doc = concat!("[`expert_down`](self) with [`", stringify!($ty), "`](format::", stringify!($ty), ") experts and a")]
        #[doc = concat!("shared one in [`", stringify!($shared), "`](format::", stringify!($shared), ").")]
        ///
        /// `w: [n_expert, rows, cols]` planar; `qs, d, s`: `h`, `[tokens·n_used, cols]`, as `quantize_q8` makes it;
        /// `ids` and `weights`, `[tokens, n_used]`; `bias: [n_expert, rows]` or null; `shared_w: [rows, shared_cols]` or
        /// null, `shared_qs, shared_d, shared_s`: `[tokens, shared_cols]`; `shared_gate: [tokens]` or null;
        /// `x: [tokens, rows]`.
        ///
        /// Grid: `(⌈rows / ROWS⌉, 1, tokens)`, blocks of `THREADS` lanes.
        ///
        /// # Safety
        /// - `w` and `shared_w` point to whole tensors of that shape, 16-byte aligned, with `p` their planes, chunks
        ///   and lanes; nobody writes them. `w` has fewer than 2^32 blocks.
        /// - All arrays have the shapes above, quantised activations are 16-byte aligned, `x` overlaps nothing else;
        ///   `n_used` is 1 to [`MAX_USED`].
        /// - The grid before in the stream is the only one still running (programmatic dependent launch).
        #[kernel(max_threads = 128, min_blocks = $blocks)]
        pub unsafe fn $name(
            w: *const u8, qs: *const i8, d: *const f32, s: *const f32,
            ids: *const u32, weights: *const f32, bias: *const f32,
            shared_w: *const u8, shared_qs: *const i8, shared_d: *const f32, shared_s: *const f32,
            shared_gate: *const f32, x: *mut f32, p: ExpertDownParams,
        ) {
            const SHAPE: MatvecShape = MatvecShape::new(GgmlType::$shared, Activations::Q8);
            let o = Pointers {
                w, h: Quantized { qs, d, s }, ids, weights, bias, shared_w,
                shared_h: Quantized { qs: shared_qs, d: shared_d, s: shared_s }, shared_gate, x,
            };
            expert_down::<format::$ty, format::$shared, { SHAPE.steps as usize }>(&o, &p);
        }
    };
}

/// The entry points of a type: `$same` for a shared expert of the same type, `$q8_0` for one in Q8_0.
macro_rules! entries {
    ($($ty:ident: $same:ident[$same_blocks:tt] $q8_0:ident[$q8_0_blocks:tt];)+) => {$(
        entry!($ty, $ty, $same, $same_blocks);
        entry!($ty, Q8_0, $q8_0, $q8_0_blocks);
    )+};
}

// In brackets, as for `matvec`, the blocks that are to fit on a multiprocessor.
entries! {
    Q4K: expert_down_q4_k[4] expert_down_q4_k_q8_0[4];
    Q5K: expert_down_q5_k[4] expert_down_q5_k_q8_0[4];
    Q6K: expert_down_q6_k[3] expert_down_q6_k_q8_0[4];
    Q4_0: expert_down_q4_0[4] expert_down_q4_0_q8_0[4];
    Q4_1: expert_down_q4_1[4] expert_down_q4_1_q8_0[4];
    Q5_0: expert_down_q5_0[4] expert_down_q5_0_q8_0[4];
    Q5_1: expert_down_q5_1[4] expert_down_q5_1_q8_0[4];
    Mxfp4: expert_down_mxfp4[4] expert_down_mxfp4_q8_0[4];
}
entry!(Q8_0, Q8_0, expert_down_q8_0, 4);
