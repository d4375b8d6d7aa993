//! Float weights times many tokens on the tensor cores: `y[t, r] (= or +=) bias[r] + Σ_k w[r, k]·x[t, k]`.
//!
//! Each factor is the sum of two bf16 numbers, `hi = bf16(v)` and `lo = bf16(v − hi)`, which leaves out at most
//! 2⁻¹⁸·|v|; of the four products the smallest, `lo·lo`, at most 2⁻¹⁸·|w·x|, is left out too. So a product is right to
//! 3·2⁻¹⁸, some sixty times what int8 activations are, and the sums are f32. Where that is not enough
//! [`matmul_float`](super::matmul_float) has the exact form.
//!
//! The matrices have few rows (routers, gates), so that the tokens are what there is much of: they are the rows of
//! [`mma`]'s A. Eight warps of a block share the columns of one tile, each takes every eighth group of 16, and what
//! they have is added at the end, in their order. Nothing but those sums goes through shared memory: the order of the
//! columns within a group is the same for both factors, so that a lane loads four neighbours of a row at once.

use bytemuck::{Pod, Zeroable};
use cuda_std::{mma, pdl, prelude::*};

use super::format::{self, select};
use super::matmul_float::{MatmulFloatParams, store};
use crate::params::WARP;

/// Lanes of a block.
pub const THREADS: u32 = 256;
const WARPS: u32 = THREADS / WARP;
/// Columns of one product.
const GROUP: u32 = 16;
/// Columns that a lane loads of a row.
const QUAD: u32 = 4;

/// A block's tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Tokens.
    pub tokens: u32,
    /// Rows of the matrix.
    pub rows: u32,
}

impl Tile {
    /// Bytes of shared memory: each warp's sums.
    pub const fn shared_bytes(self) -> u32 {
        4 * WARPS * self.tokens * self.rows
    }
}

/// For many tokens.
pub const MANY: Tile = Tile { tokens: 32, rows: 32 };
/// For few: small, so that there are many blocks, and with four groups of columns under way at once.
pub const FEW: Tile = Tile { tokens: 16, rows: 8 };

/// A float type, four elements at a time.
trait Float {
    type Quad: Pod;

    fn values(quad: Self::Quad) -> [f32; 4];
}

/// Four elements of 16 bits.
#[repr(C, align(8))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Halves(u32, u32);

impl Float for format::F32 {
    type Quad = F32x4;

    #[inline(always)]
    fn values(quad: F32x4) -> [f32; 4] {
        quad.to_array()
    }
}

impl Float for format::F16 {
    type Quad = Halves;

    #[inline(always)]
    fn values(quad: Halves) -> [f32; 4] {
        let ([a, b], [c, d]) = (convert::unpack_f16x2(quad.0), convert::unpack_f16x2(quad.1));
        [a, b, c, d]
    }
}

impl Float for format::Bf16 {
    type Quad = Halves;

    #[inline(always)]
    fn values(quad: Halves) -> [f32; 4] {
        let ([a, b], [c, d]) = (convert::unpack_bf16x2(quad.0), convert::unpack_bf16x2(quad.1));
        [a, b, c, d]
    }
}

/// Four numbers as pairs of bf16, and what these leave.
#[derive(Clone, Copy)]
struct Parts {
    hi: [u32; 2],
    lo: [u32; 2],
}

impl Parts {
    #[inline(always)]
    fn of(v: [f32; 4]) -> Self {
        let pair = |a: f32, b: f32| {
            let hi = convert::pack_bf16x2(a, b);
            let [a_hi, b_hi] = convert::unpack_bf16x2(hi);
            (hi, convert::pack_bf16x2(a - a_hi, b - b_hi))
        };
        let ((hi0, lo0), (hi1, lo1)) = (pair(v[0], v[1]), pair(v[2], v[3]));
        Parts { hi: [hi0, hi1], lo: [lo0, lo1] }
    }
}

/// Quads of one group: of each 16 tokens rows `g` and `g + 8`, and of each 8 rows of the matrix row `g`.
#[derive(Clone, Copy)]
struct Raw<Q: Pod, const MT: usize, const NT: usize> {
    x: [[F32x4; 2]; MT],
    w: [Q; NT],
    live: bool,
}

/// Where a lane's rows start.
struct Rows<F: Float, const MT: usize, const NT: usize> {
    x: [[*const F32x4; 2]; MT],
    w: [*const F::Quad; NT],
    /// Quads of a row, and the lane's place in a group.
    n_quads: u32,
    t: u32,
}

impl<F: Float, const MT: usize, const NT: usize> Rows<F, MT, NT> {
    /// # Safety
    /// As [`matmul_f32_split`].
    #[inline(always)]
    unsafe fn new(w: *const u8, x: *const f32, p: &MatmulFloatParams, token: u32, row: u32) -> Self {
        let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
        // Tokens and rows past the end are the last ones again, and are not stored.
        // SAFETY: they exist.
        unsafe {
            let x_row = |token: u32| x.add(token.min(p.tokens - 1) as usize * p.x_stride as usize).cast();
            let w_row = |row: u32| {
                let first = u64::from(row.min(p.rows - 1)) * u64::from(p.cols);
                w.cast::<F::Quad>().add((first / u64::from(QUAD)) as usize)
            };
            Rows {
                x: core::array::from_fn(|m| {
                    let first = token + 16 * m as u32 + g;
                    [x_row(first), x_row(first + 8)]
                }),
                w: core::array::from_fn(|n| w_row(row + 8 * n as u32 + g)),
                n_quads: p.cols / QUAD,
                t,
            }
        }
    }

    /// The lane's quads of a group; the row's first for one past its end.
    ///
    /// # Safety
    /// As [`matmul_f32_split`].
    #[inline(always)]
    unsafe fn load(&self, group: u32) -> Raw<F::Quad, MT, NT> {
        let quad = group * (GROUP / QUAD) + self.t;
        let live = quad < self.n_quads;
        let at = select(live, quad, 0) as usize;
        // SAFETY: the rows have the quad.
        unsafe {
            Raw {
                x: core::array::from_fn(|m| [ld(self.x[m][0].add(at)), ld(self.x[m][1].add(at))]),
                w: core::array::from_fn(|n| ld(self.w[n].add(at))),
                live,
            }
        }
    }
}

/// A lane's sums, those of [`mma`]'s C.
type Sums<const MT: usize, const NT: usize> = [[[f32; 4]; NT]; MT];

impl<Q: Pod, const MT: usize, const NT: usize> Raw<Q, MT, NT> {
    /// Adds the group's products.
    ///
    /// # Safety
    /// Every lane of the warp comes here.
    #[inline(always)]
    unsafe fn multiply<F: Float<Quad = Q>>(&self, sums: &mut Sums<MT, NT>) {
        // Quads past the end of a row count as zeros.
        let zero = |v: [f32; 4]| v.map(|v| core::hint::select_unpredictable(self.live, v, 0.0));
        let w: [Parts; NT] = core::array::from_fn(|n| Parts::of(zero(F::values(self.w[n]))));
        for m in 0..MT {
            let [a, b] = [0, 1].map(|half: usize| Parts::of(zero(self.x[m][half].to_array())));
            let hi = [a.hi[0], b.hi[0], a.hi[1], b.hi[1]];
            let lo = [a.lo[0], b.lo[0], a.lo[1], b.lo[1]];
            for n in 0..NT {
                // The small ones first.
                // SAFETY: the caller's promise.
                unsafe {
                    let sum = mma::m16n8k16_bf16(lo, w[n].hi, sums[m][n]);
                    let sum = mma::m16n8k16_bf16(hi, w[n].lo, sum);
                    sums[m][n] = mma::m16n8k16_bf16(hi, w[n].hi, sum);
                }
            }
        }
    }
}

/// One lane of a block: `MT` times 16 tokens by `NT` times 8 rows, `AHEAD` groups of columns at a time.
///
/// # Safety
/// As [`matmul_f32_split`], for the type and the tile.
#[inline(always)]
unsafe fn matmul<F: Float, const MT: usize, const NT: usize, const AHEAD: usize>(
    w: *const u8,
    x: *const f32,
    y: *mut f32,
    bias: *const f32,
    p: &MatmulFloatParams,
) {
    let tile = const { Tile { tokens: 16 * MT as u32, rows: 8 * NT as u32 } };
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / WARP);
    let (token, row) = (thread::block_idx_x() * tile.tokens, thread::block_idx_y() * tile.rows);
    let mut sums: Sums<MT, NT> = [[[0.0; 4]; NT]; MT];
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    // SAFETY: the caller's promise; groups past a row's end count as zeros. Every lane is at the barrier, and each
    // sum has its own place.
    unsafe {
        let rows = Rows::<F, MT, NT>::new(w, x, p, token, row);
        let (step, groups) = (WARPS * AHEAD as u32, p.cols.div_ceil(GROUP));
        let load = |first: u32| core::array::from_fn::<_, AHEAD, _>(|i| rows.load(first + i as u32 * WARPS));
        let mut group = warp;
        let mut raw = load(group);
        loop {
            let now = raw;
            group += step;
            let more = group - warp < groups;
            if more {
                raw = load(group);
            }
            for i in 0..AHEAD {
                now[i].multiply::<F>(&mut sums);
            }
            if !more {
                break;
            }
        }

        // `[warp, value, lane]`
        let (values, partial) = (const { 4 * (MT * NT) as u32 }, dynamic::<f32>(0));
        for m in 0..MT {
            for n in 0..NT {
                for j in 0..4 {
                    let value = ((m * NT + n) * 4 + j) as u32;
                    partial.set((warp * values + value) * WARP + lane, sums[m][n][j]);
                }
            }
        }
        block::sync_threads(); // all sums are there
        let mut value = warp;
        while value < values {
            let mut sum = 0.0;
            for warp in 0..WARPS {
                sum += partial.get((warp * values + value) * WARP + lane);
            }
            let (m, n, j) = (value / (4 * NT as u32), value / 4 % NT as u32, value % 4);
            let token = token + 16 * m + lane / 4 + 8 * (j / 2);
            let row = row + 8 * n + lane % 4 * 2 + j % 2;
            if token < p.tokens && row < p.rows {
                store(y, bias, row, token, sum, p);
            }
            value += WARPS;
        }
    }
}

macro_rules! entries {
    ($($ty:ident: $name:ident $few:ident;)+) => {$(
        #[doc = concat!("[`matmul_split`](self) with [`", stringify!($ty), "`](format::", stringify!($ty), ") weights.")]
        ///
        /// `w: [rows, cols]`, `x: [tokens, x_stride]`, `y: [tokens, y_stride]`, `bias: [rows]` or null.
        /// Grid: tokens and rows in tiles of [`MANY`], blocks of [`THREADS`], [`Tile::shared_bytes`] of shared memory.
        ///
        /// # Safety
        /// As [`matmul_f32`](super::matmul_float::matmul_f32).
        #[kernel(max_threads = 256, min_blocks = 2)]
        pub unsafe fn $name(w: *const u8, x: *const f32, y: *mut f32, bias: *const f32, p: MatmulFloatParams) {
            matmul::<format::$ty, { MANY.tokens as usize / 16 }, { MANY.rows as usize / 8 }, 1>(w, x, y, bias, &p);
        }

        #[doc = concat!("[`", stringify!($name), "`] in tiles of [`FEW`].")]
        ///
        /// # Safety
        #[doc = concat!("As [`", stringify!($name), "`].")]
        #[kernel(max_threads = 256, min_blocks = 2)]
        pub unsafe fn $few(w: *const u8, x: *const f32, y: *mut f32, bias: *const f32, p: MatmulFloatParams) {
            matmul::<format::$ty, { FEW.tokens as usize / 16 }, { FEW.rows as usize / 8 }, 4>(w, x, y, bias, &p);
        }
    )+};
}

entries! {
    F32: matmul_f32_split matmul_f32_split_few;
    F16: matmul_f16_split matmul_f16_split_few;
    Bf16: matmul_bf16_split matmul_bf16_split_few;
}
