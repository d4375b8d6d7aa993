//! One block's tile: loading, unpacking, multiplying, storing.

use core::marker::PhantomData;

use cuda_std::{cp_async, mma, pdl, prelude::*};

use super::{MAGIC, MatmulParams, Tile};
use crate::kernels::format::{FormatTile, Row, select};
use crate::params::{Q8_BLOCK, Q8_SUM, WARP};

/// Bytes of a load, a copy, and a row of `ldmatrix`.
const UNIT: u32 = 16;
/// Blocks of 32 elements that a warp multiplies each step.
const WARP_BLOCKS: u32 = 4;
/// Rows of activation scales are so many words longer than the tile, to lie in other banks.
const X_PAD: u32 = 8;

/// Bytes from one row of a stage to the next: a unit more than its columns, so that neither the eight rows of an
/// `ldmatrix` nor the units of a row meet in a bank.
const fn row_bytes(tile: Tile) -> u32 {
    tile.step + UNIT
}

/// A number, or 0, without a branch.
#[inline(always)]
fn zero_unless(live: bool, x: f32) -> f32 {
    core::hint::select_unpredictable(live, x, 0.0)
}

/// The arguments of a kernel.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub(super) w: *const u8,
    pub(super) qs: *const i8,
    pub(super) d: *const f32,
    pub(super) s: *const f32,
    pub(super) y: *mut f32,
    pub(super) bias: *const f32,
    pub(super) order: *const u32,
    pub(super) tiles: *const U32x4,
}

/// How a tile is spread over the warps: `WM` of them along rows with `MT` products of 16 each, `WN` along tokens
/// with `NT` products of 8 each, `WK` along the columns of a step.
pub(super) struct Shape<const MT: usize, const NT: usize, const WM: u32, const WN: u32, const WK: u32>;

/// [`Shape`]'s numbers.
pub(super) trait Geometry {
    /// The tile.
    const TILE: Tile;
    /// Warps along rows, tokens and columns.
    const WARPS: [u32; 3];
}

impl<const MT: usize, const NT: usize, const WM: u32, const WN: u32, const WK: u32> Geometry
    for Shape<MT, NT, WM, WN, WK>
{
    const TILE: Tile = {
        let tile = Tile::new(8 * NT as u32 * WN);
        assert!(WM * WN * WK * WARP == tile.threads);
        assert!(tile.rows == 16 * MT as u32 * WM && tile.step == WK * WARP_BLOCKS * Q8_BLOCK);
        tile
    };
    const WARPS: [u32; 3] = [WM, WN, WK];
}

/// Where the parts of a stage lie, in bytes from its start; the last is its end.
///
/// Weights and activations as bytes, `[rows or tokens, step]`; scales and minimums of the weights, `[group, row]`;
/// scales and sums of the activations, `[block, token]`.
const fn offsets(tile: Tile, group_elems: u32, has_min: bool) -> [u32; 7] {
    let groups = tile.step / group_elems * tile.rows * 4;
    let blocks = tile.step / Q8_BLOCK * (tile.tokens + X_PAD) * 4;
    let (min, sum) = if has_min { (groups, blocks) } else { (0, 0) };
    let parts = [tile.rows * row_bytes(tile), tile.tokens * row_bytes(tile), groups, min, blocks, sum];
    let (mut offsets, mut i) = ([0; 7], 0);
    while i < 6 {
        offsets[i + 1] = offsets[i] + parts[i];
        i += 1;
    }
    offsets
}

/// Bytes of a stage.
pub(super) const fn stage_bytes(tile: Tile, group_elems: u32, has_min: bool) -> u32 {
    offsets(tile, group_elems, has_min)[6]
}

/// A stage of shared memory, or the parts of it from a lane's place on.
struct Stage<F, G> {
    w: Shared<u8>,
    x: Shared<u8>,
    scale: Shared<f32>,
    min: Shared<f32>,
    x_scale: Shared<f32>,
    x_sum: Shared<f32>,
    of: PhantomData<(F, G)>,
}

impl<F, G> Clone for Stage<F, G> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<F, G> Copy for Stage<F, G> {}

impl<F: FormatTile, G: Geometry> Stage<F, G> {
    const OFFSETS: [u32; 7] = offsets(G::TILE, F::GROUP_ELEMS, F::HAS_MIN);
    const BYTES: u32 = Self::OFFSETS[6];
    /// Words from the activation scales of one block to those of the next.
    const X_STRIDE: u32 = G::TILE.tokens + X_PAD;

    /// The stage at byte `start`.
    #[inline(always)]
    fn new(start: u32) -> Self {
        let [w, x, scale, min, x_scale, x_sum, _] = const { Self::OFFSETS };
        Stage {
            w: dynamic(start + w),
            x: dynamic(start + x),
            scale: dynamic(start + scale),
            min: dynamic(start + min),
            x_scale: dynamic(start + x_scale),
            x_sum: dynamic(start + x_sum),
            of: PhantomData,
        }
    }

    /// The parts of the weights from byte `w` and scale `scale` on, of the activations from `x` and `x_scale` on.
    #[inline(always)]
    fn at(&self, w: u32, scale: u32, x: u32, x_scale: u32) -> Self {
        Stage {
            w: self.w.add(w),
            x: self.x.add(x),
            scale: self.scale.add(scale),
            min: self.min.add(scale),
            x_scale: self.x_scale.add(x_scale),
            x_sum: self.x_sum.add(x_scale),
            of: PhantomData,
        }
    }
}

/// What this block computes: `n` rows of `y` from `first` on (of all, or of `order`), with an expert's weights.
struct Part {
    expert: u32,
    first: u32,
    n: u32,
}

impl Part {
    /// # Safety
    /// As [`matmul`].
    #[inline(always)]
    unsafe fn of_block(o: &Operands, p: &MatmulParams, tokens: u32) -> Self {
        let block = thread::block_idx_x();
        if o.tiles.is_null() {
            let first = block * tokens;
            return Part { expert: 0, first, n: tokens.min(p.routes - first) };
        }
        // Which expert it is was written by the grid ahead.
        pdl::grid_dependency_wait();
        // SAFETY: there is an entry for every block.
        let tile: U32x4 = unsafe { ld(o.tiles.add(block as usize)) };
        Part { expert: tile.x, first: tile.y, n: tile.z }
    }

    /// The row of `y` that is the tile's number `i`; the first for one past its end.
    ///
    /// # Safety
    /// As [`matmul`]; the part is not empty.
    #[inline(always)]
    unsafe fn route(&self, o: &Operands, i: u32) -> u32 {
        let at = self.first + if i < self.n { i } else { 0 };
        // SAFETY: the part lies within `order`.
        if o.order.is_null() { at } else { unsafe { ld(o.order.add(at as usize)) } }
    }

    /// The row of `x` for [`Part::route`].
    ///
    /// # Safety
    /// As [`Part::route`].
    #[inline(always)]
    unsafe fn x_row(&self, o: &Operands, p: &MatmulParams, i: u32) -> u32 {
        // SAFETY: the caller's promise; the launcher gives a divisor that is not 0.
        unsafe {
            let route = self.route(o, i);
            if o.order.is_null() { route } else { math::div_rem(route, p.x_div).0 }
        }
    }
}

/// The weights that a lane unpacks: `CH` chunks of one row each step.
struct WeightLane<F> {
    row: Row,
    /// The row's number in the tile.
    tile_row: u32,
    /// The lane's first chunk of a step, and how many lanes share the row.
    first: u32,
    of: PhantomData<F>,
}

impl<F: FormatTile> WeightLane<F> {
    /// # Safety
    /// As [`matmul`].
    #[inline(always)]
    unsafe fn new<G: Geometry>(o: &Operands, p: &MatmulParams, expert: u32) -> Self {
        let (lanes, thread) = (const { G::TILE.threads / G::TILE.rows }, thread::thread_idx_x());
        // Rows 0 2 4 6 1 3 5 7 of each eight, so that the lanes that store together do so in different banks.
        let tile_row = thread / lanes;
        let tile_row = tile_row & !7 | (tile_row & 3) << 1 | tile_row >> 2 & 1;
        // Rows past the end are the last one again, and are not stored.
        let row = (thread::block_idx_y() * G::TILE.rows + tile_row).min(p.rows - 1);
        let row = u64::from(expert) * u64::from(p.rows) + u64::from(row);
        // SAFETY: the row exists.
        let row = unsafe { Row::new::<F>(o.w, &p.planes, row, p.chunks) };
        WeightLane { row, tile_row, first: thread % lanes, of: PhantomData }
    }

    /// The lane's `i`-th chunk of step `step`.
    #[inline(always)]
    fn chunk<G: Geometry>(&self, step: u32, i: usize) -> u32 {
        step * const { G::TILE.step / F::CHUNK_ELEMS } + self.first + Self::further::<G>(i)
    }

    /// Chunks from a lane's first to its `i`-th: an even number, or a block's, so that runs start as much further on
    /// as those of chunk 0.
    #[inline(always)]
    fn further<G: Geometry>(i: usize) -> u32 {
        i as u32 * const { G::TILE.threads / G::TILE.rows }
    }

    /// Loads the chunks of a step; the row's last for those past its end.
    ///
    /// # Safety
    /// The row has `p.chunks` chunks.
    #[inline(always)]
    unsafe fn load<G: Geometry, const CH: usize>(&self, p: &MatmulParams, step: u32) -> [F::Raw; CH] {
        // SAFETY: the caller's promise.
        core::array::from_fn(|i| unsafe { F::load(&self.row, self.chunk::<G>(step, i).min(p.chunks - 1)) })
    }

    /// Unpacks the chunks of a step. Those past the row's end get a scale of 0.
    ///
    /// # Safety
    /// Nobody else accesses the stage's weights before the next barrier.
    #[inline(always)]
    unsafe fn unpack<G: Geometry, const CH: usize>(
        &self,
        p: &MatmulParams,
        step: u32,
        raw: &[F::Raw; CH],
        stage: &Stage<F, G>,
    ) {
        let (start, rows) = (F::start(self.first), const { G::TILE.rows });
        let to = stage.at(
            self.tile_row * const { row_bytes(G::TILE) } + start,
            start / F::GROUP_ELEMS * rows + self.tile_row,
            0,
            0,
        );
        for (i, raw) in raw.iter().enumerate() {
            let chunk = self.chunk::<G>(step, i);
            let (phase, live) = (chunk % F::BLOCK_CHUNKS, chunk < p.chunks);
            let integers = F::integers(raw, phase);
            for run in 0..F::RUNS as usize {
                let further = F::start(Self::further::<G>(i)) + run as u32 * F::RUN_DISTANCE;
                // SAFETY: the caller's promise; row and column are the tile's.
                unsafe {
                    to.w.add(further).cast().set(0, U32x4::from_array(integers[run]));
                    // One of the lanes that have a group, and that its first run, brings its scale.
                    if (start + further).is_multiple_of(F::GROUP_ELEMS) {
                        let [scale, min] = F::scale(raw, phase, run);
                        let group = further / F::GROUP_ELEMS * rows;
                        to.scale.set(group, zero_unless(live, scale));
                        if F::HAS_MIN {
                            to.min.set(group, zero_unless(live, min));
                        }
                    }
                }
            }
        }
    }
}

/// Scale of 32 activations, and their sum in two halves.
type XScale = (f32, F32x2);

/// The activations that a lane brings: `BI` units of integers and the scales of `XI` blocks each step.
struct XLane<const BI: usize, const XI: usize> {
    /// Where the rows of the units start, in elements, and where those of the blocks do, in blocks.
    units: [u32; BI],
    blocks: [u32; XI],
}

/// Which of `count` things, `per_token` of them in a row of the stage, is a lane's `i`-th: token and place.
#[inline(always)]
fn item<G: Geometry>(i: usize, per_token: u32) -> (u32, u32) {
    let thread = thread::thread_idx_x();
    (thread / per_token + i as u32 * (G::TILE.threads / per_token), thread % per_token)
}

impl<const BI: usize, const XI: usize> XLane<BI, XI> {
    /// # Safety
    /// As [`Part::x_row`].
    #[inline(always)]
    unsafe fn new<G: Geometry>(o: &Operands, p: &MatmulParams, part: &Part) -> Self {
        const {
            let tile = G::TILE;
            assert!(BI as u32 * tile.threads * UNIT == tile.tokens * tile.step);
            assert!(XI as u32 * tile.threads * Q8_BLOCK >= tile.tokens * tile.step);
        }
        // SAFETY: the caller's promise; the launcher has checked that elements of `x` have 32-bit numbers.
        unsafe {
            let row = |i: usize, per_token: u32| part.x_row(o, p, item::<G>(i, per_token).0);
            XLane {
                units: core::array::from_fn(|i| row(i, G::TILE.step / UNIT) * p.cols),
                blocks: core::array::from_fn(|i| row(i, G::TILE.step / Q8_BLOCK) * (p.cols / Q8_BLOCK)),
            }
        }
    }

    /// Starts to copy the integers of a step; zeros past the tile's tokens and the row's end.
    ///
    /// # Safety
    /// As [`matmul`]; nobody else accesses the stage's activations before the copy's end and a barrier.
    #[inline(always)]
    unsafe fn copy<F: FormatTile, G: Geometry>(
        &self,
        o: &Operands,
        p: &MatmulParams,
        part: &Part,
        step: u32,
        stage: &Stage<F, G>,
    ) {
        for (i, row) in self.units.iter().enumerate() {
            let (token, unit) = item::<G>(i, G::TILE.step / UNIT);
            let column = step * G::TILE.step + unit * UNIT;
            let inside = token < part.n && column < p.cols;
            // SAFETY: the row has the column if it is inside; else nothing is read.
            unsafe {
                let from = o.qs.add((row + select(inside, column, 0)) as usize).cast::<U32x4>();
                let to = stage.x.add(token * const { row_bytes(G::TILE) } + unit * UNIT).cast();
                cp_async::copy_16_or_zero(to, 0, from, inside);
            }
        }
        cp_async::commit();
    }

    /// Loads the scales of a step; zeros past the tile's tokens and the row's end.
    ///
    /// # Safety
    /// As [`matmul`].
    #[inline(always)]
    unsafe fn load<F: FormatTile, G: Geometry>(
        &self,
        o: &Operands,
        p: &MatmulParams,
        part: &Part,
        step: u32,
    ) -> [XScale; XI] {
        core::array::from_fn(|i| {
            let (token, block) = item::<G>(i, G::TILE.step / Q8_BLOCK);
            let block = step * const { G::TILE.step / Q8_BLOCK } + block;
            let live = token < part.n && block * Q8_BLOCK < p.cols;
            let at = (self.blocks[i] + select(live, block, 0)) as usize;
            const { assert!(Q8_BLOCK == 2 * Q8_SUM) };
            // SAFETY: the row has the block; block 0 where it is not live.
            unsafe {
                let sums = if F::HAS_MIN { ld(o.s.cast::<F32x2>().add(at)) } else { F32x2::splat(0.0) };
                (
                    zero_unless(live, ld(o.d.add(at))),
                    F32x2 { x: zero_unless(live, sums.x), y: zero_unless(live, sums.y) },
                )
            }
        })
    }

    /// Stores the scales of a step.
    ///
    /// # Safety
    /// Nobody else accesses the stage's scales before the next barrier.
    #[inline(always)]
    unsafe fn store<F: FormatTile, G: Geometry>(&self, scales: &[XScale; XI], stage: &Stage<F, G>) {
        for (i, (scale, sums)) in scales.iter().enumerate() {
            let (token, block) = item::<G>(i, G::TILE.step / Q8_BLOCK);
            if token < G::TILE.tokens {
                let to = block * const { Stage::<F, G>::X_STRIDE } + token;
                // SAFETY: the caller's promise; the token is the tile's.
                unsafe {
                    stage.x_scale.set(to, *scale);
                    if F::HAS_MIN {
                        stage.x_sum.set(to, sums.x + sums.y);
                    }
                }
            }
        }
    }
}

/// A lane's place in its warp's part of the tile.
#[derive(Clone, Copy)]
struct Place {
    /// The lane.
    lane: u32,
    /// First row and first token of the warp.
    row: u32,
    token: u32,
    /// Its number among the warps along the columns.
    k: u32,
}

impl Place {
    #[inline(always)]
    fn new<G: Geometry>() -> Self {
        let [rows, tokens, _] = G::WARPS;
        let (lane, warp) = (thread::thread_idx_x() % WARP, thread::thread_idx_x() / WARP);
        Place {
            lane,
            row: warp % rows * const { G::TILE.rows / G::WARPS[0] },
            token: warp / rows % tokens * const { G::TILE.tokens / G::WARPS[1] },
            k: warp / (rows * tokens),
        }
    }

    /// A stage from where this lane reads: its row of `ldmatrix`, and its place in C.
    #[inline(always)]
    fn of<F: FormatTile, G: Geometry, const NT: usize>(&self, stage: &Stage<F, G>) -> Stage<F, G> {
        let (lane, block, row_bytes) = (self.lane, self.k * WARP_BLOCKS, const { row_bytes(G::TILE) });
        let (g, t) = (lane / 4, lane % 4);
        // Sixteen rows' first halves, then their second. Of tokens, both halves of eight, then of the next eight;
        // where there are but eight tokens, words are read one by one.
        let w = (self.row + lane % 16) * row_bytes + lane / 16 * UNIT;
        let x =
            if NT == 1 { g * row_bytes + 4 * t } else { (lane % 8 + lane / 16 * 8) * row_bytes + lane / 8 % 2 * UNIT };
        stage.at(
            w + block * Q8_BLOCK,
            block * const { Q8_BLOCK / F::GROUP_ELEMS * G::TILE.rows } + self.row + g,
            self.token * row_bytes + x + block * Q8_BLOCK,
            block * const { Stage::<F, G>::X_STRIDE } + self.token + 2 * t,
        )
    }
}

/// A lane's sums: for `MT` by `NT` products, those of [`mma`]'s C.
type Sums<const MT: usize, const NT: usize> = [[[f32; 4]; NT]; MT];

/// Weights of 16 rows and one group, as a lane has them: scale, [`MAGIC`] times the scale, minimum; of two rows.
#[derive(Clone, Copy)]
struct Scales {
    scale: [f32; 2],
    offset: [f32; 2],
    min: [f32; 2],
}

impl Scales {
    /// # Safety
    /// As [`multiply`].
    #[inline(always)]
    unsafe fn load<F: FormatTile, G: Geometry>(from: &Stage<F, G>, group: u32, row: u32) -> Self {
        let at = group * G::TILE.rows + row;
        // SAFETY: the caller's promise.
        unsafe {
            let scale = [from.scale.get(at), from.scale.get(at + 8)];
            Scales {
                scale,
                offset: scale.map(|scale| scale * -f32::from_bits(MAGIC.cast_unsigned())),
                min: if F::HAS_MIN { [from.min.get(at), from.min.get(at + 8)] } else { [0.0; 2] },
            }
        }
    }

    /// Adds a product that started at [`MAGIC`], times both scales, without the minimum.
    #[inline(always)]
    fn add(&self, product: [i32; 4], x_scale: F32x2, sums: &mut [f32; 4]) {
        let x = x_scale.to_array();
        for j in 0..4 {
            let raw = f32::from_bits(product[j].cast_unsigned());
            sums[j] = math::fma(math::fma(raw, self.scale[j / 2], self.offset[j / 2]), x[j % 2], sums[j]);
        }
    }

    /// Subtracts the minimum times the activations' sum.
    #[inline(always)]
    fn subtract_min(&self, x_sum: F32x2, sums: &mut [f32; 4]) {
        let x = x_sum.to_array();
        for j in 0..4 {
            sums[j] = math::fma(-self.min[j / 2], x[j % 2], sums[j]);
        }
    }
}

/// The weights of 16 rows and one block, as a lane has them: [`mma`]'s A, and the scales of the block's groups.
#[derive(Clone, Copy)]
struct Rows {
    a: [u32; 4],
    /// The second where there are two.
    scales: [Scales; 2],
}

impl Rows {
    /// For the `m`-th sixteen rows and block `k` of the warp.
    ///
    /// # Safety
    /// As [`multiply`].
    #[inline(always)]
    unsafe fn load<F: FormatTile, G: Geometry>(from: &Stage<F, G>, k: u32, m: u32) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let a = mma::ldmatrix_x4(from.w, 16 * m * const { row_bytes(G::TILE) } + k * Q8_BLOCK);
            let groups = const { Q8_BLOCK / F::GROUP_ELEMS };
            let first = Scales::load(from, k * groups, 16 * m);
            Rows { a, scales: [first, if groups == 2 { Scales::load(from, k * groups + 1, 16 * m) } else { first }] }
        }
    }

    /// Adds the products with eight tokens' activations.
    ///
    /// # Safety
    /// Every lane of the warp comes here.
    #[inline(always)]
    unsafe fn add<F: FormatTile>(&self, b: [u32; 2], x_scale: F32x2, x_sum: F32x2, sums: &mut [f32; 4]) {
        let ([first, second], a) = (&self.scales, self.a);
        // SAFETY: the caller's promise.
        unsafe {
            if F::GROUP_ELEMS == 16 {
                first.add(mma::m16n8k16_s8([a[0], a[1]], b[0], [MAGIC; 4]), x_scale, sums);
                second.add(mma::m16n8k16_s8([a[2], a[3]], b[1], [MAGIC; 4]), x_scale, sums);
            } else {
                first.add(mma::m16n8k32_s8(a, b, [MAGIC; 4]), x_scale, sums);
            }
        }
        if F::HAS_MIN {
            first.subtract_min(x_sum, sums);
        }
    }
}

/// The activations of the warp's block `k` for the `pair`-th 16 tokens, as [`mma`]'s B; for eight where `NT` is 1.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn load_x<F: FormatTile, G: Geometry, const NT: usize>(from: &Stage<F, G>, k: u32, pair: u32) -> [[u32; 2]; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        if NT == 1 {
            let words = from.x.add(k * Q8_BLOCK).cast::<u32>();
            return [[words.get(0), words.get(UNIT / 4)], [0; 2]];
        }
        let [b0, b1, b2, b3] = mma::ldmatrix_x4(from.x, 16 * pair * const { row_bytes(G::TILE) } + k * Q8_BLOCK);
        [[b0, b1], [b2, b3]]
    }
}

/// Multiplies block `k` of the warp's part of a stage, `from` where the lane reads it.
///
/// # Safety
/// The stage is whole; every lane of the warp comes here.
#[inline(always)]
unsafe fn multiply<F: FormatTile, G: Geometry, const MT: usize, const NT: usize>(
    from: &Stage<F, G>,
    k: u32,
    sums: &mut Sums<MT, NT>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let rows: [Rows; MT] = core::array::from_fn(|m| Rows::load(from, k, m as u32));
        for pair in 0..NT.div_ceil(2) {
            let b = load_x::<F, G, NT>(from, k, pair as u32);
            for n in 2 * pair..(2 * pair + 2).min(NT) {
                let (b, x) = (b[n % 2], (k * const { Stage::<F, G>::X_STRIDE } + 8 * n as u32) / 2);
                let x_scale: F32x2 = from.x_scale.cast().get(x);
                let x_sum: F32x2 = if F::HAS_MIN { from.x_sum.cast().get(x) } else { F32x2::splat(0.0) };
                for m in 0..MT {
                    rows[m].add::<F>(b, x_scale, x_sum, &mut sums[m][n]);
                }
            }
        }
    }
}

/// One lane of a block.
///
/// # Safety
/// As [`matmul_q8_0_n8`](super::matmul_q8_0_n8), for the format and the tile.
#[inline(always)]
pub(super) unsafe fn matmul<
    F: FormatTile,
    G: Geometry,
    const MT: usize,
    const NT: usize,
    const CH: usize,
    const BI: usize,
    const XI: usize,
>(
    o: Operands,
    p: &MatmulParams,
) {
    const { assert!(CH as u32 * G::TILE.threads * F::CHUNK_ELEMS == G::TILE.rows * G::TILE.step) };
    // SAFETY: the caller's promise, item by item: rows, chunks, tokens and blocks are clamped or checked where they
    // are formed. A stage is written between the barrier that ends its use and the one that begins it.
    unsafe {
        let part = Part::of_block(&o, p, G::TILE.tokens);
        if part.n == 0 {
            return; // the whole block
        }
        let weights = WeightLane::<F>::new::<G>(&o, p, part.expert);
        let mut raw = weights.load::<G, CH>(p, 0);
        pdl::grid_dependency_wait();
        pdl::launch_dependents();

        let steps = p.cols.div_ceil(G::TILE.step);
        let x = XLane::<BI, XI>::new::<G>(&o, p, &part);
        let stage = Stage::<F, G>::new(0);
        x.copy(&o, p, &part, 0, &stage);
        let mut x_scales = x.load::<F, G>(&o, p, &part, 0);
        weights.unpack::<G, CH>(p, 0, &raw, &stage);
        x.store(&x_scales, &stage);
        if steps > 1 {
            raw = weights.load::<G, CH>(p, 1);
            x_scales = x.load::<F, G>(&o, p, &part, 1);
        }
        cp_async::wait::<0>();
        block::sync_threads(); // the first stage is whole

        let at = Place::new::<G>();
        let mut sums: Sums<MT, NT> = [[[0.0; 4]; NT]; MT];
        let (mut step, mut start) = (0, 0);
        loop {
            let stage = Stage::<F, G>::new(start);
            start = const { Stage::<F, G>::BYTES } - start;
            let next = Stage::<F, G>::new(start);
            let more = step + 1 < steps;
            if more {
                x.copy(&o, p, &part, step + 1, &next);
            }
            let from = at.of::<F, G, NT>(&stage);
            // Warps whose tokens are all past the tile's end have nothing to multiply.
            let mut k = if at.token < part.n { 0 } else { WARP_BLOCKS };
            while k < WARP_BLOCKS {
                multiply::<F, G, MT, NT>(&from, k, &mut sums);
                k += 1;
            }
            step += 1;
            if !more {
                break;
            }
            weights.unpack::<G, CH>(p, step, &raw, &next);
            x.store(&x_scales, &next);
            if step + 1 < steps {
                raw = weights.load::<G, CH>(p, step + 1);
                x_scales = x.load::<F, G>(&o, p, &part, step + 1);
            }
            cp_async::wait::<0>();
            block::sync_threads(); // the next stage is whole, and this one is done with
        }
        finish::<G, MT, NT>(&o, p, &part, at, &sums);
    }
}

/// Adds up what the warps along the columns have, and stores the tile.
///
/// # Safety
/// As [`matmul`].
#[inline(always)]
unsafe fn finish<G: Geometry, const MT: usize, const NT: usize>(
    o: &Operands,
    p: &MatmulParams,
    part: &Part,
    at: Place,
    sums: &Sums<MT, NT>,
) {
    let k_warps = const { G::WARPS[2] };
    let (g, t) = (at.lane / 4, at.lane % 4);
    // SAFETY: the caller's promise; the partial sums take 16·NT bytes a lane, less than a stage.
    unsafe {
        if k_warps == 1 {
            for n in 0..NT {
                for j in 0..2 {
                    let out = Out::new::<G>(o, p, part, at.row + g, at.token + 8 * n as u32 + 2 * t + j);
                    for m in 0..MT {
                        out.store(p, 16 * m as u32, sums[m][n][j as usize]);
                        out.store(p, 16 * m as u32 + 8, sums[m][n][j as usize + 2]);
                    }
                }
            }
            return;
        }
        // `[warp along k, value, other warps and lanes]`
        const { assert!(G::WARPS[2] == 1 || (MT == 1 && G::WARPS[1] == 1)) };
        let values = 4 * NT as u32;
        let others = const { G::TILE.threads / G::WARPS[2] };
        let partial = dynamic::<f32>(0).add(at.row / 16 * WARP + at.lane);
        block::sync_threads(); // everybody is done with the stages
        for n in 0..NT {
            for j in 0..4 {
                partial.set((at.k * values + 4 * n as u32 + j) * others, sums[0][n][j as usize]);
            }
        }
        block::sync_threads(); // all partial sums are there
        // The warps share the values; each adds in the order of the columns.
        let mut value = at.k;
        while value < values {
            let mut sum = 0.0;
            for k in 0..k_warps {
                sum += partial.get((k * values + value) * others);
            }
            let (n, j) = (value / 4, value % 4);
            Out::new::<G>(o, p, part, at.row + g, at.token + 8 * n + 2 * t + j % 2).store(p, 8 * (j / 2), sum);
            value += k_warps;
        }
    }
}

/// Where a lane's sums of one token go.
struct Out {
    y: *mut f32,
    /// Null without a bias.
    bias: *const f32,
    /// Rows from here to the matrix's end; none for a token past the tile's.
    rows: u32,
}

impl Out {
    /// For the tile's row `tile_row` and those after it.
    ///
    /// # Safety
    /// As [`matmul`].
    #[inline(always)]
    unsafe fn new<G: Geometry>(o: &Operands, p: &MatmulParams, part: &Part, tile_row: u32, token: u32) -> Self {
        let row = thread::block_idx_y() * G::TILE.rows + tile_row;
        let rows = if token < part.n && row < p.rows { p.rows - row } else { 0 };
        // SAFETY: the caller's promise; a place past the end is formed, but not used.
        unsafe {
            let at = part.route(o, token) as usize * p.y_stride as usize + row as usize;
            let bias = part.expert as usize * p.rows as usize + row as usize;
            Out {
                y: o.y.wrapping_add(at),
                bias: if o.bias.is_null() { o.bias } else { o.bias.wrapping_add(bias) },
                rows,
            }
        }
    }

    /// Stores the sum of the row `further` on, if there is one.
    ///
    /// # Safety
    /// As [`matmul`].
    #[inline(always)]
    unsafe fn store(&self, p: &MatmulParams, further: u32, sum: f32) {
        if further >= self.rows {
            return;
        }
        // SAFETY: the row exists.
        unsafe {
            let y = self.y.add(further as usize);
            let mut sum = sum;
            if !self.bias.is_null() {
                sum += ld(self.bias.add(further as usize));
            }
            if p.accumulate != 0 {
                sum += ld(y);
            }
            st(y, sum);
        }
    }
}
