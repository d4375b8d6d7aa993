//! What a lane brings to a stage: weights, unpacked, and activations.

use core::marker::PhantomData;

use cuda_std::{cp_async, prelude::*};

use super::MatmulParams;
use super::stage::{Geometry, Stage, UNIT, row_bytes};
use super::tile::{Operands, Part};
use crate::kernels::format::{FormatTile, Row, select};
use crate::params::Q8_BLOCK;

/// A number, or 0, without a branch.
#[inline(always)]
fn zero_unless(live: bool, x: f32) -> f32 {
    core::hint::select_unpredictable(live, x, 0.0)
}

/// The weights that a lane unpacks: `CH` chunks of one row each step.
pub(super) struct WeightLane<F> {
    row: Row,
    /// The row's number in the tile.
    tile_row: u32,
    /// The lane's first chunk of a step, and how many lanes share the row.
    first: u32,
    of: PhantomData<F>,
}

impl<F: FormatTile> WeightLane<F> {
    /// # Safety
    /// As [`matmul`](super::tile::matmul).
    #[inline(always)]
    pub(super) unsafe fn new<G: Geometry>(o: &Operands, p: &MatmulParams, expert: u32) -> Self {
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
    pub(super) unsafe fn load<G: Geometry, const CH: usize>(&self, p: &MatmulParams, step: u32) -> [F::Raw; CH] {
        // SAFETY: the caller's promise.
        core::array::from_fn(|i| unsafe { F::load(&self.row, self.chunk::<G>(step, i).min(p.chunks - 1)) })
    }

    /// Unpacks the chunks of a step. Those past the row's end get a scale of 0.
    ///
    /// # Safety
    /// Nobody else accesses the stage's weights before the next barrier.
    #[inline(always)]
    pub(super) unsafe fn unpack<G: Geometry, const CH: usize>(
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

/// The activations that a lane brings: `BI` units each step, each with its scale and its sum.
pub(super) struct XLane<const BI: usize> {
    /// Where the rows of the units start, in elements.
    rows: [u32; BI],
}

/// Which of the units of a step is a lane's `i`-th: token and place.
#[inline(always)]
fn unit<G: Geometry>(i: usize) -> (u32, u32) {
    let (thread, per_token) = (thread::thread_idx_x(), const { G::TILE.step / UNIT });
    (thread / per_token + i as u32 * const { G::TILE.threads * UNIT / G::TILE.step }, thread % per_token)
}

impl<const BI: usize> XLane<BI> {
    /// # Safety
    /// As [`Part::x_row`].
    #[inline(always)]
    pub(super) unsafe fn new<G: Geometry>(o: &Operands, p: &MatmulParams, part: &Part) -> Self {
        const { assert!(BI as u32 * G::TILE.threads * UNIT == G::TILE.tokens * G::TILE.step) };
        // SAFETY: the caller's promise; the launcher has checked that elements of `x` have 32-bit numbers.
        let row = |i: usize| unsafe { part.x_row(&o.to, p, unit::<G>(i).0) };
        XLane { rows: core::array::from_fn(|i| row(i) * p.cols) }
    }

    /// Starts to copy the units of a step; zeros past the tile's tokens and the row's end.
    ///
    /// # Safety
    /// As [`matmul`](super::tile::matmul); nobody else accesses the stage's activations before the copy's end and a barrier.
    #[inline(always)]
    pub(super) unsafe fn copy<F: FormatTile, G: Geometry>(
        &self,
        o: &Operands,
        p: &MatmulParams,
        part: &Part,
        step: u32,
        stage: &Stage<F, G>,
    ) {
        const { assert!(UNIT == Q8_BLOCK) };
        for (i, row) in self.rows.iter().enumerate() {
            let (token, unit) = unit::<G>(i);
            let column = step * G::TILE.step + unit * UNIT;
            let inside = token < part.n && column < p.cols;
            let from = (row + select(inside, column, 0)) as usize;
            let scale = unit * const { Stage::<F, G>::X_STRIDE } + token;
            // SAFETY: the row has the unit if it is inside; else nothing is read.
            unsafe {
                let to = stage.x.add(token * const { row_bytes(G::TILE) } + unit * UNIT).cast::<U32x4>();
                cp_async::copy_16_or_zero(to, 0, o.qs.add(from).cast(), inside);
                cp_async::copy_4_or_zero(stage.x_scale, scale, o.d.add(from / Q8_BLOCK as usize), inside);
                if F::HAS_MIN {
                    cp_async::copy_4_or_zero(stage.x_sum, scale, o.s.add(from / Q8_BLOCK as usize), inside);
                }
            }
        }
        cp_async::commit();
    }
}
