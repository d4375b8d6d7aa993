//! The first half of a feed-forward network in one launch: gate, up, activation and its int8 form.
//!
//! `h[t·n + j, r] = act(Σ_k gate[e, r, k]·x[t, k] + gate_bias[e, r], Σ_k up[e, r, k]·x[t, k] + up_bias[e, r])` with the
//! expert `e` that comes `j`-th among the `n` chosen of token `t`, or the only one; of `h` the quantised form is kept. A
//! block computes 32 rows of one expert, both matrices, which is what shares a scale.
//!
//! Which experts are chosen every block finds out by itself from the router's logits: less than a launch costs.
//! One block writes them down. Beside the routed experts, blocks of their own activate a shared expert, whose gate
//! and up are there already.
//!
//! The products are [`matvec`](super::matvec)'s, to the same bits.

use bytemuck::{Pod, Zeroable};
use cuda_std::{pdl, prelude::*};

use super::format::{self, FormatQ8, Row};
use super::gated_act::{swiglu_oai_value, swiglu_value};
use super::matvec::{Lane, Operand, Quantized, group_sum};
use super::quantize_q8::quantize4;
use super::softmax_topk::{FEW, SoftmaxTopkParams, choose};
use crate::layout::MAX_PLANES;
use crate::params::{Q8_COLS, WARP};

/// Lanes of a block: 16 warps take its 64 rows at once, four each.
pub const THREADS: u32 = 512;
/// The same where there are more blocks than multiprocessors: one block's loads run beside another's arithmetic.
pub const THREADS_CROWDED: u32 = 256;
/// Rows of each matrix that a block computes.
pub const ROWS: u32 = Q8_COLS;
/// Shared memory: a sum for each row of both, and the expert.
pub const SHARED_BYTES: u32 = (2 * ROWS + 1) * 4;
/// The most experts to choose from.
pub const MAX_EXPERTS: u32 = 32 * FEW;
/// Rows that a group of lanes computes together.
const GROUP: usize = 4;
/// Bytes that one prefetch brings.
const LINE_BYTES: u32 = 128;

/// Scalars of `gate_up_*`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct GateUpParams {
    /// Byte offsets of the planes, which gate and up have in common.
    pub planes: [u64; MAX_PLANES],
    /// Where the matrices lie that the chosen experts are multiplied with next, to be brought to the second-level
    /// cache: address and byte offset of each plane of expert 0, or 0.
    pub next: [u64; MAX_PLANES],
    /// Bytes of one expert in each of those planes.
    pub next_bytes: [u32; MAX_PLANES],
    /// Rows of one expert's gate, a multiple of [`ROWS`].
    pub rows: u32,
    /// 16-byte chunks in a row.
    pub chunks: u32,
    /// [`MatvecShape::lanes_log2`](crate::params::MatvecShape::lanes_log2) of the type with quantised activations.
    pub lanes_log2: u32,
    /// Columns.
    pub cols: u32,
    /// Experts.
    pub n_expert: u32,
    /// Experts chosen for a token.
    pub n_used: u32,
    /// As in [`SoftmaxTopkParams`].
    pub over_all: u32,
    /// Rows of the shared expert, a multiple of 32, or 0.
    pub shared_rows: u32,
    /// 1: the clamped activation of gpt-oss.
    pub oai: u32,
    /// Zero.
    pub reserved: u32,
}

/// The operands.
struct Pointers {
    gate: *const u8,
    up: *const u8,
    x: Quantized,
    logits: *const f32,
    router_bias: *const f32,
    gate_bias: *const f32,
    up_bias: *const f32,
    ids: *mut u32,
    weights: *mut f32,
    h: Q8Mut,
    shared_gate: *const f32,
    shared_up: *const f32,
    shared_h: Q8Mut,
}

/// Where quantised results go.
#[derive(Clone, Copy)]
pub(super) struct Q8Mut {
    pub(super) qs: *mut i8,
    pub(super) d: *mut f32,
    pub(super) s: *mut f32,
}

/// What the sums become.
#[derive(Clone, Copy)]
pub(super) struct Hidden {
    /// `[n_expert, rows]` or null.
    pub(super) gate_bias: *const f32,
    /// `[n_expert, rows]` or null.
    pub(super) up_bias: *const f32,
    /// `[routes, rows]`.
    pub(super) h: Q8Mut,
    /// Rows of one expert.
    pub(super) rows: u32,
    /// As in [`GateUpParams`].
    pub(super) oai: u32,
}

#[inline(always)]
pub(super) fn activate(oai: u32, gate: f32, up: f32) -> f32 {
    if oai != 0 { swiglu_oai_value(gate, up) } else { swiglu_value(gate, up) }
}

/// One lane, with `S` chunks of a row a step.
///
/// # Safety
/// As [`gate_up_q8_0`], for the format.
#[inline(always)]
unsafe fn gate_up<F: FormatQ8, const S: usize>(o: &Pointers, p: &GateUpParams) {
    let (block, slot, token) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z());
    let first = block * ROWS;
    // SAFETY: the caller's promise; a block leaves as a whole. The rows of the others exist, and so does the expert.
    unsafe {
        let mut expert = 0;
        if !o.logits.is_null() {
            pdl::grid_dependency_wait();
            pdl::launch_dependents();
            if slot == p.n_used {
                return shared_expert(o, p, block, token);
            }
            if first >= p.rows {
                return;
            }
            expert = choose_expert(o, p, slot, token);
        }
        products::<F, S>(o, p, expert, first, token);
        prefetch_next(p, expert, block);
        block::sync_threads(); // all sums are written before they are read
        let hidden = Hidden { gate_bias: o.gate_bias, up_bias: o.up_bias, h: o.h, rows: p.rows, oai: p.oai };
        finish(&hidden, expert, first, 1, |_| token * p.n_used + slot);
    }
}

/// The expert of a slot, in every lane of the block. One block writes down all of the token's.
///
/// # Safety
/// All of the block is here; the logits have the token's row, `ids` and `weights` have it, too.
#[inline(always)]
unsafe fn choose_expert(o: &Pointers, p: &GateUpParams, slot: u32, token: u32) -> u32 {
    let scratch = dynamic::<u32>(2 * ROWS * 4);
    let route = SoftmaxTopkParams { rows: 1, n_expert: p.n_expert, n_used: p.n_used, over_all: p.over_all };
    // SAFETY: the first warp as a whole; the caller's promise.
    unsafe {
        if thread::thread_idx_x() < WARP {
            let logits = o.logits.add(token as usize * p.n_expert as usize);
            let (id, weight) = choose::<{ FEW as usize }>(logits, o.router_bias, &route);
            let lane = warp::lane_id();
            if slot == 0 && thread::block_idx_x() == 0 && lane < p.n_used {
                let to = (token * p.n_used + lane) as usize;
                st(o.ids.add(to), id);
                st(o.weights.add(to), weight);
            }
            if lane == slot {
                scratch.set(0, id);
            }
        }
        block::sync_threads(); // the expert is known to all
        scratch.get(0)
    }
}

/// The sums of 32 rows of gate and of up, to shared memory.
///
/// # Safety
/// The rows and the expert exist; all of the block is here.
#[inline(always)]
unsafe fn products<F: FormatQ8, const S: usize>(o: &Pointers, p: &GateUpParams, expert: u32, first: u32, token: u32) {
    let (thread, lanes) = (thread::thread_idx_x(), 1u32 << p.lanes_log2);
    let place = Lane { lane: thread & (lanes - 1), lanes_log2: p.lanes_log2, chunks: p.chunks };
    let group = (thread >> p.lanes_log2) * GROUP as u32;
    let step = (thread::block_dim_x() >> p.lanes_log2) * GROUP as u32;
    let expert_row = u64::from(expert) * u64::from(p.rows) + u64::from(first);
    let sums = dynamic::<f32>(0);
    let mut base = 0;
    while base < 2 * ROWS {
        // Rows 0 to 31 are gate's, the others up's; four never belong to both. Groups past the end compute the last
        // rows again and don't store them: all lanes take part in shuffles.
        let at = (base + group).min(2 * ROWS - GROUP as u32);
        let w = if at < ROWS { o.gate } else { o.up };
        // SAFETY: the rows exist and have `p.chunks` chunks, as `x` has; the whole warp is here.
        unsafe {
            let rows: [Row; GROUP] = core::array::from_fn(|r| {
                Row::new::<F>(w, &p.planes, expert_row + u64::from(at % ROWS) + r as u64, p.chunks)
            });
            let raw = place.load_step::<F, GROUP, S>(&rows, 0);
            if o.logits.is_null() && base == 0 {
                pdl::grid_dependency_wait();
                pdl::launch_dependents();
            }
            let x = Operand::<F>::row(o.x, token, p.cols);
            let [row_sums] = place.sums::<F, _, GROUP, S, 1>(&rows, raw, &[x]);
            let row_sums = group_sum(row_sums, lanes);
            if place.lane == 0 && base + group < 2 * ROWS {
                // Written out: an index that the compiler knows keeps the sums in registers.
                sums.set(at, row_sums[0]);
                sums.set(at + 1, row_sums[1]);
                sums.set(at + 2, row_sums[2]);
                sums.set(at + 3, row_sums[3]);
            }
        }
        base += step;
    }
}

/// Bias, activation and quantisation of the block's 32 rows for `n` ≤ 4 tokens, whose sums follow each other: the first
/// warp's business. `route` says which row of `h` is a token's.
///
/// # Safety
/// All of the block is here and its sums are written; `h` has the routes, the biases have the expert.
#[inline(always)]
pub(super) unsafe fn finish(o: &Hidden, expert: u32, first: u32, n: u32, route: impl Fn(u32) -> u32) {
    if thread::thread_idx_x() >= WARP {
        return;
    }
    let lane = warp::lane_id();
    let (token, at) = (lane / 8, 4 * (lane % 8));
    let (live, sums) = (token < n, dynamic::<f32>(token * 2 * ROWS * 4));
    // SAFETY: the caller's promise; the whole warp is here, and eight lanes have the rows of a token.
    unsafe {
        let value = |i: u32| {
            if !live {
                return 0.0;
            }
            let (mut gate, mut up) = (sums.get(i), sums.get(ROWS + i));
            let row = expert as usize * o.rows as usize + (first + i) as usize;
            if !o.gate_bias.is_null() {
                gate += ld(o.gate_bias.add(row));
            }
            if !o.up_bias.is_null() {
                up += ld(o.up_bias.add(row));
            }
            activate(o.oai, gate, up)
        };
        let values = [value(at), value(at + 1), value(at + 2), value(at + 3)];
        let to = route(if live { token } else { 0 }) as usize * o.rows as usize + (first + at) as usize;
        quantize4(values, live, to, o.h.qs, o.h.d, o.h.s);
    }
}

/// The activation of the shared expert, four elements a lane.
///
/// # Safety
/// All of the block is here; the shared operands have the token's row of `p.shared_rows` elements.
#[inline(always)]
unsafe fn shared_expert(o: &Pointers, p: &GateUpParams, block: u32, token: u32) {
    let i = 4 * (block * thread::block_dim_x() + thread::thread_idx_x());
    // Lanes past the end are needed by the shuffles.
    let live = i < p.shared_rows;
    let at = token as usize * p.shared_rows as usize + i.min(p.shared_rows - 4) as usize;
    // SAFETY: `at + 4` is in the row; four lanes have a block, all live or none.
    unsafe {
        let gate: F32x4 = ld(o.shared_gate.add(at).cast());
        let up: F32x4 = ld(o.shared_up.add(at).cast());
        let (gate, up) = (gate.to_array(), up.to_array());
        let value = |i: usize| activate(p.oai, gate[i], up[i]);
        let values = [value(0), value(1), value(2), value(3)];
        quantize4(values, live, at, o.shared_h.qs, o.shared_h.d, o.shared_h.s);
    }
}

/// Starts to bring this block's share of the expert's next matrix to the second-level cache. The next grid learns the
/// experts only when this one has ended, while the memory is idle.
///
/// # Safety
/// None beyond addresses of this device's memory.
#[inline(always)]
unsafe fn prefetch_next(p: &GateUpParams, expert: u32, block: u32) {
    let step = p.rows / ROWS * thread::block_dim_x();
    let plane = |next: u64, bytes: u32| {
        let mut line = block * thread::block_dim_x() + thread::thread_idx_x();
        while line < bytes.div_ceil(LINE_BYTES) {
            let at = next + u64::from(expert) * u64::from(bytes) + u64::from(line * LINE_BYTES);
            // SAFETY: a prefetch has no effect on memory.
            unsafe { mem::prefetch_l2(core::ptr::with_exposed_provenance::<u8>(at as usize)) };
            line += step;
        }
    };
    // Written out: an index that the compiler knows keeps the parameters out of local memory.
    plane(p.next[0], p.next_bytes[0]);
    plane(p.next[1], p.next_bytes[1]);
    plane(p.next[2], p.next_bytes[2]);
    plane(p.next[3], p.next_bytes[3]);
}

macro_rules! entries {
    ($($ty:ident: $name:ident[$steps:literal];)+) => {$(
        #[doc = concat!("[`gate_up`](self) with [`", stringify!($ty), "`](format::", stringify!($ty), ") weights.")]
        ///
        /// `gate` and `up`: `[n_expert, rows, cols]` planar; `qs, d, s`: `x`, `[tokens, cols]`, as `quantize_q8` makes
        /// it; `gate_bias`, `up_bias`: `[n_expert, rows]` or null; `h_*`: `h`, `[tokens·n_used, rows]`, of the same form.
        ///
        /// With experts to choose from `logits: [tokens, n_expert]`, `router_bias: [n_expert]` or null, `ids` and `weights`,
        /// `[tokens, n_used]`, as `softmax_topk` writes them; `shared_gate` and `shared_up`, `[tokens, shared_rows]`, with
        /// their result `shared_*` where `shared_rows` is not 0. Without, `logits` is null, and the weights' first
        /// chunks are loaded ahead of the wait.
        ///
        /// Grid: `(max(rows / ROWS, ⌈shared_rows / (4·block)⌉), n_used, or one more with a shared expert, tokens)`,
        /// blocks of `THREADS` lanes or `THREADS_CROWDED`, `SHARED_BYTES` of shared memory.
        ///
        /// # Safety
        /// - `gate` and `up` point to whole tensors of that shape, 16-byte aligned, `rows` a multiple of [`ROWS`], with
        ///   `p.planes` the plane offsets of both; nobody writes them.
        /// - All arrays have the shapes above; `cols` and `shared_rows` are multiples of 32; activations are 16-byte
        ///   aligned. Results overlap nothing.
        /// - `n_used` is at least 1, at most 32 and `n_expert`, and that at most [`MAX_EXPERTS`]; without logits both are
        ///   1, and there is no shared expert.
        /// - The grid before in the stream is the only one still running (programmatic dependent launch).
        #[kernel(max_threads = 512, min_blocks = 1)]
        pub unsafe fn $name(
            gate: *const u8, up: *const u8, qs: *const i8, d: *const f32, s: *const f32,
            logits: *const f32, router_bias: *const f32, gate_bias: *const f32, up_bias: *const f32,
            ids: *mut u32, weights: *mut f32, h_qs: *mut i8, h_d: *mut f32, h_s: *mut f32,
            shared_gate: *const f32, shared_up: *const f32,
            shared_qs: *mut i8, shared_d: *mut f32, shared_s: *mut f32, p: GateUpParams,
        ) {
            let o = Pointers {
                gate, up, x: Quantized { qs, d, s }, logits, router_bias, gate_bias, up_bias, ids, weights,
                h: Q8Mut { qs: h_qs, d: h_d, s: h_s }, shared_gate, shared_up,
                shared_h: Q8Mut { qs: shared_qs, d: shared_d, s: shared_s },
            };
            gate_up::<format::$ty, $steps>(&o, &p);
        }
    )+};
}

// In brackets, chunks of a row that a lane loads before it uses the first.
entries! {
    Q4K: gate_up_q4_k[2];
    Q5K: gate_up_q5_k[1];
    Q6K: gate_up_q6_k[1];
    Q8_0: gate_up_q8_0[2];
    Q4_0: gate_up_q4_0[2];
    Q4_1: gate_up_q4_1[2];
    Q5_0: gate_up_q5_0[1];
    Q5_1: gate_up_q5_1[1];
    Mxfp4: gate_up_mxfp4[2];
}
