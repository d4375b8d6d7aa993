//! The state of a gated delta net in registers.
//!
//! Sixteen lanes share [`LANE_ROWS`] rows of a head's state, each an interleaved sixteenth of the columns of all four. A
//! lane has a number of two digits base 4, `(r, t)`. It ends up with the sums of row `r`, and its slot `s` holds row
//! `s ^ r`. So in the exchange with the lane whose number differs in one bit, every lane keeps the lower slots and gives
//! the upper ones: which registers these are does not depend on the lane, and neither does it on the way back, where the
//! value for slot `s` is that of a lane with first digit `s ^ r`.

use cuda_std::prelude::*;

/// Rows of the state of a lane, and of the sixteen lanes that share them.
pub const LANE_ROWS: u32 = 4;

const R: usize = LANE_ROWS as usize;

/// `a·b + sum`.
#[inline(always)]
pub(crate) fn dot(a: F32x4, b: F32x4, sum: f32) -> f32 {
    math::fma(a.w, b.w, math::fma(a.z, b.z, math::fma(a.y, b.y, math::fma(a.x, b.x, sum))))
}

/// `a·b + c`.
#[inline(always)]
fn fma4(a: f32, b: F32x4, c: F32x4) -> F32x4 {
    F32x4 { x: math::fma(a, b.x, c.x), y: math::fma(a, b.y, c.y), z: math::fma(a, b.z, c.z), w: math::fma(a, b.w, c.w) }
}

/// How far vector `j` of slot `s` lies behind a lane's first vector of the four rows.
#[inline(always)]
fn vector<const V: usize>(s: usize, r: u32, j: usize) -> usize {
    ((s as u32 ^ r) * 16 * V as u32 + 16 * j as u32) as usize
}

/// What a lane holds of the state: `V` vectors of each of four rows, slot `s` for row `s ^ r`.
pub(crate) struct State<const V: usize>([[F32x4; V]; R]);

impl<const V: usize> State<V> {
    #[inline(always)]
    pub(crate) fn zero() -> Self {
        State([[F32x4::splat(0.0); V]; R])
    }

    /// Reads it; `from` is at the lane's first vector of the first of the four rows.
    ///
    /// # Safety
    /// There are four rows of `64·V` elements; `r < 4`.
    #[inline(always)]
    pub(crate) unsafe fn load(from: *const F32x4, r: u32) -> Self {
        let mut state = Self::zero();
        let mut s = 0;
        while s < R {
            let mut j = 0;
            while j < V {
                // SAFETY: the caller's promise.
                state.0[s][j] = unsafe { ld(from.add(vector::<V>(s, r, j))) };
                j += 1;
            }
            s += 1;
        }
        state
    }

    /// Writes it where [`load`](Self::load) reads it.
    ///
    /// # Safety
    /// As there; no other lane touches these vectors.
    #[inline(always)]
    pub(crate) unsafe fn store(&self, to: *mut F32x4, r: u32) {
        let mut s = 0;
        while s < R {
            let mut j = 0;
            while j < V {
                // SAFETY: the caller's promise.
                unsafe { st(to.add(vector::<V>(s, r, j)), self.0[s][j]) };
                j += 1;
            }
            s += 1;
        }
    }

    /// Adds vector `j`'s part of `S·x` to sums by slots of rows.
    #[inline(always)]
    pub(crate) fn add_times(&self, j: usize, x: F32x4, sums: &mut [f32; R]) {
        let mut s = 0;
        while s < R {
            sums[s] = dot(self.0[s][j], x, sums[s]);
            s += 1;
        }
    }

    /// The lane's part of `S·x`.
    #[inline(always)]
    pub(crate) fn times(&self, x: &[F32x4; V]) -> [f32; R] {
        let mut sums = [0.0; R];
        let mut j = 0;
        while j < V {
            self.add_times(j, x[j], &mut sums);
            j += 1;
        }
        sums
    }

    /// `S ← decay·S + Σ_i steps[i]·k[i]ᵀ` in vector `j`; the steps are by slots of rows.
    #[inline(always)]
    pub(crate) fn update<const N: usize>(&mut self, j: usize, decay: f32, steps: [[f32; R]; N], k: [F32x4; N]) {
        let mut s = 0;
        while s < R {
            let old = self.0[s][j];
            let mut new = F32x4 { x: decay * old.x, y: decay * old.y, z: decay * old.z, w: decay * old.w };
            let mut i = 0;
            while i < N {
                new = fma4(steps[i][s], k[i], new);
                i += 1;
            }
            self.0[s][j] = new;
            s += 1;
        }
    }
}
