//! The gated delta rule over spans of many tokens, with the state in registers.
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
//! Value head `h` goes with key head `h % n_head_k`: GGUF converters permute the value heads so.
//!
//! # Why four tokens at a time, in f32
//! Rows of `S` do not depend on each other, but tokens do: a token's `δ` needs a sum over all of `k`, which is spread
//! over lanes, before the next token can begin. That chain of shuffles, not arithmetic, is what a token costs. Four
//! tokens together need one such chain: their products with the state at the chunk's beginning are independent, and
//! what they do to each other is a 4×4 matrix that [`ssm_delta_chunk`](crate::kernels::ssm_delta_chunk) has made
//! beforehand. An element of the state costs 8 + 1 + 4 instructions in four tokens instead of 16.
//!
//! Chunks of 64 on tensor cores would need three products in tf32 for each in f32 to be as exact, and about 18
//! `mma.m16n8k8` a token and 16 rows: hardly less time than the 13 FMA above at the rate that Hopper has for
//! `mma.sync`, for the price of layouts, splits and a triangular inverse of that size.
//!
//! # Who ends up with what
//! The second digit of a lane's number (see [`delta_state`](crate::kernels::delta_state)) is for tokens what the first is
//! for rows: lane `(r, t)` gets the sums of row `r` and token `t`, its slot `i` is token `i ^ t`, and what belongs in its
//! slots `(s, i)` is what lane `(s ^ r, i ^ t)` has.
//!
//! Source: Yang et al., Gated Delta Networks (2024).

use cuda_std::{cp_async, prelude::*};

use crate::kernels::delta_state::{LANE_ROWS, State};
use crate::kernels::spans::{Span, Spans, first_tile};
use crate::kernels::ssm_delta_chunk::{CHUNK, DeltaNetParams, TOKEN_VECTORS};

/// Lanes a block.
pub const THREADS: u32 = 128;
/// Rows of the state that a block owns.
pub const BLOCK_ROWS: u32 = THREADS / 16 * LANE_ROWS;

/// Tokens that are copied to shared memory together, while those before are worked on.
const STAGE: u32 = 16;
/// Vectors of a token's `v` in shared memory: the block's rows, and two to spare so that tokens lie in other banks.
const V_STRIDE: u32 = BLOCK_ROWS / 4 + 2;
/// Vectors of a chunk's coefficients.
const CHUNK_VECTORS: u32 = CHUNK * TOKEN_VECTORS;

/// Vectors of one of the two buffers.
const fn stage_vectors(d: u32) -> u32 {
    STAGE * (2 * d / 4 + V_STRIDE) + STAGE / CHUNK * CHUNK_VECTORS
}

/// Dynamic shared memory for states of `d`.
pub const fn shared_bytes(d: u32) -> u32 {
    2 * 16 * stage_vectors(d)
}

const C: usize = CHUNK as usize;
const R: usize = LANE_ROWS as usize;

/// What a block reads, from the span's first row on; strides are in vectors.
#[derive(Clone, Copy)]
struct Source {
    k: *const F32x4,
    q: *const F32x4,
    v: *const F32x4,
    row_stride: usize,
    chunks: *const F32x4,
    chunk_stride: usize,
}

/// A buffer of shared memory.
#[derive(Clone, Copy)]
struct Stage {
    k: Shared<F32x4>,
    q: Shared<F32x4>,
    v: Shared<F32x4>,
    chunks: Shared<F32x4>,
}

impl Stage {
    #[inline(always)]
    fn new(i: u32, d: u32) -> Self {
        let k = dynamic::<F32x4>(0).add(i * stage_vectors(d));
        let q = k.add(STAGE * d / 4);
        let v = q.add(STAGE * d / 4);
        Stage { k, q, v, chunks: v.add(STAGE * V_STRIDE) }
    }

    /// Starts to copy the tokens from `first` on, of `rows`; those past the end become zeros.
    ///
    /// # Safety
    /// The whole block comes here; the source has the rows; nobody reads the buffer.
    #[inline(always)]
    unsafe fn copy(self, from: &Source, first: u32, rows: u32, d: u32) {
        let (lane, n_vec) = (thread::thread_idx_x(), d / 4);
        let (token, vector) = (lane / n_vec, lane % n_vec);
        // SAFETY: rows past the end are not read.
        unsafe {
            let mut base = 0;
            while base < STAGE {
                let token = base + token;
                let at = (first + token) as usize * from.row_stride + vector as usize;
                let there = first + token < rows;
                cp_async::copy_16_or_zero(self.k, token * n_vec + vector, from.k.wrapping_add(at), there);
                cp_async::copy_16_or_zero(self.q, token * n_vec + vector, from.q.wrapping_add(at), there);
                base += THREADS / n_vec;
            }
            let (token, vector) = (lane / (BLOCK_ROWS / 4), lane % (BLOCK_ROWS / 4));
            let at = (first + token) as usize * from.row_stride + vector as usize;
            let there = first + token < rows;
            cp_async::copy_16_or_zero(self.v, token * V_STRIDE + vector, from.v.wrapping_add(at), there);
            let (chunk, vector) = (lane / CHUNK_VECTORS, lane % CHUNK_VECTORS);
            if chunk < STAGE / CHUNK {
                let there = first + chunk * CHUNK < rows;
                let at = (first / CHUNK + chunk) as usize * from.chunk_stride + vector as usize;
                cp_async::copy_16_or_zero(self.chunks, lane, from.chunks.wrapping_add(at), there);
            }
        }
        cp_async::commit();
    }
}
const _: () = assert!(STAGE * BLOCK_ROWS / 4 == THREADS, "one copy of v a lane");

/// Sums over sixteen lanes of what they hold in slots `[token][row]`: to each that of its own row and token.
///
/// # Safety
/// The whole warp comes here.
#[inline(always)]
unsafe fn gather(mut x: [[f32; R]; C]) -> f32 {
    // SAFETY: the whole warp. A lane's upper slots are its partner's lower ones.
    unsafe {
        let mut i = 0;
        while i < C {
            x[i][0] += warp::shuffle_xor(x[i][2], 8);
            x[i][1] += warp::shuffle_xor(x[i][3], 8);
            i += 1;
        }
        let mut i = 0;
        while i < C {
            x[i][0] += warp::shuffle_xor(x[i][1], 4);
            i += 1;
        }
        x[0][0] += warp::shuffle_xor(x[2][0], 2);
        x[1][0] += warp::shuffle_xor(x[3][0], 2);
        x[0][0] + warp::shuffle_xor(x[1][0], 1)
    }
}

/// One body for every state size, `D = 64·V`: a lane holds `V` vectors of each of its rows.
///
/// # Safety
/// As [`ssm_delta_net_128`].
#[inline(always)]
unsafe fn ssm_delta_net<const V: usize>(
    qkv: *const f32,
    chunks: *const f32,
    state: *mut f32,
    spans: Spans,
    out: *mut f32,
    p: DeltaNetParams,
) {
    let d = 64 * V as u32;
    let blocks_per_head = d / BLOCK_ROWS;
    let head = (thread::block_idx_x() / blocks_per_head) as usize;
    let first_row = thread::block_idx_x() % blocks_per_head * BLOCK_ROWS;
    let (n_head_k, n_head_v) = (p.n_head_k as usize, p.n_head_v as usize);
    // A lane's number among sixteen; its row and token; and its row in the block.
    let id = warp::lane_id() % 16;
    let (r, t) = (id / 4, id % 4);
    let group = thread::thread_idx_x() / 16 * LANE_ROWS;

    // SAFETY: head, rows, span and slot are within the caller's extents; this block alone touches its rows of the
    // state and of the output. Barriers and shuffles: what the loops depend on is the same for the whole block.
    unsafe {
        let head_k = math::div_rem(head as u32, p.n_head_k).1 as usize;
        let i_span = thread::block_idx_y();
        let Span { slot, first, rows, start } = spans.get(i_span);
        let n_vec = d as usize / 4;
        let row_stride = (2 * n_head_k + n_head_v) * n_vec;
        let x = qkv.cast::<F32x4>().add(first as usize * row_stride);
        let chunk_stride = n_head_v * CHUNK_VECTORS as usize;
        let source = Source {
            k: x.add((n_head_k + head_k) * n_vec),
            q: x.add(head_k * n_vec),
            v: x.add((2 * n_head_k + head) * n_vec + first_row as usize / 4),
            row_stride,
            chunks: chunks
                .cast::<F32x4>()
                .add(first_tile::<CHUNK>(first, i_span) as usize * chunk_stride + head * CHUNK_VECTORS as usize),
            chunk_stride,
        };
        let out = out.add((first as usize * n_head_v + head) * d as usize + (first_row + group + r) as usize);

        let rows_before = (slot as usize * n_head_v + head) * d as usize + (first_row + group) as usize;
        let state = state.cast::<F32x4>().add(rows_before * n_vec + id as usize);
        let mut s = if start > 0 { State::<V>::load(state, r) } else { State::zero() };

        Stage::new(0, d).copy(&source, 0, rows, d);
        let mut begin = 0;
        while begin < rows {
            let buffer = begin / STAGE % 2;
            // The other buffer was read before the barrier at the end of the round before.
            Stage::new(1 - buffer, d).copy(&source, begin + STAGE, rows, d);
            cp_async::wait::<1>();
            block::sync_threads(); // everybody's copies are there
            let stage = Stage::new(buffer, d);
            let mut token = 0;
            while token < STAGE && begin + token < rows {
                let coefficients = stage.chunks.add((token + t) * TOKEN_VECTORS);
                let value = stage.v.cast::<f32>().get((token + t) * 4 * V_STRIDE + group + r);
                let tile = |tile: Shared<F32x4>| tile.add(token * d / 4 + id);
                let result = chunk::<V>(&mut s, tile(stage.k), tile(stage.q), coefficients, value, t);
                if begin + token + t < rows {
                    st(out.add((begin + token + t) as usize * n_head_v * d as usize), result);
                }
                token += CHUNK;
            }
            block::sync_threads(); // nobody reads the buffer any more
            begin += STAGE;
        }

        s.store(state, r);
    }
}

/// Takes the state over a chunk and returns the output of the lane's row and token. `k` and `q` are at the lane's first
/// vector of the chunk's first token, `coefficients` at those of its token `t`.
///
/// # Safety
/// The whole warp comes here; the chunk is in shared memory.
#[inline(always)]
unsafe fn chunk<const V: usize>(
    s: &mut State<V>,
    k: Shared<F32x4>,
    q: Shared<F32x4>,
    coefficients: Shared<F32x4>,
    value: f32,
    t: u32,
) -> f32 {
    let vectors = |from: Shared<F32x4>, i: usize| {
        let mut vectors = [F32x4::splat(0.0); V];
        let mut j = 0;
        while j < V {
            // SAFETY: the caller's promise.
            vectors[j] = unsafe { from.get((i as u32 ^ t) * 16 * V as u32 + 16 * j as u32) };
            j += 1;
        }
        vectors
    };
    let keys = [vectors(k, 0), vectors(k, 1), vectors(k, 2), vectors(k, 3)];
    // The way from keys to the new state is the long one; the queries' products fill its gaps.
    let sk = [s.times(&keys[0]), s.times(&keys[1]), s.times(&keys[2]), s.times(&keys[3])];
    let sq = [s.times(&vectors(q, 0)), s.times(&vectors(q, 1)), s.times(&vectors(q, 2)), s.times(&vectors(q, 3))];
    // SAFETY: the caller's promise.
    unsafe {
        let sk = gather(sk);
        let [w, n, own] = [coefficients.get(0), coefficients.get(1), coefficients.get(2)];
        let base = math::fma(own.x, value, -(own.y * sk));
        let (b1, b2, b3) = (warp::shuffle_xor(base, 1), warp::shuffle_xor(base, 2), warp::shuffle_xor(base, 3));
        let step = math::fma(w.w, b3, math::fma(w.z, b2, math::fma(w.y, b1, w.x * base)));
        // Slots (token i, row s) are those of the lane whose number differs by i + 4·s.
        let mut steps = [[step; R]; C];
        let mut i = 1;
        while i < C * R {
            steps[i % C][i / C] = warp::shuffle_xor(step, i as u32);
            i += 1;
        }
        let mut j = 0;
        while j < V {
            s.update(j, own.w, steps, [keys[0][j], keys[1][j], keys[2][j], keys[3][j]]);
            j += 1;
        }
        let sq = gather(sq);
        math::fma(n.w, b3, math::fma(n.z, b2, math::fma(n.y, b1, math::fma(n.x, base, own.z * sq))))
    }
}

macro_rules! entries {
    ($($name:ident: $vectors:literal, $d:literal;)+) => {$(
        #[doc = concat!("The gated delta rule with `d = ", stringify!($d), "`.")]
        ///
        /// Launch: grid `[n_head_v·d / BLOCK_ROWS, spans, 1]`, block [`THREADS`], [`shared_bytes`]`(d)` of shared
        /// memory.
        ///
        /// # Safety
        /// - `qkv` is `[rows, (2·n_head_k + n_head_v)·d]`, 16-byte aligned; `chunks` is what
        ///   [`ssm_delta_chunk`](crate::kernels::ssm_delta_chunk) made of the same batch; `out` is
        ///   `[rows, n_head_v·d]` and `state` `[slots, n_head_v, d, d]`, 16-byte aligned, neither overlapping others.
        /// - The `span_*` arrays have an element for each span of the grid; spans follow each other from row 0 on,
        ///   end within the rows, and have slots that differ. There are key heads.
        #[kernel(max_threads = 128)]
        pub unsafe fn $name(
            qkv: *const f32, chunks: *const f32, state: *mut f32, span_slot: *const u32, span_first: *const u32,
            span_rows: *const u32, span_start: *const u32, out: *mut f32, p: DeltaNetParams,
        ) {
            let spans = Spans { slot: span_slot, first: span_first, rows: span_rows, start: span_start };
            // SAFETY: the caller's promise is the same.
            unsafe { ssm_delta_net::<$vectors>(qkv, chunks, state, spans, out, p) }
        }
    )+};
}

entries! {
    ssm_delta_net_64: 1, 64;
    ssm_delta_net_128: 2, 128;
}
