//! Attention with f32 keys and values, for comparisons: splits of the keys, f32 arithmetic.

use super::{AttentionParams, Keys, weight};
use crate::kernels::kv_cache::physical_token;
use cuda_std::prelude::*;

/// Lanes a block.
pub const THREADS: u32 = 256;
/// Elements of a head that one lane holds.
pub const LANE_ELEMS: u32 = 8;

/// Bytes of shared memory: a partial softmax for each group of lanes and query head.
pub const fn shared_bytes(head_dim: u32, heads: u32) -> u32 {
    let groups = THREADS / (head_dim / LANE_ELEMS);
    groups * heads * (head_dim + 2) * 4
}

/// The open softmax of one query head over some keys: `out = Σ e^(s−max)·v`, `sum = Σ e^(s−max)`.
#[derive(Clone, Copy)]
struct Partial<const E: usize> {
    max: f32,
    sum: f32,
    out: [f32; E],
}

impl<const E: usize> Partial<E> {
    /// No keys yet.
    const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0, out: [0.0; E] };

    /// Adds keys whose own open softmax is `(max, sum, out)`.
    #[inline(always)]
    fn merge(&mut self, other: &Self) {
        let max = math::max(self.max, other.max);
        let (mine, theirs) = (weight(self.max, max), weight(other.max, max));
        self.sum = self.sum * mine + other.sum * theirs;
        let mut e = 0;
        while e < E {
            self.out[e] = self.out[e] * mine + other.out[e] * theirs;
            e += 1;
        }
        self.max = max;
    }

    /// Adds one key with this score and value.
    #[inline(always)]
    fn push(&mut self, score: f32, value: &[f32; E]) {
        let max = math::max(self.max, score);
        let mine = math::exp(self.max - max);
        let weight = math::exp(score - max);
        self.sum = math::fma(self.sum, mine, weight);
        let mut e = 0;
        while e < E {
            self.out[e] = math::fma(weight, value[e], self.out[e] * mine);
            e += 1;
        }
        self.max = max;
    }
}

/// One body for every head size and number of heads a block.
///
/// `LANES = head_dim / 8` lanes form a group that takes one key at a time, for `HEADS` query heads that
/// share it. Groups take keys in turn; at the end their partials merge through shared memory.
///
/// # Safety
/// As [`attention_f32_d64_h1`], with `head_dim = 8·LANES` and `HEADS` heads a block.
#[inline(always)]
#[expect(
    clippy::too_many_arguments,
    reason = "a kernel's pointers are arguments of their own, so that they are known as global"
)]
unsafe fn attention<const LANES: u32, const HEADS: usize>(
    q: *const f32,
    k_cache: *const f32,
    v_cache: *const f32,
    pos: *const u32,
    span: *const u32,
    page_table: *const u32,
    partial_out: *mut f32,
    partial_max_sum: *mut f32,
    p: AttentionParams,
) {
    const E: usize = LANE_ELEMS as usize;
    let head_dim = LANES * LANE_ELEMS;
    let groups = THREADS / LANES;
    let (row, first_head, split) = (thread::block_idx_x(), thread::block_idx_y() * HEADS as u32, thread::block_idx_z());
    let n_split = thread::grid_dim_z();
    let (group, lane) = (thread::thread_idx_x() / LANES, thread::thread_idx_x() % LANES);
    // SAFETY: the launcher checks that `n_head` is a multiple of `n_head_kv`, and neither is zero.
    let head_kv = unsafe { math::div_rem(first_head, math::div_rem(p.n_head, p.n_head_kv).0).0 };
    let kv_dim = p.n_head_kv as usize * head_dim as usize;
    let offset = head_kv as usize * head_dim as usize + (lane * LANE_ELEMS) as usize;

    // SAFETY: the rows, heads and pages named are within the caller's extents; shared memory holds one
    // partial for each group and head.
    unsafe {
        let mut query = [[0.0f32; E]; HEADS];
        let mut h = 0;
        while h < HEADS {
            let head = row as usize * p.n_head as usize + first_head as usize + h;
            query[h] = load8(q.add(head * head_dim as usize + (lane * LANE_ELEMS) as usize));
            h += 1;
        }
        let pages = page_table.add(ld(span.add(row as usize)) as usize * p.max_pages as usize);
        let keys = Keys::new(ld(pos.add(row as usize)), p.window, n_split);
        let (from, end) = keys.split(split);
        if from >= end {
            return;
        }

        let mut partial = [Partial::<E>::EMPTY; HEADS];
        let mut base = from.max(keys.begin);
        while base < end {
            // All groups of a warp go round together, so that the shuffles below meet; a group whose key is
            // past the end reads the last one and discards it.
            let j = base + group;
            let inside = j < end;
            let token = physical_token(pages, if inside { j } else { end - 1 }) * kv_dim + offset;
            let (key, value) = (load8(k_cache.add(token)), load8(v_cache.add(token)));
            let mut h = 0;
            while h < HEADS {
                let score = group_sum::<LANES>(dot(&query[h], &key)) * p.scale;
                if inside {
                    partial[h].push(score, &value);
                }
                h += 1;
            }
            base += groups;
        }

        let shared_out = dynamic::<f32>(0);
        let shared_max_sum = shared_out.add(groups * HEADS as u32 * head_dim);
        let mut h = 0;
        while h < HEADS {
            let slot = group * HEADS as u32 + h as u32;
            let mut e = 0;
            while e < E {
                // Element-major, so that a warp's words fall in different banks.
                shared_out.set(slot * head_dim + e as u32 * LANES + lane, partial[h].out[e]);
                e += 1;
            }
            if lane == 0 {
                shared_max_sum.set(2 * slot, partial[h].max);
                shared_max_sum.set(2 * slot + 1, partial[h].sum);
            }
            h += 1;
        }
        thread::sync_threads(); // every group's partials are written before they are merged

        // Lane `i` of the block merges element `i % head_dim` of head `i / head_dim`, in group order.
        let mut i = thread::thread_idx_x();
        while i < HEADS as u32 * head_dim {
            let (head, element) = (i / head_dim, i % head_dim);
            let stored = (element % LANE_ELEMS) * LANES + element / LANE_ELEMS;
            let mut merged = Partial::<1>::EMPTY;
            let mut g = 0;
            while g < groups {
                let slot = g * HEADS as u32 + head;
                merged.merge(&Partial {
                    max: shared_max_sum.get(2 * slot),
                    sum: shared_max_sum.get(2 * slot + 1),
                    out: [shared_out.get(slot * head_dim + stored)],
                });
                g += 1;
            }
            let to =
                ((row as usize * p.n_head as usize + (first_head + head) as usize) * n_split as usize) + split as usize;
            st(partial_out.add(to * head_dim as usize + element as usize), merged.out[0]);
            if element == 0 {
                st(partial_max_sum.add(2 * to), merged.max);
                st(partial_max_sum.add(2 * to + 1), merged.sum);
            }
            i += THREADS;
        }
    }
}

/// `Σ a·b`.
#[inline(always)]
fn dot<const E: usize>(a: &[f32; E], b: &[f32; E]) -> f32 {
    let mut sum = 0.0;
    let mut e = 0;
    while e < E {
        sum = math::fma(a[e], b[e], sum);
        e += 1;
    }
    sum
}

/// `Σ value` over aligned groups of `LANES` lanes, in every lane of the group.
///
/// # Safety
/// Every lane of the warp comes here.
#[inline(always)]
unsafe fn group_sum<const LANES: u32>(value: f32) -> f32 {
    let mut value = value;
    let mut distance = LANES / 2;
    while distance > 0 {
        // SAFETY: the caller's promise; a distance below `LANES` stays within the group.
        value += unsafe { warp::shuffle_xor(value, distance) };
        distance /= 2;
    }
    value
}

/// Eight elements from a 16-byte aligned address.
///
/// # Safety
/// As [`ld`] for those elements.
#[inline(always)]
unsafe fn load8(p: *const f32) -> [f32; 8] {
    // SAFETY: the caller's promise.
    let (a, b) = unsafe { (ld(p.cast::<F32x4>()), ld(p.cast::<F32x4>().add(1))) };
    [a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w]
}

macro_rules! entries {
    ($($name:ident: $head_dim:literal, $heads:literal;)+) => {$(
        #[doc = concat!("Attention over one split, head size ", stringify!($head_dim), ", ", stringify!($heads),
            " query head(s) a block.")]
        ///
        /// Launch: grid `[rows, n_head / heads, n_split]`, block [`THREADS`], shared memory
        /// [`shared_bytes`]`(head_dim, heads)`.
        ///
        /// # Safety
        /// `heads` divides `n_head / n_head_kv`. `q` is `[rows, n_head, head_dim]`, 16-byte aligned, like the
        /// caches `[pages, PAGE_TOKENS, n_head_kv, head_dim]`; `partial_out` is
        /// `[rows, n_head, n_split, head_dim]`, `partial_max_sum` `[rows, n_head, n_split, 2]`, both only written
        /// for splits with keys; `pos` and `span` have `rows` elements; the span's row of `page_table` names pages of
        /// the caches for all positions up to `pos`, which are written.
        #[kernel(max_threads = 256)]
        pub unsafe fn $name(
            q: *const f32, k_cache: *const f32, v_cache: *const f32, pos: *const u32, span: *const u32,
            page_table: *const u32, partial_out: *mut f32, partial_max_sum: *mut f32, p: AttentionParams,
        ) {
            // SAFETY: the caller's promise is the same.
            unsafe {
                attention::<{ $head_dim / LANE_ELEMS }, $heads>(
                    q, k_cache, v_cache, pos, span, page_table, partial_out, partial_max_sum, p,
                )
            }
        }
    )+};
}

entries! {
    attention_f32_d64_h1: 64, 1;
    attention_f32_d64_h4: 64, 4;
    attention_f32_d128_h1: 128, 1;
    attention_f32_d128_h4: 128, 4;
    attention_f32_d256_h1: 256, 1;
    attention_f32_d256_h4: 256, 4;
}
