//! All of a gated delta net between its projections, for spans of a few tokens: convolution, delta rule, gated norm and
//! its int8 form in one launch.
//!
//! The equations are those of [`ssm_conv1d`](crate::kernels::ssm_conv1d), [`ssm_delta_net`](crate::kernels::ssm_delta_net)
//! and [`ssm_gated_norm`](crate::kernels::ssm_gated_norm). A block has one value head of one span and reads and writes
//! its state once. All of the state is under way before the block waits for the grid ahead, that of the projections.
//! Within a block a warp goes through the tokens alone, for rows of the state do not depend on each other.
//!
//! Value heads that share a key head convolve its channels each for themselves. They read the ring's old rows only, and
//! one of them writes the new row, which none of them reads; hence at most [`MAX_ROWS`] rows a span.

use bytemuck::{Pod, Zeroable};
use cuda_std::{pdl, prelude::*};

use crate::kernels::delta_state::{LANE_ROWS, State, dot};
use crate::kernels::quantize_q8::quantize4;
use crate::kernels::spans::{Span, Spans};
use crate::kernels::ssm_conv1d::{RING, TAPS};
use crate::kernels::ssm_delta_chunk::{L2_EPS, decay, head_rates};

/// Rows that a span may have: with so many, the rows of the ring that are written are not those that are read.
pub const MAX_ROWS: u32 = RING - (TAPS - 1);

/// Lanes of a block for states of `d`: sixteen share four rows.
pub const fn threads(d: u32) -> u32 {
    d / LANE_ROWS * 16
}

/// Dynamic shared memory: what a block has of each token, five times `d` elements and its two gates.
pub const fn shared_bytes(d: u32) -> u32 {
    4 * MAX_ROWS * (5 * d + 4)
}

/// Scalars of the kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct DeltaStepParams {
    /// Query and key heads.
    pub n_head_k: u32,
    /// Value heads.
    pub n_head_v: u32,
    /// Of the gated norm.
    pub eps: f32,
}

/// What the kernels read and write; see [`ssm_delta_step_128`].
#[derive(Clone, Copy)]
struct Operands {
    qkv: *const f32,
    z: *const f32,
    alpha: *const f32,
    beta: *const f32,
    conv1d: *const f32,
    dt_bias: *const f32,
    a: *const f32,
    norm: *const f32,
    ring: *mut f32,
    state: *mut f32,
    spans: Spans,
    out: *mut f32,
    qs: *mut i8,
    scales: *mut f32,
    sums: *mut f32,
}

/// Sums over sixteen lanes of what they hold of rows in slots: to each that of its own row.
///
/// # Safety
/// The whole warp comes here.
#[inline(always)]
unsafe fn gather(x: [f32; LANE_ROWS as usize]) -> f32 {
    // SAFETY: the whole warp.
    unsafe {
        let (a, b) = (x[0] + warp::shuffle_xor(x[2], 8), x[1] + warp::shuffle_xor(x[3], 8));
        let sum = a + warp::shuffle_xor(b, 4);
        let sum = sum + warp::shuffle_xor(sum, 2);
        sum + warp::shuffle_xor(sum, 1)
    }
}

/// Sums over sixteen lanes, in each of them.
///
/// # Safety
/// The whole warp comes here.
#[inline(always)]
unsafe fn sum16(x: f32) -> f32 {
    // SAFETY: the whole warp.
    unsafe {
        let x = x + warp::shuffle_xor(x, 8);
        let x = x + warp::shuffle_xor(x, 4);
        let x = x + warp::shuffle_xor(x, 2);
        x + warp::shuffle_xor(x, 1)
    }
}

/// What a block has of a token in shared memory: `[q | k | v | w·SiLU(z) | output before the norm]`, of `d` elements
/// each, then `e^g` and `β`.
#[derive(Clone, Copy)]
struct TokenRow {
    all: Shared<f32>,
    d: u32,
}

impl TokenRow {
    /// That of token `i` of the block's span.
    #[inline(always)]
    fn new(i: u32, d: u32) -> Self {
        TokenRow { all: dynamic::<f32>(0).add(i * (5 * d + 4)), d }
    }
    #[inline(always)]
    fn q(self) -> Shared<F32x4> {
        self.all.cast()
    }
    #[inline(always)]
    fn k(self) -> Shared<F32x4> {
        self.all.add(self.d).cast()
    }
    #[inline(always)]
    fn v(self) -> Shared<f32> {
        self.all.add(2 * self.d)
    }
    #[inline(always)]
    fn gate(self) -> Shared<f32> {
        self.all.add(3 * self.d)
    }
    #[inline(always)]
    fn out(self) -> Shared<f32> {
        self.all.add(4 * self.d)
    }
    #[inline(always)]
    fn decay_step(self) -> Shared<f32> {
        self.all.add(5 * self.d)
    }
}

/// One body for every state size, `D = 64·V`.
///
/// # Safety
/// As [`ssm_delta_step_128`].
#[inline(always)]
unsafe fn ssm_delta_step<const V: usize>(o: Operands, p: DeltaStepParams) {
    let d = 64 * V as u32;
    let (lane, head) = (thread::thread_idx_x(), thread::block_idx_x());
    // The row of a lane among the four of its sixteen lanes, and in the block.
    let r = warp::lane_id() % 16 / 4;
    let row = lane / 16 * LANE_ROWS + r;
    // SAFETY: head, rows, span and slot are within the caller's extents. This block alone touches its head's state and
    // output, and of the ring's rows those that nobody reads. What loops and barriers depend on is the same for the
    // whole block.
    unsafe {
        // The grid ahead writes neither spans nor states, so this is on its way before that has ended.
        let span = o.spans.get(thread::block_idx_y());
        let at = (span.slot as usize * p.n_head_v as usize + head as usize) * (d * d) as usize;
        let state = o.state.add(at + (lane / 16 * LANE_ROWS * d + 4 * (lane % 16)) as usize).cast::<F32x4>();
        let mut s = if span.start > 0 { State::<V>::load(state, r) } else { State::zero() };
        prepare(&o, &p, span, d);
        block::sync_threads(); // the tokens are there

        let mut i = 0;
        while i < span.rows {
            advance(&mut s, TokenRow::new(i, d), row);
            i += 1;
        }
        s.store(state, r);
        block::sync_threads(); // the outputs are there

        // A warp takes a token.
        let i = lane / warp::WARP_SIZE;
        if i < span.rows {
            let live = warp::lane_id() < d / 4;
            let column = warp::lane_id().min(d / 4 - 1);
            let token = TokenRow::new(i, d);
            let (x, gate) = (token.out().cast::<F32x4>().get(column), token.gate().cast::<F32x4>().get(column));
            let scale = math::rsqrt(warp::sum(if live { dot(x, x, 0.0) } else { 0.0 }) / d as f32 + p.eps);
            let x = F32x4 {
                x: x.x * scale * gate.x,
                y: x.y * scale * gate.y,
                z: x.z * scale * gate.z,
                w: x.w * scale * gate.w,
            };
            let at = (((span.first + i) * p.n_head_v + head) * d + 4 * column) as usize;
            if live {
                st(o.out.add(at).cast::<F32x4>(), x);
            }
            if !o.qs.is_null() {
                quantize4(x.to_array(), live, at, o.qs, o.scales, o.sums);
            }
        }
    }
}

/// Waits for the grid ahead and fills the rows of all tokens but for the outputs: three quarters of the lanes
/// convolve a channel, the last one makes an element of the output gate.
///
/// # Safety
/// The whole block comes here, as [`ssm_delta_step`] has it.
#[inline(always)]
unsafe fn prepare(o: &Operands, p: &DeltaStepParams, span: Span, d: u32) {
    let (lane, head) = (thread::thread_idx_x(), thread::block_idx_x());
    // A slot's ring and a batch's rows have fewer elements than a u32 counts.
    let conv_dim = (2 * p.n_head_k + p.n_head_v) * d;
    let part = lane / d;
    // SAFETY: as there.
    unsafe {
        let head_k = math::div_rem(head, p.n_head_k).1;
        let head_of_part = if part == 0 {
            head_k
        } else if part == 1 {
            p.n_head_k + head_k
        } else {
            2 * p.n_head_k + head
        };
        let column = head_of_part * d + lane % d;
        let ring = o.ring.add(span.slot as usize * (RING * conv_dim) as usize);
        let qkv_row = |i: u32| o.qkv.add(((span.first + i) * conv_dim + column) as usize);
        let ring_row = |pos: u32| ring.add((pos % RING * conv_dim + column) as usize);
        // The three inputs before the next one, the newest last.
        let (mut taps, mut w0, mut w1, mut w2) = (F32x4::splat(0.0), 0.0, 0.0, 0.0);
        let (mut norm, mut bias, mut rate) = (0.0, 0.0, 0.0);
        if part < 3 {
            taps = ld(o.conv1d.cast::<F32x4>().add(column as usize));
            w0 = if span.start >= 3 { ld(ring_row(span.start - 3)) } else { 0.0 };
            w1 = if span.start >= 2 { ld(ring_row(span.start - 2)) } else { 0.0 };
            w2 = if span.start >= 1 { ld(ring_row(span.start - 1)) } else { 0.0 };
        } else {
            norm = ld(o.norm.add((lane % d) as usize));
            (bias, rate) = head_rates(o.dt_bias, o.a, head as usize);
        }
        pdl::grid_dependency_wait();
        pdl::launch_dependents();

        if part < 3 {
            // One block keeps the inputs of a channel.
            let keeps = part == 2 || head == head_k;
            let mut i = 0;
            while i < span.rows {
                let x = ld(qkv_row(i));
                if keeps {
                    st(ring_row(span.start + i), x);
                }
                let sum = math::fma(taps.w, x, math::fma(taps.z, w2, math::fma(taps.y, w1, taps.x * w0)));
                TokenRow::new(i, d).all.set(lane, math::silu(sum));
                (w0, w1, w2) = (w1, w2, x);
                i += 1;
            }
        } else {
            let e = lane % d;
            let mut i = 0;
            while i < span.rows {
                let of_heads = (span.first + i) * p.n_head_v + head;
                let z = ld(o.z.add((of_heads * d + e) as usize));
                // The delta rule's gates, by different warps so that their loads do not wait for each other.
                let gates = TokenRow::new(i, d).decay_step();
                if e == 0 {
                    gates.set(0, decay(ld(o.alpha.add(of_heads as usize)), bias, rate));
                }
                if e == warp::WARP_SIZE {
                    gates.set(1, math::sigmoid(ld(o.beta.add(of_heads as usize))));
                }
                TokenRow::new(i, d).gate().set(e, norm * math::silu(z));
                i += 1;
            }
        }
    }
}

/// Takes the state over a token, and writes its output of the lane's row, `row` in the block.
///
/// # Safety
/// The whole warp comes here; the token is there.
#[inline(always)]
unsafe fn advance<const V: usize>(s: &mut State<V>, token: TokenRow, row: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        let vector = |of: Shared<F32x4>, j: usize| of.get(warp::lane_id() % 16 + 16 * j as u32);
        let (mut sq, mut sk) = ([0.0; LANE_ROWS as usize], [0.0; LANE_ROWS as usize]);
        let (mut qq, mut kk, mut qk) = (0.0, 0.0, 0.0);
        let mut j = 0;
        while j < V {
            let (q, k) = (vector(token.q(), j), vector(token.k(), j));
            s.add_times(j, q, &mut sq);
            s.add_times(j, k, &mut sk);
            (qq, kk, qk) = (dot(q, q, qq), dot(k, k, kk), dot(q, k, qk));
            j += 1;
        }
        let k_scale = math::rsqrt(sum16(kk) + L2_EPS);
        let q_scale = math::rsqrt(sum16(qq) + L2_EPS) * math::rsqrt((64 * V) as f32);
        let qk = sum16(qk) * k_scale * q_scale;
        let F32x2 { x: decay, y: step } = token.decay_step().cast::<F32x2>().get(0);
        let delta = step * (token.v().get(row) - decay * k_scale * gather(sk));
        let out = math::fma(delta, qk, decay * q_scale * gather(sq));
        if warp::lane_id().is_multiple_of(4) {
            token.out().set(row, out);
        }
        // The row of slot `s` is that of the lane whose number differs by `4·s`.
        let delta = delta * k_scale;
        let deltas = [delta, warp::shuffle_xor(delta, 4), warp::shuffle_xor(delta, 8), warp::shuffle_xor(delta, 12)];
        // The key is read again: there are no registers to keep it, for the state takes half of those that two blocks on
        // a multiprocessor leave to a lane. The write above is what keeps the compiler from keeping it.
        let mut j = 0;
        while j < V {
            s.update(j, decay, [deltas], [vector(token.k(), j)]);
            j += 1;
        }
    }
}

macro_rules! entries {
    ($($name:ident: $vectors:literal, $d:literal, $threads:literal, $blocks:literal;)+) => {$(
        #[doc = concat!("The middle of a delta net with `d = ", stringify!($d), "`.")]
        ///
        /// Launch: grid `[n_head_v, spans, 1]`, block [`threads`]`(d)`, [`shared_bytes`]`(d)` of shared memory. With a
        /// dependent launch, the grid ahead writes none of `conv1d`, `dt_bias`, `a`, `ring`, `state` and the spans.
        ///
        /// # Safety
        /// - With `conv_dim = (2·n_head_k + n_head_v)·d`: `qkv` is `[rows, conv_dim]`, `conv1d` `[conv_dim, 4]`, `ring`
        ///   `[slots, RING, conv_dim]`; `alpha`, `beta` are `[rows, n_head_v]`; `z` and `out` `[rows, n_head_v·d]`,
        ///   `norm` `[d]`, `state` `[slots, n_head_v, d, d]`; `dt_bias`, `a` have `n_head_v` elements or are null (then
        ///   0 and −1). There are key heads; a `u32` counts the elements of a slot's ring and
        ///   of all rows.
        /// - `qs` is null, or `qs`, `scales`, `sums` are as
        ///   [`quantize_q8`](crate::kernels::quantize_q8) has them for `out`.
        /// - `conv1d`, `z`, `norm`, `state`, `out` are 16-byte aligned, `qs` 4-byte; what is written overlaps nothing
        ///   else.
        /// - The `span_*` arrays have an element for each span of the grid: at most [`MAX_ROWS`] rows, which lie within
        ///   the batch and in no other span, and slots that differ.
        #[kernel(max_threads = $threads, min_blocks = $blocks)]
        pub unsafe fn $name(
            qkv: *const f32, z: *const f32, alpha: *const f32, beta: *const f32, conv1d: *const f32,
            dt_bias: *const f32, a: *const f32, norm: *const f32, ring: *mut f32, state: *mut f32,
            span_slot: *const u32, span_first: *const u32, span_rows: *const u32, span_start: *const u32,
            out: *mut f32, qs: *mut i8, scales: *mut f32, sums: *mut f32, p: DeltaStepParams,
        ) {
            let spans = Spans { slot: span_slot, first: span_first, rows: span_rows, start: span_start };
            let o = Operands {
                qkv, z, alpha, beta, conv1d, dt_bias, a, norm, ring, state, spans, out, qs, scales, sums,
            };
            // SAFETY: the caller's promise is the same.
            unsafe { ssm_delta_step::<$vectors>(o, p) }
        }
    )+};
}

entries! {
    ssm_delta_step_64: 1, 64, 256, 4;
    ssm_delta_step_128: 2, 128, 512, 2;
}
