//! A row that every block norms and quantises for itself, into shared memory, to multiply it.
//!
//! The arithmetic is that of [`rms_norm_q8`](super::rms_norm::rms_norm_q8), bit for bit.

use cuda_std::prelude::*;

use super::format::FormatQ8;
use super::matvec::{Source, StagedQuantized};
use super::quantize_q8::quantized4;
use super::rms_norm::{self, RMS_NORM_THREADS};
use crate::blocks::GgmlType;
use crate::params::Q8_BLOCK;

/// Lanes of a block.
pub(super) const THREADS: u32 = RMS_NORM_THREADS;
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

/// The source of a row's activations that a block of [`THREADS`] lanes norms and quantises.
///
/// Asks for [`staged_bytes`] of shared memory that nobody uses; `norm.x` and `norm.w` have `cols` elements, a positive
/// multiple of 32, and are 16-byte aligned, as are `plain`, and with `keep` the results of `norm`.
pub(super) struct NormedRow<'a> {
    pub(super) norm: &'a Norm,
    pub(super) cols: u32,
    pub(super) eps: f32,
    /// Where the row also goes in f32.
    pub(super) plain: Option<Shared<F32x4>>,
    /// Whether the results of `norm` are written.
    pub(super) keep: bool,
}

impl<F: FormatQ8> Source<F> for NormedRow<'_> {
    type X = StagedQuantized;
    type Early = rms_norm::NormedRow;
    // Two steps of these take more registers than there are beside a norm.
    const MEANWHILE: bool = !matches!(F::TYPE, GgmlType::Q8_0 | GgmlType::Q6K);

    #[inline(always)]
    unsafe fn early(&self) -> rms_norm::NormedRow {
        // SAFETY: the caller's promise.
        unsafe { rms_norm::NormedRow::new(self.norm.w, self.cols) }
    }

    #[inline(always)]
    unsafe fn make(&self, early: rms_norm::NormedRow, meanwhile: impl FnOnce(u32)) -> StagedQuantized {
        let (norm, staged) = (self.norm, StagedQuantized::at(QS, self.cols));
        // SAFETY: the caller's promise.
        let fetched = unsafe { early.fetch(norm.x) };
        if <Self as Source<F>>::MEANWHILE {
            meanwhile(early.word() ^ rms_norm::word(&fetched));
        }
        // SAFETY: the caller's promise; a lane alone has the elements, and four lanes have a block.
        unsafe {
            staged.end();
            early.norm(norm.x, fetched, self.eps, |at, live, v| {
                let quad = quantized4(v.to_array());
                if !live {
                    return;
                }
                if let Some(plain) = self.plain {
                    plain.set(at / 4, v);
                }
                staged.set_quad(at, quad.qs);
                let to = at as usize;
                if self.keep {
                    st(norm.y.add(to).cast(), v);
                    st(norm.qs.add(to).cast(), quad.qs);
                }
                if at.is_multiple_of(Q8_BLOCK) {
                    staged.set_scale(at / Q8_BLOCK, quad.d, quad.s);
                    if self.keep {
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
