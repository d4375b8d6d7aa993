//! The right-hand side of a matvec: activations in f32, or quantised.

use cuda_std::prelude::*;

use super::sweep::Source;
use crate::kernels::format::{F32, Format, FormatQ8, Q8Run, select};
use crate::params::Q8_BLOCK;

/// Activations as a kernel reads them.
pub(in crate::kernels) trait Operand<F: Format>: Copy {
    /// What a lane holds of them for one chunk of weights.
    type Chunk: Copy;

    /// Those of row `row`, where rows are `stride` elements apart.
    ///
    /// # Safety
    /// There is such a row.
    unsafe fn row(self, row: u32, stride: u32) -> Self;

    /// Loads what belongs to a chunk whose first run starts at element `start`; what makes its products zero unless `live`.
    ///
    /// # Safety
    /// The activations have a chunk, and where `live` they have this one.
    unsafe fn load(self, start: u32, live: bool) -> Self::Chunk;

    /// `Σ w·x` over a chunk.
    fn dot(raw: &F::Raw, x: &Self::Chunk, phase: u32) -> f32;
}

/// `x: [rows, cols]` in f32.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Plain {
    pub(in crate::kernels) x: *const f32,
}

/// The most quads that a chunk has: 32 elements.
const MAX_QUADS: usize = 8;

impl Plain {
    /// Quad `I` of a chunk; zeros where the format's chunk has fewer.
    ///
    /// # Safety
    /// As [`Operand::load`].
    #[inline(always)]
    unsafe fn quad<F: Format>(self, start: u32, live: bool, i: u32) -> [f32; 4] {
        if 4 * i >= F::CHUNK_ELEMS {
            return [0.0; 4];
        }
        // SAFETY: the caller's promise; rows and runs are multiples of four elements.
        let x: F32x4 = unsafe { ld(self.x.add((start + F::quad_offset(i)) as usize).cast()) };
        x.to_array().map(|x| zero_unless(live, x))
    }

    /// `sum + Σ w·x` over quad `I`, if the format's chunk has so many.
    #[inline(always)]
    fn add<F: Format, const I: u32>(sum: f32, raw: &F::Raw, x: &[[f32; 4]; MAX_QUADS], phase: u32) -> f32 {
        if 4 * I >= F::CHUNK_ELEMS {
            return sum;
        }
        let (w, x) = (F::quad::<I>(raw, phase), x[I as usize]);
        math::fma(w[3], x[3], math::fma(w[2], x[2], math::fma(w[1], x[1], math::fma(w[0], x[0], sum))))
    }
}

impl<F: Format> Operand<F> for Plain {
    type Chunk = [[f32; 4]; MAX_QUADS];

    #[inline(always)]
    unsafe fn row(self, row: u32, stride: u32) -> Self {
        // SAFETY: the caller's promise.
        Self { x: unsafe { self.x.add(row as usize * stride as usize) } }
    }

    #[inline(always)]
    unsafe fn load(self, start: u32, live: bool) -> Self::Chunk {
        let start = select(live, start, 0);
        // SAFETY: the caller's promise.
        core::array::from_fn(|i| unsafe { self.quad::<F>(start, live, i as u32) })
    }

    // Written out: an index that the compiler knows keeps a lane's arrays in registers.
    #[inline(always)]
    fn dot(raw: &F::Raw, x: &Self::Chunk, phase: u32) -> f32 {
        let sum = Self::add::<F, 0>(0.0, raw, x, phase);
        let sum = Self::add::<F, 1>(sum, raw, x, phase);
        let sum = Self::add::<F, 2>(sum, raw, x, phase);
        let sum = Self::add::<F, 3>(sum, raw, x, phase);
        let sum = Self::add::<F, 4>(sum, raw, x, phase);
        let sum = Self::add::<F, 5>(sum, raw, x, phase);
        let sum = Self::add::<F, 6>(sum, raw, x, phase);
        Self::add::<F, 7>(sum, raw, x, phase)
    }
}

/// `x: [rows, cols]` quantised: `qs` integers, for every 16 of them `d` a scale and `s` a sum.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Quantized {
    pub(in crate::kernels) qs: *const i8,
    pub(in crate::kernels) d: *const f32,
    pub(in crate::kernels) s: *const f32,
}

impl Quantized {
    /// The sixteen activations from element `start` on; zeros unless `live`.
    ///
    /// # Safety
    /// The row has them.
    #[inline(always)]
    unsafe fn run(self, start: u32, live: bool) -> Q8Run {
        // SAFETY: the caller's promise; runs start at multiples of 16.
        unsafe {
            let (qs, block): (U32x4, _) = (ld(self.qs.add(start as usize).cast()), (start / Q8_BLOCK) as usize);
            let (d, s) = (ld(self.d.add(block)), ld(self.s.add(block)));
            Q8Run { qs: qs.to_array(), d: zero_unless(live, d), s: zero_unless(live, s) }
        }
    }
}

impl<F: FormatQ8> Operand<F> for Quantized {
    type Chunk = [Q8Run; 2];

    #[inline(always)]
    unsafe fn row(self, row: u32, stride: u32) -> Self {
        let at = |elems: u32| row as usize * (stride / elems) as usize;
        // SAFETY: the caller's promise.
        unsafe { Self { qs: self.qs.add(at(1)), d: self.d.add(at(Q8_BLOCK)), s: self.s.add(at(Q8_BLOCK)) } }
    }

    #[inline(always)]
    unsafe fn load(self, start: u32, live: bool) -> Self::Chunk {
        let start = select(live, start, 0);
        // SAFETY: the caller's promise; where there is one run, the second is the first, and not used.
        unsafe { [self.run(start, live), self.run(start + F::RUN_DISTANCE, live)] }
    }

    #[inline(always)]
    fn dot(raw: &F::Raw, x: &Self::Chunk, phase: u32) -> f32 {
        F::dot_q8(raw, x, phase)
    }
}

/// Blocks of sixteen that a lane loads together where it copies a row.
const COPIED: usize = 3;

/// Blocks of sixteen behind a row in shared memory that are zero, for both runs of a chunk that is not there; an even number,
/// so that what lies behind them is aligned.
const ZEROS: u32 = 6;

/// One row of `x` in shared memory, quantised; behind it zeros.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct StagedQuantized {
    /// Blocks of sixteen.
    n: u32,
    qs: Shared<U32x4>,
    /// Scale and sum.
    ds: Shared<F32x2>,
}

impl StagedQuantized {
    /// Shared memory for a row of `cols` columns.
    pub(in crate::kernels) const fn bytes(cols: u32) -> u32 {
        (cols / Q8_BLOCK + ZEROS) * (16 + 8)
    }

    /// A row of `cols` columns in shared memory from byte `offset` on; it is yet to be written.
    #[inline(always)]
    pub(in crate::kernels) fn at(offset: u32, cols: u32) -> Self {
        let n = cols / Q8_BLOCK;
        Self { n, qs: dynamic(offset), ds: dynamic(offset + 16 * (n + ZEROS)) }
    }

    /// Four activations, from element `at` on.
    ///
    /// # Safety
    /// The row has them; no other lane accesses them before the next barrier.
    #[inline(always)]
    pub(in crate::kernels) unsafe fn set_quad(self, at: u32, qs: u32) {
        // SAFETY: the caller's promise.
        unsafe { self.qs.cast::<u32>().set(at / 4, qs) }
    }

    /// Scale and sum of block `block`.
    ///
    /// # Safety
    /// As [`set_quad`](Self::set_quad).
    #[inline(always)]
    pub(in crate::kernels) unsafe fn set_scale(self, block: u32, d: f32, s: f32) {
        // SAFETY: the caller's promise.
        unsafe { self.ds.set(block, F32x2 { x: d, y: s }) }
    }

    /// Writes the zeros.
    ///
    /// # Safety
    /// All of the block comes here, with more lanes than there are zeros, and to a barrier before the row is read.
    #[inline(always)]
    pub(in crate::kernels) unsafe fn end(self) {
        let at = thread::thread_idx_x();
        if at < ZEROS {
            // SAFETY: the caller's promise.
            unsafe {
                self.qs.set(self.n + at, U32x4::splat(0));
                self.set_scale(self.n + at, 0.0, 0.0);
            }
        }
    }

    /// The activations of block `block`.
    ///
    /// # Safety
    /// It is there, or one of the zeros, and is written.
    #[inline(always)]
    unsafe fn run(self, block: u32) -> Q8Run {
        // SAFETY: the caller's promise.
        let (qs, ds) = unsafe { (self.qs.get(block), self.ds.get(block)) };
        Q8Run { qs: qs.to_array(), d: ds.x, s: ds.y }
    }
}

impl<F: FormatQ8> Operand<F> for StagedQuantized {
    type Chunk = [Q8Run; 2];

    #[inline(always)]
    unsafe fn row(self, _row: u32, _stride: u32) -> Self {
        self
    }

    #[inline(always)]
    unsafe fn load(self, start: u32, live: bool) -> Self::Chunk {
        const { assert!(F::RUN_DISTANCE / Q8_BLOCK < ZEROS) };
        let block = select(live, start / Q8_BLOCK, self.n);
        // SAFETY: the caller's promise; runs start at multiples of 16; where there is one run, the second is not used.
        unsafe { [self.run(block), self.run(block + F::RUN_DISTANCE / Q8_BLOCK)] }
    }

    #[inline(always)]
    fn dot(raw: &F::Raw, x: &Self::Chunk, phase: u32) -> f32 {
        F::dot_q8(raw, x, phase)
    }
}

/// One row of `x` in shared memory, in f32, for weights in F32.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct StagedPlain {
    pub(in crate::kernels) x: Shared<F32x4>,
}

impl Operand<F32> for StagedPlain {
    type Chunk = <Plain as Operand<F32>>::Chunk;

    #[inline(always)]
    unsafe fn row(self, _row: u32, _stride: u32) -> Self {
        self
    }

    #[inline(always)]
    unsafe fn load(self, start: u32, live: bool) -> Self::Chunk {
        let mut chunk = [[0.0; 4]; MAX_QUADS];
        let start = select(live, start, 0);
        // SAFETY: the caller's promise; chunks start at multiples of four elements.
        chunk[0] = unsafe { self.x.get(start / F32::CHUNK_ELEMS) }.to_array().map(|x| zero_unless(live, x));
        chunk
    }

    #[inline(always)]
    fn dot(raw: &<F32 as Format>::Raw, x: &Self::Chunk, phase: u32) -> f32 {
        <Plain as Operand<F32>>::dot(raw, x, phase)
    }
}

/// A lane past the row's end must add nothing. Its weights are those of the row's last chunk, so a NaN
/// among them is the row's own.
#[inline(always)]
fn zero_unless(live: bool, x: f32) -> f32 {
    core::hint::select_unpredictable(live, x, 0.0)
}

/// A row in global memory, which a block of `threads` lanes copies to the start of its shared memory.
pub(in crate::kernels) struct CopiedRow {
    pub(in crate::kernels) x: Quantized,
    /// Columns, at least 16.
    pub(in crate::kernels) cols: u32,
    pub(in crate::kernels) threads: u32,
}

/// Asks for [`StagedQuantized::bytes`] of shared memory, which nobody uses, and a row of `cols` columns.
impl<F: FormatQ8> Source<F> for CopiedRow {
    type X = StagedQuantized;
    type Early = ();
    const MEANWHILE: bool = false;

    #[inline(always)]
    unsafe fn early(&self) {}

    #[inline(always)]
    unsafe fn make(&self, (): (), _meanwhile: impl FnOnce(u32)) -> StagedQuantized {
        let (staged, n) = (StagedQuantized::at(0, self.cols), self.cols / Q8_BLOCK);
        // SAFETY: the caller's promise.
        unsafe { staged.end() };
        let mut first = thread::thread_idx_x();
        while first < n {
            let place = |k: usize| first + k as u32 * self.threads;
            // SAFETY: the row has the blocks of sixteen below `n`.
            let runs: [_; COPIED] =
                core::array::from_fn(|k| unsafe { self.x.run(place(k).min(n - 1) * Q8_BLOCK, true) });
            for k in 0..COPIED {
                if place(k) < n {
                    // SAFETY: as above; a lane alone has the block.
                    unsafe {
                        staged.qs.set(place(k), U32x4::from_array(runs[k].qs));
                        staged.set_scale(place(k), runs[k].d, runs[k].s);
                    }
                }
            }
            first += COPIED as u32 * self.threads;
        }
        block::sync_threads(); // the row is whole before it is read
        staged
    }
}
