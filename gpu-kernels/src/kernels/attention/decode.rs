//! Attention for few rows a sequence: keys split over blocks, an f16 cache, tensor cores.
//!
//! A block takes up to eight query heads of one row that share a key head, so keys and values are read once for
//! them, and the keys of one split. Of short rows more blocks take fewer heads each: what is read is little, and all that
//! is done for a head is done sooner. Its warps take chunks of 16 keys in turn, each on its own: copies to shared
//! memory run ahead, keys and values of a chunk one after the other in a ring of tiles, and no warp waits for
//! another before the end, where they are joined. Keys that are one split need no other kernel: then the block also
//! does what comes after.
//!
//! The tensor cores multiply 16 rows, twice as many as there are heads ([`mma_8`]). Queries, scaled, and softmax
//! weights are rounded to f16 for that, as keys and values are; sums are f32.

use super::fresh::Fresh;
use super::head::{HeadsParams, Kind, Projected, Vecs};
use super::join::{Done, Results};
use super::output::Output;
use super::queries::{Place, Queries, Ready};
use super::ring::Ring;
use super::tile::{Pages, Tile};
use super::{AttentionParams, CHUNK, Keys, SPLIT_KEYS};
use cuda_std::{mma, opaque, pdl, prelude::*};

/// Warps a block.
pub(super) const WARPS: u32 = SPLIT_KEYS / CHUNK;
/// Lanes a block.
pub const THREADS: u32 = WARPS * warp::WARP_SIZE;
/// Query heads a block, at most.
pub const HEADS: u32 = 8;

/// Blocks that a multiprocessor has room for at once.
pub const fn blocks_a_multiprocessor(head_dim: u32) -> u32 {
    match head_dim {
        64 => 4,
        128 => 3,
        _ => 2,
    }
}

/// Elements between the heads' rows when warps merge, beyond their own: it puts them in different banks.
pub(super) const PAD: u32 = 8;

/// Tiles of a warp that are on their way while one is used. With three tiles of 8 KiB, blocks of heads of 256 fit
/// into the 99 KiB that the smaller GPUs have.
const fn ahead(head_dim: u32) -> u32 {
    if head_dim > 128 { 2 } else { 3 }
}

/// Bytes of shared memory: a ring of tiles for each warp.
pub const fn shared_bytes(head_dim: u32) -> u32 {
    let ring = WARPS * (ahead(head_dim) + 1) * CHUNK * head_dim * 2;
    assert!(ring >= WARPS * HEADS * (head_dim + PAD + 2) * 4, "the warps' results take the ring's place");
    assert!(CHUNK * head_dim * 2 >= Fresh::bytes_a_warp(head_dim / 16), "heads take a tile's place");
    ring
}

/// The open softmax of eight heads over a warp's keys. A lane has head `lane / 4`, and of the output two neighbouring
/// dimensions of each eight.
pub(super) struct Partial<const K: usize> {
    pub(super) max: f32,
    /// This lane's part of the sum.
    pub(super) sum: f32,
    pub(super) out: [[f32; 4]; K],
}

/// `A·B + C` for the eight rows of A and two B, the first in `c[0..2]` and the second in `c[2..4]`: A takes rows 0 to 7 for
/// one and 8 to 15 for the other, and rows of zeros leave the other's sums as they are.
///
/// # Safety
/// Every lane of the warp comes here.
#[inline(always)]
unsafe fn mma_8(a: [u32; 2], b: [[u32; 2]; 2], c: [f32; 4]) -> [f32; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let c = mma::m16n8k16_f16([a[0], 0, a[1], 0], b[0], c);
        mma::m16n8k16_f16([0, a[0], 0, a[1]], b[1], c)
    }
}

/// The scores of 16 keys, from `chunk` on, for the lane's head: two of the first eight, two of the others. Keys outside of
/// `begin .. end` get −∞.
///
/// # Safety
/// Every lane of the warp comes here; the tile has 16 keys.
#[inline(always)]
unsafe fn scores<const K: usize>(
    query: &[[u32; 2]; K],
    keys: Tile<K>,
    chunk: u32,
    (begin, end): (u32, u32),
) -> [f32; 4] {
    // Even and odd steps have sums of their own: a product waits for the one before it.
    let mut sums = [[0.0f32; 4]; 2];
    let lane = opaque(warp::lane_id());
    let mut k = 0;
    while k < K {
        // SAFETY: the caller's promise.
        unsafe { sums[k % 2] = mma_8(query[k], keys.keys(k as u32, lane), sums[k % 2]) };
        k += 1;
    }
    core::array::from_fn(|i| {
        let key = chunk + 8 * (i as u32 / 2) + 2 * (warp::lane_id() % 4) + i as u32 % 2;
        if (begin <= key) & (key < end) { sums[0][i] + sums[1][i] } else { f32::NEG_INFINITY }
    })
}

impl<const K: usize> Partial<K> {
    const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0, out: [[0.0; 4]; K] };

    /// Makes room for scores: the weights `e^(score − max)` of 16 keys as fragment A, and what to multiply the output by.
    ///
    /// # Safety
    /// Every lane of the warp comes here; a score of each head is above −∞.
    #[inline(always)]
    unsafe fn weigh(&mut self, scores: [f32; 4]) -> ([u32; 2], f32) {
        let mut max = math::max(math::max(scores[0], scores[1]), math::max(scores[2], scores[3]));
        // SAFETY: the caller's promise. The four lanes of a head exchange.
        unsafe {
            max = math::max(max, warp::shuffle_xor(max, 1));
            max = math::max(max, warp::shuffle_xor(max, 2));
        }
        max = math::max(max, self.max);
        let kept = math::exp(self.max - max);
        let w = scores.map(|score| math::exp(score - max));
        self.sum = math::fma(self.sum, kept, (w[0] + w[1]) + (w[2] + w[3]));
        self.max = max;
        ([convert::pack_f16x2(w[0], w[1]), convert::pack_f16x2(w[2], w[3])], kept)
    }

    /// `out = kept·out + weights·values`.
    ///
    /// # Safety
    /// Every lane of the warp comes here; the tile has 16 values.
    #[inline(always)]
    unsafe fn add(&mut self, weights: [u32; 2], kept: f32, values: Tile<K>) {
        let lane = opaque(warp::lane_id());
        let mut k = 0;
        while k < K {
            // SAFETY: the caller's promise.
            unsafe {
                self.out[k] = mma_8(weights, values.values(k as u32, lane), self.out[k].map(|x| x * kept));
            }
            k += 1;
        }
    }
}

/// The fragment A of eight heads' queries, times `scale`, of the pairs that `pair(head, dim)` gives; past the `heads`
/// there are, the last one's again. What comes of those is not looked at.
#[inline(always)]
pub(super) fn fragments<const K: usize>(pair: impl Fn(u32, u32) -> F32x2, heads: u32, scale: f32) -> [[u32; 2]; K] {
    let (head, of_four) = ((warp::lane_id() / 4).min(heads - 1), warp::lane_id() % 4);
    core::array::from_fn(|k| {
        core::array::from_fn(|j| {
            let v = pair(head, 16 * k as u32 + 8 * j as u32 + 2 * of_four);
            convert::pack_f16x2(v.x * scale, v.y * scale)
        })
    })
}

/// One body for every head size, `16·K`.
///
/// # Safety
/// As [`attention_decode_d64`]; `AHEAD` is [`ahead`] of the head size.
#[inline(always)]
#[expect(
    clippy::too_many_arguments,
    reason = "a kernel's pointers are arguments of their own, so that they are known as global"
)]
unsafe fn attention<const K: usize, const AHEAD: u32, Q: Queries<K>>(
    queries: Q,
    k_cache: *const u16,
    v_cache: *const u16,
    pos: *const u32,
    span: *const u32,
    list: *const u32,
    page_table: *const u32,
    results: &Results,
    p: AttentionParams,
) {
    let head_dim = 16 * K as u32;
    let wait = || {
        pdl::grid_dependency_wait();
        pdl::launch_dependents();
    };
    if !Q::ALONE {
        wait();
    }
    let (item, split, n_split) = (thread::block_idx_x(), thread::block_idx_z(), thread::grid_dim_z());
    let warp = thread::thread_idx_x() / warp::WARP_SIZE;
    // SAFETY: the launcher checks that there are heads, `n_head` a multiple of `n_head_kv`; the rest is within the
    // caller's extents. Each warp has a ring of its own, and uses a tile after its copies have arrived.
    unsafe {
        let row = if list.is_null() { item } else { ld(list.add(item as usize)) };
        let per_kv = math::div_rem(p.n_head, p.n_head_kv).0;
        let parts = math::div_rem(per_kv + p.block_heads - 1, p.block_heads).0;
        let (head_kv, part) = math::div_rem(thread::block_idx_y(), parts);
        let first_head = head_kv * per_kv + part * p.block_heads;
        let heads = (per_kv - part * p.block_heads).min(p.block_heads);

        let pos = ld(pos.add(row as usize));
        let keys = Keys::new(pos, p.window, n_split);
        let (from, end) = keys.split(split);
        if from >= end {
            return; // the whole block
        }
        let seen = (keys.begin, end);
        let stride = p.n_head_kv * head_dim;
        let table = page_table.add(ld(span.add(row as usize)) as usize * p.max_pages as usize);
        let place = Place { row, pos, first_head, heads, head_kv, table, newest: end > pos };
        let head = head_kv as usize * head_dim as usize;
        let caches = [k_cache.add(head), v_cache.add(head)].map(|head| Pages { head, table, stride });

        let mut ring = Ring::<K, AHEAD>::new(warp, caches, from + warp * CHUNK, (keys.begin, end));
        // Heads lie where the last tile of each ring will.
        let scratch = Ring::<K, AHEAD>::last;
        // Of rows that are alone, keys and values but the newest: that is the work of the grid ahead.
        ring.fill(if Q::ALONE { pos } else { end });
        let early = queries.early(place, scratch(warp));
        if Q::ALONE {
            wait();
        }
        let fetched = queries.fetch(place, &early);
        // The newest go into a tile that was copied without them, if there is one.
        let keep = |kind: Kind, x: &Vecs| {
            let at = pos - from;
            let tile = 2 * (at / SPLIT_KEYS) + u32::from(kind == Kind::Value);
            if tile < AHEAD {
                Ring::<K, AHEAD>::tile(at / CHUNK % WARPS, tile).set_row(at % CHUNK, x);
            }
        };
        let query = queries.ready(place, (early, fetched), scratch, keep, p.scale);

        let mut partial = Partial::<K>::EMPTY;
        let mut chunk = from + warp * CHUNK;
        while chunk < end {
            let scores = scores(&query, ring.arrived(), chunk, seen);
            let (weights, kept) = partial.weigh(scores);
            partial.add(weights, kept, ring.arrived());
            chunk += SPLIT_KEYS;
        }
        partial.join(Done { item, row, first_head, heads, n_head: p.n_head }, results);
    }
}

macro_rules! entries {
    ($($name:ident $fresh:ident: $head_dim:literal, $blocks:literal;)+) => {$(
        const _: () = assert!($blocks == blocks_a_multiprocessor($head_dim));

        #[doc = concat!("Attention over one split, head size ", stringify!($head_dim), ", f16 cache.")]
        ///
        /// The rows are those that `list` names, or without it the first `items`.
        ///
        /// Launch: grid `[items, n_head_kv·ceil(n_head / n_head_kv / block_heads), n_split]`, block [`THREADS`], shared
        /// memory [`shared_bytes`]`(head_dim)`. May be launched dependent.
        ///
        /// # Safety
        /// `n_head` is a multiple of `n_head_kv`, and `block_heads` is 1 to [`HEADS`]. `q` is `[rows, n_head, head_dim]`,
        /// 16-byte aligned, like the caches `[pages, PAGE_TOKENS, n_head_kv, head_dim]`; `pos` and `span` have `rows`
        /// elements; `list` is null or has `items`, each below `rows`; the span's row of `page_table` names pages of the
        /// caches for all positions up to `pos`, which are written.
        ///
        /// Of several splits, `partial_out` is `[items, n_head, n_split, head_dim]`, 16-byte aligned, and
        /// `partial_max_sum` `[items, n_head, n_split, 2]`, 8-byte aligned, both only written for splits with keys, and
        /// nothing else is used. Of one split they are not used, and `sinks`, `pairs`, `out`, `qs`, `d` and `s` are as
        /// [`attention_merge`](super::merge::attention_merge) has them.
        #[kernel(max_threads = 128, min_blocks = $blocks)]
        pub unsafe fn $name(
            q: *const f32, k_cache: *const u16, v_cache: *const u16, pos: *const u32, span: *const u32,
            list: *const u32, page_table: *const u32, partial_out: *mut f32, partial_max_sum: *mut f32,
            sinks: *const f32, pairs: *const f32, out: *mut f32, qs: *mut i8, d: *mut f32, s: *mut f32,
            p: AttentionParams,
        ) {
            let output = Output { sinks, pairs, out, qs, d, s };
            // SAFETY: the caller's promise is the same.
            unsafe {
                attention::<{ $head_dim / 16 }, { ahead($head_dim) }, _>(
                    Ready { q, n_head: p.n_head }, k_cache, v_cache, pos, span, list, page_table,
                    &Results { partial_out, partial_max_sum, output }, p,
                )
            }
        }

        #[doc = concat!("[`", stringify!($name), "`] of heads as they are projected: each block makes the queries that it")]
        /// takes ready, as [`attention_heads_f16`](super::heads::attention_heads_f16) does, and the one with the newest
        /// key that key and its value, which it also writes to their page.
        ///
        /// # Safety
        #[doc = concat!("As [`", stringify!($name), "`], but that the newest key and value need not be written, and as")]
        /// [`attention_heads_f16`](super::heads::attention_heads_f16), without its `q_out`. No two rows are of one
        /// span, and the page of a row's position is no other span's.
        #[kernel(max_threads = 128, min_blocks = $blocks)]
        pub unsafe fn $fresh(
            q: *const f32, k: *const f32, v: *const f32, q_bias: *const f32, k_bias: *const f32, v_bias: *const f32,
            q_norm: *const f32, k_norm: *const f32, turns: *const u64, k_cache: *mut u16, v_cache: *mut u16,
            pos: *const u32, span: *const u32, list: *const u32, page_table: *const u32, partial_out: *mut f32,
            partial_max_sum: *mut f32, sinks: *const f32, pairs: *const f32, out: *mut f32, qs: *mut i8, d: *mut f32,
            s: *mut f32, heads: HeadsParams, p: AttentionParams,
        ) {
            let output = Output { sinks, pairs, out, qs, d, s };
            let projected = Projected { q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm, turns };
            let fresh = Fresh { heads: projected, p: heads, k_cache, v_cache };
            // SAFETY: the caller's promise is the same.
            unsafe {
                attention::<{ $head_dim / 16 }, { ahead($head_dim) }, _>(
                    fresh, k_cache, v_cache, pos, span, list, page_table,
                    &Results { partial_out, partial_max_sum, output }, p,
                )
            }
        }
    )+};
}

entries! {
    attention_decode_d64 attention_fresh_d64: 64, 4;
    attention_decode_d128 attention_fresh_d128: 128, 3;
    attention_decode_d256 attention_fresh_d256: 256, 2;
}
