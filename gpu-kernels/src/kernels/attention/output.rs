//! What becomes of a row's heads when all of their keys are in: the sink's share, the gate, the int8 form.

use cuda_std::prelude::*;

use super::weight;
use crate::kernels::quantize_q8::quantize4;

/// Where heads go, and what is done to them first.
#[derive(Clone, Copy)]
pub(super) struct Output {
    /// A score for each head that has no value, or null.
    pub(super) sinks: *const f32,
    /// Pairs of a query and its gate, `[rows, n_head, 2, head_dim]`, or null.
    pub(super) pairs: *const f32,
    /// `[rows, n_head, head_dim]`.
    pub(super) out: *mut f32,
    /// The int8 form of `out`: as many integers, a scale and a sum for every 16; or null.
    pub(super) qs: *mut i8,
    pub(super) d: *mut f32,
    pub(super) s: *mut f32,
}

impl Output {
    /// The sink of a row's head `head`; −∞, which weighs nothing, without sinks.
    ///
    /// # Safety
    /// The head is there.
    #[inline(always)]
    pub(super) unsafe fn sink(&self, head: u32) -> f32 {
        // SAFETY: the caller's promise.
        if self.sinks.is_null() { f32::NEG_INFINITY } else { unsafe { ld(self.sinks.add(head as usize)) } }
    }

    /// Four gates, from element `elem` of head `head` on, which counts through all rows.
    ///
    /// # Safety
    /// They are there, and `elem` is a multiple of four.
    #[inline(always)]
    pub(super) unsafe fn gate(&self, head: usize, head_dim: u32, elem: u32) -> Option<[f32; 4]> {
        if self.pairs.is_null() {
            return None;
        }
        // SAFETY: the caller's promise.
        let gate = unsafe { ld(self.pairs.add((2 * head + 1) * head_dim as usize + elem as usize).cast::<F32x4>()) };
        Some(gate.to_array())
    }

    /// Stores four elements of the result at element `at` of `out` where `live`, gated, and quantised where that is asked for.
    ///
    /// # Safety
    /// As [`quantize4`].
    #[inline(always)]
    pub(super) unsafe fn store(&self, mut x: [f32; 4], gate: Option<[f32; 4]>, live: bool, at: usize) {
        if let Some(gate) = gate {
            x = core::array::from_fn(|e| x[e] * math::sigmoid(gate[e]));
        }
        // SAFETY: the caller's promise.
        unsafe {
            if live {
                st(self.out.add(at).cast::<F32x4>(), F32x4::from_array(x));
            }
            if !self.qs.is_null() {
                quantize4(x, live, at, self.qs, self.d, self.s);
            }
        }
    }
}

/// What divides a head's open softmax: `(max, sum)` with the sink's share, and the weight of its output.
#[inline(always)]
pub(super) fn closed((max, sum): (f32, f32), sink: f32) -> (f32, f32) {
    let top = math::max(max, sink);
    let kept = weight(max, top);
    (inverse(math::fma(kept, sum, 0.0) + weight(sink, top)), kept)
}

/// `1 / sum`; an empty sum gives 0.
#[inline(always)]
pub(super) fn inverse(sum: f32) -> f32 {
    if sum > 0.0 { 1.0 / sum } else { 0.0 }
}
