//! A row that every block norms and quantises for itself, into shared memory, to multiply it.
//!
//! The arithmetic is that of [`rms_norm_q8`](super::rms_norm::rms_norm_q8), bit for bit.

use cuda_std::prelude::*;

use super::matvec::StagedQuantized;
use super::quantize_q8::quantized4;
use super::rms_norm;
use crate::params::Q8_BLOCK;

/// Where the row's integers lie in shared memory; before them, a word for each warp of the largest block.
const QS: u32 = 32 * 4;

/// Shared memory for the quantised row of `cols` columns.
pub(super) const fn staged_bytes(cols: u32) -> u32 {
    QS + StagedQuantized::bytes(cols)
}

/// The row, the norm's weights, and where the normed row goes.
pub(super) struct Norm {
    pub(super) x: *const f32,
    pub(super) w: *const f32,
    pub(super) y: *mut f32,
    pub(super) qs: *mut i8,
    pub(super) d: *mut f32,
    pub(super) s: *mut f32,
}

/// A row whose norm's weights are under way: `HELD` vectors of each of the block's `THREADS` lanes are in registers.
pub(super) struct NormedRow<const HELD: usize, const THREADS: u32> {
    row: rms_norm::NormedRow<HELD, THREADS>,
    cols: u32,
    eps: f32,
}

impl<const HELD: usize, const THREADS: u32> NormedRow<HELD, THREADS> {
    /// Loads the first of the norm's weights.
    ///
    /// # Safety
    /// `norm.w` has `cols` elements, a positive multiple of 32, and is 16-byte aligned.
    #[inline(always)]
    pub(super) unsafe fn new(norm: &Norm, cols: u32, eps: f32) -> Self {
        // SAFETY: the caller's promise.
        Self { row: unsafe { rms_norm::NormedRow::new(norm.w, cols) }, cols, eps }
    }

    /// Norms and quantises the row: to shared memory, also in f32 to `plain` where that is wanted, and with `keep` to
    /// the results of `norm`. Ends with a barrier.
    ///
    /// # Safety
    /// The whole block comes here, with [`staged_bytes`] of shared memory that nobody uses; `norm.x` has the columns, as
    /// have the results with `keep`, and `plain`.
    #[inline(always)]
    pub(super) unsafe fn stage(&self, norm: &Norm, plain: Option<Shared<F32x4>>, keep: bool) -> StagedQuantized {
        let staged = StagedQuantized::at(QS, self.cols);
        // SAFETY: the caller's promise; a lane alone has the elements, and four lanes have a block.
        unsafe {
            self.row.norm(norm.x, self.eps, |at, live, v| {
                let quad = quantized4(v.to_array());
                if !live {
                    return;
                }
                if let Some(plain) = plain {
                    plain.set(at / 4, v);
                }
                staged.qs.cast::<u32>().set(at / 4, quad.qs);
                let to = at as usize;
                if keep {
                    st(norm.y.add(to).cast(), v);
                    st(norm.qs.add(to).cast(), quad.qs);
                }
                if at.is_multiple_of(Q8_BLOCK) {
                    staged.d.set(at / Q8_BLOCK, quad.d);
                    staged.s.set(at / Q8_BLOCK, quad.s);
                    if keep {
                        st(norm.d.add(to / Q8_BLOCK as usize), quad.d);
                        st(norm.s.add(to / Q8_BLOCK as usize), quad.s);
                    }
                }
            });
        }
        block::sync_threads(); // the row is whole before it is read, and the norm's words are free
        staged
    }
}
