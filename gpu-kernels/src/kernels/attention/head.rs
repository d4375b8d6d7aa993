//! A head in a warp: loaded as it is projected, biased, normed, rotated, stored.

#[cfg(doc)]
use super::heads::attention_heads_f32;
use crate::kernels::kv_cache::KvElem;
use crate::kernels::rope::angle;
use bytemuck::{Pod, Zeroable};
use cuda_std::{mem::ld_cs, opaque_ptr, prelude::*};

/// The largest head: two vectors of four a lane.
pub const MAX_HEAD_DIM: u32 = 256;

/// Pairs of the largest head that a lane rotates.
pub(super) const MAX_PAIRS: usize = (MAX_HEAD_DIM / 2 / warp::WARP_SIZE) as usize;

/// Scalars of [`attention_heads_f32`] and its f16 form.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct HeadsParams {
    /// Query heads.
    pub n_head: u32,
    /// Key and value heads.
    pub n_head_kv: u32,
    /// Dimensions of a head.
    pub head_dim: u32,
    /// Elements from a projected query head to the next: `head_dim`, or twice that where a gate follows each.
    pub q_stride: u32,
    /// Rotated dimensions, even, at most `head_dim`.
    pub n_rot: u32,
    /// 1: pairs `(2i, 2i + 1)`; 0: pairs `(i, i + n_rot/2)`.
    pub adjacent: u32,
    /// Multiplies cos and sin.
    pub magnitude: f32,
    /// Of the norms.
    pub eps: f32,
    /// Entries of a span's row of the page table.
    pub max_pages: u32,
}

/// Where heads come from and what is done to them.
#[derive(Clone, Copy)]
pub(super) struct Projected {
    pub(super) q: *const f32,
    pub(super) k: *const f32,
    pub(super) v: *const f32,
    pub(super) q_bias: *const f32,
    pub(super) k_bias: *const f32,
    pub(super) v_bias: *const f32,
    pub(super) q_norm: *const f32,
    pub(super) k_norm: *const f32,
    pub(super) turns: *const u64,
}

/// What a head is: a query, a key or a value.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Query,
    Key,
    Value,
}

/// What a lane has of a head: the four elements from `4·lane` on and the four from `4·lane + 128` on, zeros where there
/// are none.
pub(super) type Vecs = [[f32; 4]; 2];

/// Where a lane's vectors start.
#[inline(always)]
pub(super) fn places() -> [u32; 2] {
    [4 * warp::lane_id(), 4 * warp::lane_id() + 128]
}

/// What a lane has of a head as it is projected, and of its bias; in place of what is past the end, the last again.
#[derive(Clone, Copy)]
pub(super) struct Loaded {
    x: Vecs,
    bias: Option<Vecs>,
}

impl Loaded {
    /// No head.
    pub(super) const NONE: Self = Self { x: [[0.0; 4]; 2], bias: None };
}

/// What all heads have in common, of `16·K` elements at most, and none of it a projection: the norms of queries and keys,
/// and how the lane's pairs, `lane`, `lane + 32`, …, turn.
pub(super) struct Common<const K: usize> {
    head_dim: u32,
    norms: [Option<Vecs>; 2],
    /// Of a turn a position; past a quarter of `K` there are none, but a const parameter cannot be divided.
    turns: [u64; MAX_PAIRS],
}

/// Sine and cosine for the lane's pairs.
pub(super) type SinCos = [F32x2; MAX_PAIRS];

/// Where a head is as it is projected, and its part of the bias, or null.
#[derive(Clone, Copy)]
pub(super) struct Head {
    x: *const f32,
    bias: *const f32,
}

impl Head {
    /// No head.
    pub(super) const NONE: Self = Self { x: core::ptr::null(), bias: core::ptr::null() };

    /// The same, found here and not where it is used.
    #[inline(always)]
    pub(super) fn found(self) -> Self {
        Self { x: opaque_ptr(self.x), bias: opaque_ptr(self.bias) }
    }
}

impl<const K: usize> Common<K> {
    /// Pairs of a lane.
    pub(super) const PAIRS: usize = K.div_ceil(4);
    /// Vectors of a lane that a head can have.
    const VECS: usize = K.div_ceil(8);

    /// Loads it, for heads of `head_dim`.
    ///
    /// # Safety
    /// The operands are those of [`attention_heads_f32`], `head_dim` at most `16·K`.
    #[inline(always)]
    pub(super) unsafe fn load(from: &Projected, head_dim: u32, p: &HeadsParams) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let norms = [from.q_norm, from.k_norm]
                .map(|norm| if norm.is_null() { None } else { Some(Self::vectors(norm, head_dim)) });
            let turns = core::array::from_fn(|i| {
                let pair = warp::lane_id() + i as u32 * warp::WARP_SIZE;
                if i < Self::PAIRS && pair < p.n_rot / 2 { ld(from.turns.add(pair as usize)) } else { 0 }
            });
            Self { head_dim, norms, turns }
        }
    }

    /// Loads a lane's vectors. One past the end is the last one again.
    ///
    /// # Safety
    /// A head lies at `from`, 16-byte aligned.
    #[inline(always)]
    unsafe fn vectors(from: *const f32, head_dim: u32) -> Vecs {
        let (at, mut x) = (places(), [[0.0; 4]; 2]);
        let mut i = 0;
        while i < Self::VECS {
            // SAFETY: the vectors are in the head.
            x[i] = unsafe { ld_cs(from.add(at[i].min(head_dim - 4) as usize).cast::<F32x4>()) }.to_array();
            i += 1;
        }
        x
    }

    /// Loads a head and its bias.
    ///
    /// # Safety
    /// They are there.
    #[inline(always)]
    pub(super) unsafe fn fetch(&self, head: Head) -> Loaded {
        // SAFETY: the caller's promise.
        unsafe {
            let x = Self::vectors(head.x, self.head_dim);
            let bias = if head.bias.is_null() { None } else { Some(Self::vectors(head.bias, self.head_dim)) };
            Loaded { x, bias }
        }
    }

    /// `Σ x²` of a warp's vectors, as a block of `rms_norm` adds them.
    ///
    /// # Safety
    /// Every lane of the warp comes here.
    #[inline(always)]
    unsafe fn square_sum(x: &Vecs) -> f32 {
        let squares = x.map(|[x, y, z, w]| math::fma(x, x, math::fma(y, y, math::fma(z, z, w * w))));
        // SAFETY: the caller's promise.
        let first = unsafe { warp::sum(squares[0]) };
        if Self::VECS == 1 {
            return first; // the others are zeros
        }
        // SAFETY: the caller's promise.
        first + unsafe { warp::sum(squares[1]) }
    }

    /// The turns of a row at position `pos`.
    #[inline(always)]
    pub(super) fn at(&self, pos: u32, p: &HeadsParams) -> SinCos {
        core::array::from_fn(|i| {
            if i >= Self::PAIRS {
                return F32x2::splat(0.0);
            }
            let (sin, cos) = math::sin_cos(angle(pos, self.turns[i]));
            F32x2 { x: sin * p.magnitude, y: cos * p.magnitude }
        })
    }

    /// Rotates a head in shared memory, a pair a lane at a time.
    ///
    /// # Safety
    /// Every lane of the warp comes here, after the head was written.
    #[inline(always)]
    unsafe fn rotate(turns: &SinCos, head: Shared<f32>, p: &HeadsParams) {
        // SAFETY: the caller's promise; a lane alone touches a pair between the barriers.
        unsafe {
            warp::sync_warp(warp::FULL_MASK); // the head is whole
            let n_pair = p.n_rot / 2;
            let mut i = 0;
            while i < Self::PAIRS {
                let pair = warp::lane_id() + i as u32 * warp::WARP_SIZE;
                if pair < n_pair {
                    let (first, second) =
                        if p.adjacent != 0 { (2 * pair, 2 * pair + 1) } else { (pair, pair + n_pair) };
                    let (F32x2 { x: sin, y: cos }, a, b) = (turns[i], head.get(first), head.get(second));
                    head.set(first, a * cos - b * sin);
                    head.set(second, a * sin + b * cos);
                }
                i += 1;
            }
            warp::sync_warp(warp::FULL_MASK); // all pairs have turned
        }
    }

    /// A head as loaded, with its bias, normed and rotated. A query or a key lies in `mine`, too, after the call.
    ///
    /// # Safety
    /// Every lane of the warp comes here, with the same head; the operands are those of `load`; `mine` has room for a head
    /// that nobody else uses, 16-byte aligned.
    #[inline(always)]
    pub(super) unsafe fn finish(
        &self,
        kind: Kind,
        (loaded, turns): (&Loaded, &SinCos),
        mine: Shared<f32>,
        p: &HeadsParams,
    ) -> Vecs {
        let mut x = loaded.x;
        if let Some(bias) = loaded.bias {
            x = core::array::from_fn(|i| core::array::from_fn(|e| x[i][e] + bias[i][e]));
        }
        let ([a, b], inside) = (x, places().map(|at| at < self.head_dim));
        x = [if inside[0] { a } else { [0.0; 4] }, if inside[1] { b } else { [0.0; 4] }];
        if kind == Kind::Value {
            return x;
        }
        let norm = if kind == Kind::Query { self.norms[0] } else { self.norms[1] };
        // SAFETY: the caller's promise; the warp has `mine` for itself.
        unsafe {
            if let Some(w) = norm {
                let scale = math::rsqrt(Self::square_sum(&x) / self.head_dim as f32 + p.eps);
                x = core::array::from_fn(|i| core::array::from_fn(|e| x[i][e] * scale * w[i][e]));
            }
            let at = places();
            let mut i = 0;
            while i < Self::VECS {
                if at[i] < self.head_dim {
                    mine.cast::<F32x4>().set(at[i] / 4, F32x4::from_array(x[i]));
                }
                i += 1;
            }
            Self::rotate(turns, mine, p);
            let mut i = 0;
            while i < Self::VECS {
                if at[i] < self.head_dim {
                    x[i] = mine.cast::<F32x4>().get(at[i] / 4).to_array();
                }
                i += 1;
            }
        }
        x
    }
}

impl Projected {
    /// Head `head` of row `row`.
    ///
    /// # Safety
    /// The head is there; the operands are those of [`attention_heads_f32`].
    #[inline(always)]
    pub(super) unsafe fn head(&self, kind: Kind, (row, head): (usize, u32), p: &HeadsParams) -> Head {
        let in_row = head as usize * p.head_dim as usize;
        let kv_dim = p.n_head_kv as usize * p.head_dim as usize;
        // SAFETY: the row and the head are within the caller's extents.
        unsafe {
            let (x, bias) = match kind {
                Kind::Query => {
                    (self.q.add((row * p.n_head as usize + head as usize) * p.q_stride as usize), self.q_bias)
                }
                Kind::Key => (self.k.add(row * kv_dim + in_row), self.k_bias),
                Kind::Value => (self.v.add(row * kv_dim + in_row), self.v_bias),
            };
            Head { x, bias: if bias.is_null() { bias } else { bias.add(in_row) } }
        }
    }
}

/// Stores what a lane has of a key's or value's head, at its place in a cache.
///
/// # Safety
/// The cache has the head at `to`.
#[inline(always)]
pub(super) unsafe fn store_head<T: KvElem>(to: *mut T, x: &Vecs, head_dim: u32) {
    let at = places();
    let mut i = 0;
    while i < 2 {
        if at[i] < head_dim {
            // SAFETY: the caller's promise.
            unsafe { T::store4(to.add(at[i] as usize), x[i]) };
        }
        i += 1;
    }
}
