//! Matrix times vector, for every weight type: the kernel that decoding spends its time in.
//!
//! `y[t, r] (= or +=) bias[r] + Σ_k w[r, k]·x[t, k]`, and with experts, for route `i` of token `t`,
//! `y[t·n + i, r] (= or +=) bias[e, r] + Σ_k w[e, r, k]·x[·, k]` where `e = ids[t, i]`.
//!
//! One body serves every type ([`Format`]) and both kinds of activations: f32, and 8-bit integers from
//! `quantize_q8`, whose products with integer weights are `dp4a`. A group of lanes — a warp, or less
//! where rows are short — walks along a row (or several neighbouring ones, which share the activations),
//! 16 bytes a lane and load. All loads of a step are issued before the first is used: with quantised
//! activations a lane has at least four chunks in flight. Lanes past a row's end repeat its last chunk with zeros for `x`:
//! a branch there would part the loads from each other.
//!
//! The first weights are loaded ahead of the wait for the grid that makes `x` (programmatic dependent
//! launch), unless which expert is wanted depends on that grid.

mod operand;
mod sweep;

use cuda_std::{pdl, prelude::*};

pub(super) use self::operand::{CopiedRow, Operand, Plain, Quantized, StagedPlain, StagedQuantized};
pub(super) use self::sweep::{Items, Source, sweep};
use super::format::{self, Format, FormatHeld, Row};
use crate::blocks::GgmlType;
use crate::params::{
    Activations, MATVEC_ACCUMULATE, MATVEC_BLOCK, MATVEC_SHARED_X, MatvecParams, MatvecShape, WARP, shares_by_block,
};

/// A lane's place along a row.
#[derive(Clone, Copy)]
pub(super) struct Lane {
    /// Its number among the lanes that share the row.
    pub(super) lane: u32,
    /// `log2` of how many those are: [`MatvecShape::lanes_log2`].
    pub(super) lanes_log2: u32,
    /// 16-byte chunks in the row.
    pub(super) chunks: u32,
}

impl Lane {
    /// What `load` gives of the chunks that it takes next of `R` rows: `S` of each, `lanes` apart.
    #[inline(always)]
    fn step<T, const R: usize, const S: usize>(
        self,
        rows: &[Row; R],
        done: u32,
        load: impl Fn(&Row, u32) -> T,
    ) -> [[T; R]; S] {
        core::array::from_fn(|s| {
            let chunk = (self.lane + done + ((s as u32) << self.lanes_log2)).min(self.chunks - 1);
            core::array::from_fn(|r| load(&rows[r], chunk))
        })
    }

    /// Loads its next step of `R` rows, `S` chunks of each.
    ///
    /// # Safety
    /// The rows have `self.chunks` chunks.
    #[inline(always)]
    pub(super) unsafe fn load_step<F: Format, const R: usize, const S: usize>(
        self,
        rows: &[Row; R],
        done: u32,
    ) -> [[F::Raw; R]; S] {
        // SAFETY: the caller's promise.
        self.step(rows, done, |row, chunk| unsafe { F::load(row, chunk) })
    }

    /// As [`load_step`](Self::load_step), held by the warp together.
    ///
    /// # Safety
    /// The rows have `self.chunks` chunks.
    #[inline(always)]
    pub(super) unsafe fn hold_step<F: FormatHeld, const R: usize, const S: usize>(
        self,
        rows: &[Row; R],
        done: u32,
    ) -> [[F::Held; R]; S] {
        let phase = self.lane % F::BLOCK_CHUNKS;
        // SAFETY: the caller's promise.
        self.step(rows, done, |row, chunk| unsafe { F::hold(row, chunk, phase) })
    }

    /// Its share of `Σ_k w[r, k]·x[t, k]`, from the first step's weights on.
    ///
    /// # Safety
    /// The rows have `self.chunks` chunks, and the activations as many chunks' worth.
    #[inline(always)]
    pub(super) unsafe fn sums<F: Format, X: Operand<F>, const R: usize, const S: usize, const T: usize>(
        self,
        rows: &[Row; R],
        mut raw: [[F::Raw; R]; S],
        x: &[X; T],
    ) -> [[f32; R]; T] {
        let (start, phase) = (F::start(self.lane), self.lane % F::BLOCK_CHUNKS);
        let mut sums = [[0.0; R]; T];
        let mut done = 0;
        loop {
            // Loads first, for all of the step: left to itself the assembler mixes them with arithmetic.
            let chunks: [[X::Chunk; T]; S] = core::array::from_fn(|s| {
                // `lanes` is a multiple of a block's chunks, so a step moves every lane by whole blocks.
                let ahead = done + ((s as u32) << self.lanes_log2);
                let live = self.lane + ahead < self.chunks;
                let at = start + ahead * F::CHUNK_ELEMS;
                // SAFETY: a live chunk exists in `x` as in the weights.
                core::array::from_fn(|t| unsafe { x[t].load(at, live) })
            });
            for (raw, chunks) in raw.iter().zip(&chunks) {
                for (sums, x) in sums.iter_mut().zip(chunks) {
                    for (sum, raw) in sums.iter_mut().zip(raw) {
                        *sum += X::dot(raw, x, phase);
                    }
                }
            }
            done += (S as u32) << self.lanes_log2;
            if done >= self.chunks {
                return sums;
            }
            // SAFETY: as above.
            raw = unsafe { self.load_step::<F, R, S>(rows, done) };
        }
    }
}

/// The operands other than the activations.
pub(super) struct Pointers {
    pub(super) w: *const u8,
    pub(super) y: *mut f32,
    pub(super) ids: *const u32,
    pub(super) bias: *const f32,
}

/// One lane of block `block` of a matvec: `R` rows a group of lanes, `S` chunks of each a step, `T` tokens.
///
/// # Safety
/// As [`matvec_q8_0`], for the format and the activations.
#[inline(always)]
pub(super) unsafe fn matvec<F: Format, X: Operand<F>, const R: usize, const S: usize, const T: usize>(
    o: Pointers,
    x: X,
    p: &MatvecParams,
    block: u32,
) {
    let lanes = 1u32 << p.lanes_log2;
    let thread = block * MATVEC_BLOCK + thread::thread_idx_x();
    let place = Lane { lane: thread & (lanes - 1), lanes_log2: p.lanes_log2, chunks: p.chunks };
    let first_row = (thread >> p.lanes_log2) * R as u32;
    // SAFETY: the launcher has checked the ids' extent.
    let expert_row = unsafe { expert(&o, p) } * u64::from(p.rows);
    // Groups past the end compute the last row again and don't store it: all lanes take part in shuffles.
    let rows: [Row; R] = core::array::from_fn(|r| {
        let row = (first_row + r as u32).min(p.rows - 1);
        // SAFETY: the row exists.
        unsafe { Row::new::<F>(o.w, &p.planes, expert_row + u64::from(row), p.chunks) }
    });

    // SAFETY: the rows have `p.chunks` chunks.
    let raw = unsafe { place.load_step::<F, R, S>(&rows, 0) };
    pdl::grid_dependency_wait();
    pdl::launch_dependents();

    let x: [X; T] = core::array::from_fn(|t| {
        let route = route(T, t, p).min(p.routes - 1);
        let row = if p.flags & MATVEC_SHARED_X != 0 { thread::block_idx_z() } else { route };
        // SAFETY: the launcher has checked that `x` has a row for every token, or for every route.
        unsafe { x.row(row, p.x_stride) }
    });
    // SAFETY: the rows and the activations have `p.chunks` chunks; the whole block is here.
    let sums = unsafe { group_sums::<F, R, T>(place.sums(&rows, raw, &x), lanes) };
    for (t, sums) in sums.iter().enumerate() {
        let route = route(T, t, p);
        if place.lane == 0 && route < p.routes {
            // SAFETY: `y` has the route's row.
            unsafe {
                let y = o.y.add(route as usize * p.y_stride as usize);
                for (row, sum) in (first_row..).zip(sums) {
                    store(&o, y, expert_row, row, *sum, residual(y, row, p), p);
                }
            }
        }
    }
}

/// The route that is number `t` of this block's `tokens`. With several tokens a block there is one
/// route a token, and the last block may have fewer.
#[inline(always)]
fn route(tokens: usize, t: usize, p: &MatvecParams) -> u32 {
    (thread::block_idx_z() * tokens as u32 + t as u32) * p.n_used + thread::block_idx_y()
}

/// The expert of this block's route; 0 for a dense product. It is known only once the grid ahead has
/// ended, so then no weights are loaded before.
///
/// # Safety
/// `o.ids` is null or has an id for every route.
#[inline(always)]
unsafe fn expert(o: &Pointers, p: &MatvecParams) -> u64 {
    if o.ids.is_null() {
        return 0;
    }
    pdl::grid_dependency_wait();
    let at = thread::block_idx_z() as usize * p.ids_stride as usize + thread::block_idx_y() as usize;
    // SAFETY: the caller's promise. A bad id becomes the last expert.
    u64::from(unsafe { ld(o.ids.add(at)) }.min(p.n_expert - 1))
}

/// Sums over each group of `lanes` lanes, in every lane. The order of additions does not depend on the
/// launch, so that a rerun gives the same bits.
///
/// # Safety
/// All lanes of the warp are here; of the block, with `MATVEC_SHARED_BYTES` of shared memory, where the type's rows
/// are [shared by it](shares_by_block).
#[inline(always)]
pub(super) unsafe fn group_sums<F: Format, const R: usize, const T: usize>(
    sums: [[f32; R]; T],
    lanes: u32,
) -> [[f32; R]; T] {
    // SAFETY: the caller's promise.
    let sums = sums.map(|sums| unsafe { group_sum(sums, lanes.min(WARP)) });
    if !shares_by_block(F::TYPE) || lanes <= WARP {
        return sums;
    }
    const { assert!(!shares_by_block(F::TYPE) || R == 1 && T <= 4) };
    let (warp, scratch) = (thread::thread_idx_x() / WARP, dynamic::<f32>(0));
    let first = warp & !(lanes / WARP - 1);
    // SAFETY: a word for each warp and token; `lanes` is the same in the whole block.
    unsafe {
        if warp::lane_id() == 0 {
            for (t, sums) in (0..).zip(&sums) {
                scratch.set(t * (MATVEC_BLOCK / WARP) + warp, sums[0]);
            }
        }
        block::sync_threads(); // every warp's sums are written before they are read
        core::array::from_fn(|t| {
            let mut sum = 0.0;
            let mut i = 0;
            while i < lanes / WARP {
                sum += scratch.get(t as u32 * (MATVEC_BLOCK / WARP) + first + i);
                i += 1;
            }
            [sum; R]
        })
    }
}

/// Sums over each group of `lanes` lanes of a warp, in every lane.
///
/// # Safety
/// All lanes of the warp are here.
#[inline(always)]
pub(super) unsafe fn group_sum<const R: usize>(mut sums: [f32; R], lanes: u32) -> [f32; R] {
    let mut distance = lanes / 2;
    while distance > 0 {
        // SAFETY: the caller's promise; the loop's bound is the same in every lane.
        sums = sums.map(|sum| sum + unsafe { warp::shuffle_xor(sum, distance) });
        distance /= 2;
    }
    sums
}

/// What is added to row `row` of the product: with [`MATVEC_ACCUMULATE`] the row of `y`, if there is one.
///
/// # Safety
/// `y` has `p.rows` elements.
#[inline(always)]
pub(super) unsafe fn residual(y: *const f32, row: u32, p: &MatvecParams) -> f32 {
    if p.flags & MATVEC_ACCUMULATE != 0 && row < p.rows {
        // SAFETY: the caller's promise.
        return unsafe { ld(y.add(row as usize)) };
    }
    0.0
}

/// Writes row `row` of `y`, if there is one; with [`MATVEC_ACCUMULATE`] `residual` is added.
///
/// # Safety
/// `y` has `p.rows` elements and `o.bias`, if not null, `expert_row + p.rows`.
#[inline(always)]
pub(super) unsafe fn store(
    o: &Pointers,
    y: *mut f32,
    expert_row: u64,
    row: u32,
    mut sum: f32,
    residual: f32,
    p: &MatvecParams,
) {
    if row >= p.rows {
        return;
    }
    if p.flags & MATVEC_ACCUMULATE != 0 {
        sum += residual;
    }
    // SAFETY: the caller's promise.
    unsafe {
        if !o.bias.is_null() {
            sum += ld(o.bias.add(expert_row as usize + row as usize));
        }
        st(y.add(row as usize), sum);
    }
}

/// The entry points of a type: `$plain` with f32 activations, `$q8` with quantised ones, `$q8x4` with
/// four rows of quantised ones at a time.
macro_rules! entries {
    ($($ty:ident: $plain:ident[$plain_blocks:tt] $($q8:ident[$q8_blocks:tt] $q8x4:ident[$q8x4_blocks:tt])?;)+) => {$(
        #[doc = concat!("[`matvec`](self) with [`", stringify!($ty), "`](format::", stringify!($ty), ") weights and")]
        /// f32 activations.
        ///
        /// `w: [n_expert, rows, cols]` planar; `x: [tokens or routes, x_stride]`; `y: [routes, y_stride]`;
        /// `ids: [tokens, ids_stride]` or null for a dense product (one route a token); `bias: [n_expert, rows]`
        /// or null.
        ///
        /// Grid: `(⌈rows / rows_per_block⌉, routes of a token, tokens)`, blocks of `MATVEC_BLOCK` lanes; with F32
        /// weights `MATVEC_SHARED_BYTES` of shared memory.
        ///
        /// # Safety
        /// - `w` points to the whole tensor, 16-byte aligned, with `p.planes` its plane offsets; nobody writes it.
        /// - `x` and its stride are 16-byte aligned; its rows have `cols` elements, `p.chunks` chunks' worth, at least one.
        /// - `y` has a row of `p.rows` ≥ 1 elements for every route and overlaps nothing else.
        /// - `ids` and `bias` are null or of the shape above; `p.routes` ≥ 1 and `p.n_used` are the grid's;
        ///   `p.lanes_log2` is [`MatvecShape::lanes_log2`] of the type and `p.chunks`.
        /// - The grid before in the stream is the only one still running (programmatic dependent launch).
        #[kernel(max_threads = 128, min_blocks = $plain_blocks)]
        pub unsafe fn $plain(w: *const u8, x: *const f32, y: *mut f32, ids: *const u32, bias: *const f32, p: MatvecParams) {
            const SHAPE: MatvecShape = MatvecShape::new(GgmlType::$ty, Activations::Plain);
            matvec::<format::$ty, _, { SHAPE.rows as usize }, { SHAPE.steps as usize }, 1>(
                Pointers { w, y, ids, bias }, Plain { x }, &p, thread::block_idx_x());
        }

        $(
        #[doc = concat!("[`matvec`](self) with [`", stringify!($ty), "`](format::", stringify!($ty), ") weights and")]
        /// quantised activations.
        ///
        #[doc = concat!("As [`", stringify!($plain), "`] but for `x`: `qs: [tokens or routes, x_stride]`,")]
        /// `d: [.., x_stride/16]` and `s: [.., x_stride/16]`, as `quantize_q8` writes them.
        ///
        /// # Safety
        #[doc = concat!("As [`", stringify!($plain), "`]; `qs` is 16-byte aligned and `x_stride` a multiple of 32.")]
        #[kernel(max_threads = 128, min_blocks = $q8_blocks)]
        pub unsafe fn $q8(
            w: *const u8, qs: *const i8, d: *const f32, s: *const f32,
            y: *mut f32, ids: *const u32, bias: *const f32, p: MatvecParams,
        ) {
            const SHAPE: MatvecShape = MatvecShape::new(GgmlType::$ty, Activations::Q8);
            matvec::<format::$ty, _, { SHAPE.rows as usize }, { SHAPE.steps as usize }, 1>(
                Pointers { w, y, ids, bias }, Quantized { qs, d, s }, &p, thread::block_idx_x());
        }

        #[doc = concat!("[`", stringify!($q8), "`] for four tokens a block, which read and unpack the weights once.")]
        ///
        /// Grid: `(⌈rows / rows_per_block⌉, 1, ⌈tokens / 4⌉)`, blocks of `MATVEC_BLOCK` lanes. `ids` is null.
        ///
        /// # Safety
        #[doc = concat!("As [`", stringify!($q8), "`], with one route a token.")]
        #[kernel(max_threads = 128, min_blocks = $q8x4_blocks)]
        pub unsafe fn $q8x4(
            w: *const u8, qs: *const i8, d: *const f32, s: *const f32,
            y: *mut f32, ids: *const u32, bias: *const f32, p: MatvecParams,
        ) {
            const SHAPE: MatvecShape = MatvecShape::new(GgmlType::$ty, Activations::Q8x4);
            matvec::<format::$ty, _, { SHAPE.rows as usize }, { SHAPE.steps as usize }, 4>(
                Pointers { w, y, ids, bias }, Quantized { qs, d, s }, &p, thread::block_idx_x());
        }
        )?
    )+};
}

// In brackets, the blocks that are to fit on a multiprocessor, which is to say the registers that a lane
// may have: 512 divided by them. Without the bound the assembler saves registers at the cost of order, and
// starts arithmetic before the step's last loads; with these, all loads come first (sm_90, ptxas 13.0).
entries! {
    Q4K: matvec_q4_k[6] matvec_q4_k_q8[4] matvec_q4_k_q8x4[4];
    Q5K: matvec_q5_k[4] matvec_q5_k_q8[4] matvec_q5_k_q8x4[4];
    Q6K: matvec_q6_k[6] matvec_q6_k_q8[4] matvec_q6_k_q8x4[4];
    Q8_0: matvec_q8_0[5] matvec_q8_0_q8[8] matvec_q8_0_q8x4[4];
    Q4_0: matvec_q4_0[6] matvec_q4_0_q8[6] matvec_q4_0_q8x4[4];
    Q4_1: matvec_q4_1[6] matvec_q4_1_q8[6] matvec_q4_1_q8x4[4];
    Q5_0: matvec_q5_0[6] matvec_q5_0_q8[5] matvec_q5_0_q8x4[4];
    Q5_1: matvec_q5_1[6] matvec_q5_1_q8[5] matvec_q5_1_q8x4[4];
    Mxfp4: matvec_mxfp4[6] matvec_mxfp4_q8[6] matvec_mxfp4_q8x4[4];
    F16: matvec_f16[6];
    Bf16: matvec_bf16[6];
    F32: matvec_f32[8];
}
