//! Float weights times many tokens: `y[t, r] (= or +=) bias[r] + Σ_k w[r, k]·x[t, k]`, all in f32.
//!
//! Such weights are few and sensitive (routers, gates), so nothing is rounded to fewer bits, and the sums are plain
//! fused multiply-adds; [`matmul_split`](super::matmul_split) is faster and nearly as exact. A block computes
//! 32 rows by 64 tokens, from tiles in shared memory; the next tiles are loaded while it does. A lane has two rows
//! and four tokens, and adds along `k` in order.
//!
//! A few tokens would leave most of a tile idle, and a matrix of so few rows most of the device. For them a warp
//! walks along two rows, which its lanes share, with eight tokens at a time.

use bytemuck::{Pod, Zeroable};
use cuda_std::{pdl, prelude::*};

use super::format::{self, Format, Row};
use crate::layout::MAX_PLANES;

/// Lanes of a block.
pub const THREADS: u32 = 256;
/// Rows of a tile.
pub const ROWS: u32 = 32;
/// Tokens of a tile.
pub const TOKENS: u32 = 64;
/// Elements of a row that are in shared memory at a time.
const STEP: u32 = 32;
/// Elements of a load of `x`.
const QUAD: u32 = 4;
/// Loads of `x` of a lane each step.
const X_LOADS: usize = (TOKENS * STEP / QUAD / THREADS) as usize;
/// Bytes of shared memory: `w` as `[STEP, ROWS]`, `x` as `[STEP, TOKENS]`.
pub const SHARED_BYTES: u32 = 4 * STEP * (ROWS + TOKENS);

/// Lanes of a block for few tokens.
pub const FEW_THREADS: u32 = 128;
/// Rows of such a block, two a warp.
pub const FEW_ROWS: u32 = 2 * FEW_THREADS / 32;
/// Its tokens.
pub const FEW_TOKENS: u32 = 8;

/// Parameters of `matmul_f32` and its neighbours.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct MatmulFloatParams {
    /// Rows of the matrix.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
    /// Tokens.
    pub tokens: u32,
    /// Elements from one row of `x` to the next.
    pub x_stride: u32,
    /// Elements from one row of `y` to the next.
    pub y_stride: u32,
    /// 1: `y += …`.
    pub accumulate: u32,
}

/// The most quads of a chunk: f16 has eight elements in 16 bytes.
const MAX_QUADS: usize = 2;

/// What a lane brings each step.
struct Loader<F: Format> {
    /// One row of the weights.
    w: Row,
    chunks: u32,
    tile_row: u32,
    chunk: u32,
    /// Quads of `x`, of one token, two steps of `THREADS` apart.
    x: *const F32x4,
    token: u32,
    quad: u32,
    n_quads: u32,
    of: core::marker::PhantomData<F>,
}

impl<F: Format> Loader<F> {
    /// # Safety
    /// As [`matmul_f32`].
    #[inline(always)]
    unsafe fn new(w: *const u8, x: *const f32, p: &MatmulFloatParams) -> Self {
        let thread = thread::thread_idx_x();
        let (tile_row, token) = (thread % ROWS, thread % TOKENS);
        let row = (thread::block_idx_y() * ROWS + tile_row).min(p.rows - 1);
        let x_row = (thread::block_idx_x() * TOKENS + token).min(p.tokens - 1);
        let chunks = p.cols / F::CHUNK_ELEMS;
        // SAFETY: row and token exist; float types have one plane, at the start.
        unsafe {
            Loader {
                w: Row::new::<F>(w, &[0; MAX_PLANES], u64::from(row), chunks),
                chunks,
                tile_row,
                chunk: thread / ROWS,
                x: x.add(x_row as usize * p.x_stride as usize).cast(),
                token,
                quad: thread / TOKENS,
                n_quads: p.cols / QUAD,
                of: core::marker::PhantomData,
            }
        }
    }

    /// The lane's chunk of step `step`, if it has one and the row is so long.
    #[inline(always)]
    fn live(&self, step: u32) -> bool {
        self.chunk < const { STEP / F::CHUNK_ELEMS } && self.at(step) < self.chunks
    }

    #[inline(always)]
    fn at(&self, step: u32) -> u32 {
        step * const { STEP / F::CHUNK_ELEMS } + self.chunk
    }

    /// # Safety
    /// As [`matmul_f32`].
    #[inline(always)]
    unsafe fn load_w(&self, step: u32) -> F::Raw {
        // SAFETY: a live chunk exists, and chunk 0 does in any case.
        unsafe { F::load(&self.w, format::select(self.live(step), self.at(step), 0)) }
    }

    /// # Safety
    /// As [`matmul_f32`].
    #[inline(always)]
    unsafe fn load_x(&self, step: u32) -> [F32x4; X_LOADS] {
        core::array::from_fn(|i| {
            let quad = step * (STEP / QUAD) + self.quad + i as u32 * (THREADS / TOKENS);
            // SAFETY: the row has the quad.
            if quad < self.n_quads { unsafe { ld(self.x.add(quad as usize)) } } else { F32x4::splat(0.0) }
        })
    }

    /// Stores a step's tiles.
    ///
    /// # Safety
    /// Nobody else accesses shared memory before the next barrier.
    #[inline(always)]
    unsafe fn store(&self, step: u32, raw: &F::Raw, x: &[F32x4; X_LOADS]) {
        let (w_tile, x_tile) = tiles();
        // SAFETY: the caller's promise; row, token and column are the tiles'.
        unsafe {
            if self.chunk < const { STEP / F::CHUNK_ELEMS } {
                let quads: [[f32; 4]; MAX_QUADS] =
                    [F::quad::<0>(raw, 0), if F::CHUNK_ELEMS > QUAD { F::quad::<1>(raw, 0) } else { [0.0; 4] }];
                for q in 0..(F::CHUNK_ELEMS / QUAD) as usize {
                    for i in 0..4 {
                        let k = self.chunk * F::CHUNK_ELEMS + 4 * q as u32 + i;
                        w_tile.set(k * ROWS + self.tile_row, if self.live(step) { quads[q][i as usize] } else { 0.0 });
                    }
                }
            }
            for i in 0..X_LOADS {
                let k = QUAD * (self.quad + i as u32 * (THREADS / TOKENS));
                let values = x[i].to_array();
                for j in 0..4 {
                    x_tile.set((k + j) * TOKENS + self.token, values[j as usize]);
                }
            }
        }
    }
}

/// The tiles of the weights and of the activations.
#[inline(always)]
fn tiles() -> (Shared<f32>, Shared<f32>) {
    (dynamic(0), dynamic(4 * STEP * ROWS))
}

/// One lane of a block.
///
/// # Safety
/// As [`matmul_f32`], for the format.
#[inline(always)]
unsafe fn matmul<F: Format>(w: *const u8, x: *const f32, y: *mut f32, bias: *const f32, p: &MatmulFloatParams) {
    // SAFETY: the caller's promise. Shared memory is written between the barrier that ends its use and the one that
    // begins it.
    unsafe {
        let lane = Loader::<F>::new(w, x, p);
        let mut raw = lane.load_w(0);
        pdl::grid_dependency_wait();
        pdl::launch_dependents();
        let mut quads = lane.load_x(0);

        // Lanes of a warp: sixteen fours of tokens, two pairs of rows.
        let thread = thread::thread_idx_x();
        let (token, row) = (thread % 16 * 4, thread / 16 * 2);
        let (w_tile, x_tile) = tiles();
        let (w_tile, x_tile) = (w_tile.add(row).cast::<F32x2>(), x_tile.add(token).cast::<F32x4>());
        let mut sums = [[0.0; 2]; 4];
        let (mut step, steps) = (0, p.cols.div_ceil(STEP));
        loop {
            lane.store(step, &raw, &quads);
            block::sync_threads(); // the tiles are whole
            step += 1;
            if step < steps {
                raw = lane.load_w(step);
                quads = lane.load_x(step);
            }
            for k in 0..STEP {
                let w = w_tile.get(k * (ROWS / 2)).to_array();
                let x = x_tile.get(k * (TOKENS / 4)).to_array();
                for t in 0..4 {
                    for r in 0..2 {
                        sums[t][r] = math::fma(w[r], x[t], sums[t][r]);
                    }
                }
            }
            if step >= steps {
                break;
            }
            block::sync_threads(); // the tiles are done with
        }

        let (row, token) = (thread::block_idx_y() * ROWS + row, thread::block_idx_x() * TOKENS + token);
        for t in 0..4 {
            for r in 0..2 {
                let (row, token) = (row + r as u32, token + t as u32);
                if row < p.rows && token < p.tokens {
                    store(y, bias, row, token, sums[t][r], p);
                }
            }
        }
    }
}

/// One lane of a block for few tokens.
///
/// # Safety
/// As [`matmul_f32_few`], for the format.
#[inline(always)]
unsafe fn few<F: Format>(w: *const u8, x: *const f32, y: *mut f32, bias: *const f32, p: &MatmulFloatParams) {
    const N: usize = FEW_TOKENS as usize;
    let quads = const { F::CHUNK_ELEMS / QUAD };
    let (lane, chunks) = (warp::lane_id(), p.cols / F::CHUNK_ELEMS);
    let first_row = thread::block_idx_x() * FEW_ROWS + thread::thread_idx_x() / 32 * 2;
    let first_token = thread::block_idx_y() * FEW_TOKENS;
    // Rows and tokens past the end are the last ones again, and are not stored. Chunks past the end count as zeros.
    // SAFETY: the caller's promise, and the clamps.
    unsafe {
        let rows = [0, 1].map(|r| {
            let row = u64::from((first_row + r).min(p.rows - 1));
            Row::new::<F>(w, &[0; MAX_PLANES], row, chunks)
        });
        let load = |chunk: u32| [0, 1].map(|r: usize| F::load(&rows[r], chunk.min(chunks - 1)));
        let mut raw = load(lane);
        pdl::grid_dependency_wait();
        pdl::launch_dependents();

        let x: [*const F32x4; N] = core::array::from_fn(|t| {
            let token = (first_token + t as u32).min(p.tokens - 1);
            x.add(token as usize * p.x_stride as usize).cast()
        });
        let mut sums = [[0.0; N]; 2];
        let mut chunk = lane;
        loop {
            let live = chunk < chunks;
            let at = chunk.min(chunks - 1) * quads;
            let first = raw.map(|raw| zero_unless(live, F::quad::<0>(&raw, 0)));
            for t in 0..N {
                add_quad(&first, ld(x[t].add(at as usize)), &mut sums, t);
            }
            if quads > 1 {
                let second = raw.map(|raw| zero_unless(live, F::quad::<1>(&raw, 0)));
                for t in 0..N {
                    add_quad(&second, ld(x[t].add(at as usize + 1)), &mut sums, t);
                }
            }
            chunk += 32;
            if chunk - lane >= chunks {
                break;
            }
            raw = load(chunk);
        }
        for t in 0..N {
            for r in 0..2 {
                let sum = warp::sum(sums[r][t]);
                let (row, token) = (first_row + r as u32, first_token + t as u32);
                if lane == 0 && row < p.rows && token < p.tokens {
                    store(y, bias, row, token, sum, p);
                }
            }
        }
    }
}

/// Adds four products of two rows each for token `t`.
#[inline(always)]
fn add_quad<const N: usize>(w: &[[f32; 4]; 2], x: F32x4, sums: &mut [[f32; N]; 2], t: usize) {
    for r in 0..2 {
        let w = w[r];
        sums[r][t] = math::fma(w[3], x.w, math::fma(w[2], x.z, math::fma(w[1], x.y, math::fma(w[0], x.x, sums[r][t]))));
    }
}

/// Numbers, or zeros, without a branch.
#[inline(always)]
fn zero_unless(live: bool, quad: [f32; 4]) -> [f32; 4] {
    quad.map(|x| core::hint::select_unpredictable(live, x, 0.0))
}

/// Stores one sum.
///
/// # Safety
/// As [`matmul_f32`]; the row and the token exist.
#[inline(always)]
pub(super) unsafe fn store(y: *mut f32, bias: *const f32, row: u32, token: u32, sum: f32, p: &MatmulFloatParams) {
    // SAFETY: the caller's promise.
    unsafe {
        let to = y.add(token as usize * p.y_stride as usize + row as usize);
        let mut sum = sum;
        // What is there comes before the bias, as where that is added by a kernel of its own.
        if p.accumulate != 0 {
            sum += ld(to);
        }
        if !bias.is_null() {
            sum += ld(bias.add(row as usize));
        }
        st(to, sum);
    }
}

macro_rules! entries {
    ($($ty:ident: $name:ident $few:ident;)+) => {$(
        #[doc = concat!("[`matmul_float`](self) with [`", stringify!($ty), "`](format::", stringify!($ty), ") weights.")]
        ///
        /// `w: [rows, cols]`, `x: [tokens, x_stride]`, `y: [tokens, y_stride]`, `bias: [rows]` or null.
        /// Grid: `(⌈tokens / TOKENS⌉, ⌈rows / ROWS⌉)`, blocks of [`THREADS`], [`SHARED_BYTES`] of shared memory.
        ///
        /// # Safety
        /// - The arrays have these extents; `w` and `x` are 16-byte aligned, `x_stride` a multiple of 4, `cols` of a
        ///   chunk's elements; `rows`, `cols` and `tokens` are not 0. Nobody writes `w`.
        /// - `y` overlaps nothing else. The grid before in the stream is the only one still running.
        #[kernel(max_threads = 256, min_blocks = 4)]
        pub unsafe fn $name(w: *const u8, x: *const f32, y: *mut f32, bias: *const f32, p: MatmulFloatParams) {
            matmul::<format::$ty>(w, x, y, bias, &p);
        }

        #[doc = concat!("[`", stringify!($name), "`] for few tokens.")]
        ///
        /// Grid: `(⌈rows / FEW_ROWS⌉, ⌈tokens / FEW_TOKENS⌉)`, blocks of [`FEW_THREADS`].
        ///
        /// # Safety
        #[doc = concat!("As [`", stringify!($name), "`].")]
        #[kernel(max_threads = 128, min_blocks = 4)]
        pub unsafe fn $few(w: *const u8, x: *const f32, y: *mut f32, bias: *const f32, p: MatmulFloatParams) {
            few::<format::$ty>(w, x, y, bias, &p);
        }
    )+};
}

entries! {
    F32: matmul_f32 matmul_f32_few;
    F16: matmul_f16 matmul_f16_few;
    Bf16: matmul_bf16 matmul_bf16_few;
}
