//! Attention for many rows of a sequence: tiles of queries and keys, an f16 cache, tensor cores.
//!
//! A block takes 64 query rows that share a key head: as many tokens as fit, with all of their heads. It walks over
//! the keys that they see, a tile at a time: while it multiplies queries with one tile of keys, that tile's values are
//! on their way to shared memory, and while it multiplies weights with the values, the next keys. Each warp has 16
//! rows, whose output stays in its registers. Masks are looked at only in tiles that need them.
//!
//! Queries, times scale and log₂ e, and weights `2^(score − max)` are rounded to f16 for the tensor cores, as keys and
//! values are; sums are f32.

use super::tile::{Pages, Tile};
use bytemuck::{Pod, Zeroable};
use cuda_std::{cp_async, mma, opaque, pdl, prelude::*};

/// Lanes a block.
pub const THREADS: u32 = 128;
/// Query rows a block: tokens times heads of a key head.
pub const ROWS: u32 = THREADS / warp::WARP_SIZE * 16;
/// Spans of fewer rows are left to [`decode`](super::decode). They have few tiles, and a tile's keys are one block's work:
/// at the end of a long context most of the GPU would have nothing to do.
pub const MIN_SPAN_ROWS: u32 = 64;

/// Keys of a tile: as many as registers and shared memory (64 to 96 KiB) leave room for. A tile lies within a page.
const fn tile_keys(head_dim: u32) -> u32 {
    if head_dim > 128 { 32 } else { 64 }
}

/// Bytes of shared memory: queries, keys and values.
pub const fn shared_bytes(head_dim: u32) -> u32 {
    (ROWS + 2 * tile_keys(head_dim)) * head_dim * 2
}

/// Scalars of the prefill kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct PrefillParams {
    /// Query heads.
    pub n_head: u32,
    /// Key and value heads.
    pub n_head_kv: u32,
    /// Multiplies the scores.
    pub scale: f32,
    /// Keys a query sees, itself included; 0: all.
    pub window: u32,
    /// Entries of a span's row of the page table.
    pub max_pages: u32,
    /// Spans of the batch.
    pub n_span: u32,
}

/// Blocks for each key head, at most: a tile for every `tokens` rows, and one that is not full for each span.
pub const fn max_tiles(rows: u32, n_span: u32, heads_per_kv: u32) -> u32 {
    rows / (ROWS / heads_per_kv) + n_span
}

/// Tokens of a span that a block takes.
struct Tokens {
    span: u32,
    /// The first one's row.
    row: u32,
    n: u32,
}

/// The tokens of tile number `tile`, `each` a tile, if there is such a tile.
///
/// # Safety
/// `first` and `rows` have `n_span` elements; `each` is not zero.
#[inline(always)]
unsafe fn find_tile(first: *const u32, rows: *const u32, n_span: u32, each: u32, tile: u32) -> Option<Tokens> {
    let mut tile = tile;
    let mut span = 0;
    while span < n_span {
        // SAFETY: the caller's promise.
        let (n_rows, tiles) = unsafe {
            let n_rows = ld(rows.add(span as usize));
            (n_rows, if n_rows < MIN_SPAN_ROWS { 0 } else { math::div_rem(n_rows + each - 1, each).0 })
        };
        if tile < tiles {
            let done = tile * each;
            // SAFETY: as above.
            let row = unsafe { ld(first.add(span as usize)) } + done;
            return Some(Tokens { span, row, n: (n_rows - done).min(each) });
        }
        tile -= tiles;
        span += 1;
    }
    None
}

/// A warp's 16 rows: a lane has rows `lane / 4` and 8 more, and of each eight columns two neighbours.
struct Rows<const K: usize> {
    max: [f32; 2],
    /// This lane's part of the sums.
    sum: [f32; 2],
    out: [[[f32; 4]; 2]; K],
}

impl<const K: usize> Rows<K> {
    const EMPTY: Self = Self { max: [f32::NEG_INFINITY; 2], sum: [0.0; 2], out: [[[0.0; 4]; 2]; K] };

    /// Turns scores, in units of log₂ e, into weights; scales what is there to the new maximum.
    ///
    /// # Safety
    /// Every lane of the warp comes here.
    #[inline(always)]
    unsafe fn weigh<const N: usize>(&mut self, scores: &mut [[[f32; 4]; 2]; N]) {
        let mut half = 0;
        while half < 2 {
            let mut max = self.max[half];
            let mut n = 0;
            while n < 2 * N {
                let of = scores[n / 2][n % 2];
                max = math::max(max, math::max(of[2 * half], of[2 * half + 1]));
                n += 1;
            }
            // SAFETY: the caller's promise. The four lanes of a row exchange.
            unsafe {
                max = math::max(max, warp::shuffle_xor(max, 1));
                max = math::max(max, warp::shuffle_xor(max, 2));
            }
            // A row that has seen no key yet: −∞ minus itself is no number.
            let base = if max == f32::NEG_INFINITY { 0.0 } else { max };
            let kept = math::exp2_approx(self.max[half] - base);
            let mut sum = self.sum[half] * kept;
            let mut n = 0;
            while n < 2 * N {
                let of = &mut scores[n / 2][n % 2];
                of[2 * half] = math::exp2_approx(of[2 * half] - base);
                of[2 * half + 1] = math::exp2_approx(of[2 * half + 1] - base);
                sum += of[2 * half] + of[2 * half + 1];
                n += 1;
            }
            let mut k = 0;
            while k < 2 * K {
                let out = &mut self.out[k / 2][k % 2];
                out[2 * half] *= kept;
                out[2 * half + 1] *= kept;
                k += 1;
            }
            (self.max[half], self.sum[half]) = (max, sum);
            half += 1;
        }
    }

    /// `out += weights·values`.
    ///
    /// # Safety
    /// Every lane of the warp comes here; the tile has `16·N` values.
    #[inline(always)]
    unsafe fn add<const N: usize>(&mut self, weights: &[[[f32; 4]; 2]; N], values: Tile<K>) {
        let lane = opaque(warp::lane_id());
        let mut n = 0;
        while n < N {
            let [[a, b, c, d], [e, f, g, h]] = weights[n];
            let weights = [
                convert::pack_f16x2(a, b),
                convert::pack_f16x2(c, d),
                convert::pack_f16x2(e, f),
                convert::pack_f16x2(g, h),
            ];
            let mut k = 0;
            while k < K {
                // SAFETY: the caller's promise.
                unsafe {
                    let b = values.rows(16 * n as u32).values(k as u32, lane);
                    self.out[k][0] = mma::m16n8k16_f16(weights, b[0], self.out[k][0]);
                    self.out[k][1] = mma::m16n8k16_f16(weights, b[1], self.out[k][1]);
                }
                k += 1;
            }
            n += 1;
        }
    }
}

/// The scores of a warp's 16 queries and a tile's `16·N` keys.
///
/// # Safety
/// Every lane of the warp comes here; both tiles are there.
#[inline(always)]
unsafe fn scores<const K: usize, const N: usize>(queries: Tile<K>, keys: Tile<K>) -> [[[f32; 4]; 2]; N] {
    let lane = opaque(warp::lane_id());
    let mut scores = [[[0.0f32; 4]; 2]; N];
    let mut k = 0;
    while k < K {
        // SAFETY: the caller's promise.
        unsafe {
            let a = queries.queries(k as u32, lane);
            let mut n = 0;
            while n < N {
                let b = keys.rows(16 * n as u32).keys(k as u32, lane);
                scores[n][0] = mma::m16n8k16_f16(a, b[0], scores[n][0]);
                scores[n][1] = mma::m16n8k16_f16(a, b[1], scores[n][1]);
                n += 1;
            }
        }
        k += 1;
    }
    scores
}

/// One body for every head size, `16·K`; `16·N` keys a tile.
///
/// # Safety
/// As [`attention_prefill_d64`]; `16·N` is [`tile_keys`] of the head size.
#[inline(always)]
#[expect(
    clippy::too_many_arguments,
    reason = "a kernel's pointers are arguments of their own, so that they are known as global"
)]
unsafe fn attention<const K: usize, const N: usize>(
    q: *const f32,
    k_cache: *const u16,
    v_cache: *const u16,
    pos: *const u32,
    first: *const u32,
    span_rows: *const u32,
    page_table: *const u32,
    sinks: *const f32,
    pairs: *const f32,
    out: *mut f32,
    p: PrefillParams,
) {
    let (head_dim, tile_keys) = (16 * K as u32, 16 * N as u32);
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let (thread, lane) = (thread::thread_idx_x(), warp::lane_id());
    let head_kv = thread::block_idx_y();
    // SAFETY: the launcher checks that there are heads, `n_head` a multiple of `n_head_kv`, at most `ROWS` for each;
    // the rest is within the caller's extents. Barriers stand between the uses of a tile.
    unsafe {
        let per_kv = math::div_rem(p.n_head, p.n_head_kv).0;
        let each = math::div_rem(ROWS, per_kv).0;
        // The last tiles of a span see the most keys: they come first.
        let tile = thread::grid_dim_x() - 1 - thread::block_idx_x();
        let Some(tokens) = find_tile(first, span_rows, p.n_span, each, tile) else {
            return; // the whole block
        };
        let first_pos = ld(pos.add(tokens.row as usize));
        let last_pos = first_pos + tokens.n - 1;
        let (begin, end) = (if p.window == 0 { 0 } else { (first_pos + 1).saturating_sub(p.window) }, last_pos + 1);

        let (queries, keys) = (Tile::<K>::at(0), Tile::<K>::at(ROWS * head_dim * 2));
        let values = keys.rows(tile_keys);
        let stride = p.n_head_kv * head_dim;
        let table = page_table.add(tokens.span as usize * p.max_pages as usize);
        let head = head_kv as usize * head_dim as usize;
        let [k_pages, v_pages] = [k_cache, v_cache].map(|cache| Pages { head: cache.add(head), table, stride });
        let copy = |to: Tile<K>, from: Pages, key: u32| {
            to.copy(from, (key, tile_keys), (begin, end), (thread, THREADS));
            cp_async::commit();
        };
        let mut key = begin / tile_keys * tile_keys;
        copy(keys, k_pages, key);

        // Row `r` of the tile is head `r % per_kv` of token `r / per_kv`.
        let first_head = (tokens.row * p.n_head + head_kv * per_kv) as usize;
        let head_of = |row: u32| {
            let (token, head) = math::div_rem(row, per_kv);
            (token, first_head + (token * p.n_head + head) as usize)
        };
        let live_rows = tokens.n * per_kv;
        let scale = p.scale * core::f32::consts::LOG2_E;
        // Eight vectors a lane at a time, all loaded before one is used. Rows past the end are the last one again: what
        // comes of those is not looked at.
        let vecs = head_dim / 4;
        let mut i = thread;
        while i < ROWS * vecs {
            let x: [F32x4; 8] = core::array::from_fn(|j| {
                let i = i + j as u32 * THREADS;
                let head = head_of((i / vecs).min(live_rows - 1)).1;
                ld(q.add(head * head_dim as usize + (i % vecs * 4) as usize).cast())
            });
            let mut j = 0;
            while j < 8 {
                let x = x[j as usize].to_array().map(|x| x * scale);
                let pairs = [convert::pack_f16x2(x[0], x[1]), convert::pack_f16x2(x[2], x[3])];
                let i = i + j * THREADS;
                queries.set4(i / vecs, i % vecs * 4, pairs);
                j += 1;
            }
            i += 8 * THREADS;
        }

        let first_row = thread / warp::WARP_SIZE * 16;
        let queries = queries.rows(first_row);
        let my_rows = [first_row + lane / 4, first_row + lane / 4 + 8];
        let seen = my_rows.map(|row| {
            let pos = (first_pos + math::div_rem(row, per_kv).0).min(last_pos);
            (if p.window == 0 { 0 } else { (pos + 1).saturating_sub(p.window) }, pos + 1)
        });
        let mut rows = Rows::<K>::EMPTY;
        while key < end {
            cp_async::wait::<0>();
            thread::sync_threads(); // the keys are there, the queries as well, and nobody uses the values before
            copy(values, v_pages, key);
            let mut scores = scores::<K, N>(queries, keys);
            // Some row does not see the last key, or the first.
            let masked = key + tile_keys > first_pos + 1 || (p.window != 0 && key + p.window < end);
            if masked {
                let mut n = 0;
                while n < 2 * N {
                    let mut j = 0;
                    while j < 4 {
                        let at = key + 8 * n as u32 + 2 * (lane % 4) + j as u32 % 2;
                        let (begin, end) = seen[j / 2];
                        if at < begin || at >= end {
                            scores[n / 2][n % 2][j] = f32::NEG_INFINITY;
                        }
                        j += 1;
                    }
                    n += 1;
                }
            }
            rows.weigh(&mut scores);
            cp_async::wait::<0>();
            thread::sync_threads(); // the values are there, and nobody uses the keys any more
            let next = key + tile_keys;
            if next < end {
                copy(keys, k_pages, next);
            }
            rows.add(&scores, values);
            key = next;
        }

        let mut half = 0;
        while half < 2 {
            let mut sum = rows.sum[half];
            sum += warp::shuffle_xor(sum, 1);
            sum += warp::shuffle_xor(sum, 2);
            let row = my_rows[half];
            if row < live_rows {
                let (_, head) = head_of(row);
                let mut kept = 1.0;
                if !sinks.is_null() {
                    let of_kv = math::div_rem(row, per_kv).1;
                    let sink = ld(sinks.add((head_kv * per_kv + of_kv) as usize)) * core::f32::consts::LOG2_E;
                    let max = math::max(rows.max[half], sink);
                    kept = math::exp2_approx(rows.max[half] - max);
                    sum = sum * kept + math::exp2_approx(sink - max);
                }
                let scale = if sum > 0.0 { kept / sum } else { 0.0 };
                // Eight pairs at a time, so that their gates are loaded before the first is stored.
                let column = 2 * (lane % 4) as usize;
                let mut k = 0;
                while k < 2 * K {
                    let mut gates = [F32x2::splat(1.0); 8];
                    if !pairs.is_null() {
                        let from = pairs.add((2 * head + 1) * head_dim as usize + column);
                        let loaded: [F32x2; 8] = core::array::from_fn(|j| ld(from.add(8 * (k + j)).cast()));
                        gates = loaded.map(|gate| F32x2 { x: math::sigmoid(gate.x), y: math::sigmoid(gate.y) });
                    }
                    let to = out.add(head * head_dim as usize + column);
                    let mut j = 0;
                    while j < 8 {
                        let of = rows.out[(k + j) / 2][(k + j) % 2];
                        let [x, y] = [of[2 * half] * scale, of[2 * half + 1] * scale];
                        st(to.add(8 * (k + j)).cast(), F32x2 { x: x * gates[j].x, y: y * gates[j].y });
                        j += 1;
                    }
                    k += 8;
                }
            }
            half += 1;
        }
    }
}

macro_rules! entries {
    ($($name:ident: $head_dim:literal, $blocks:literal;)+) => {$(
        #[doc = concat!("Attention of spans of [`MIN_SPAN_ROWS`] rows and more, head size ", stringify!($head_dim),
            ", f16 cache. Other rows of `out` are left alone.")]
        ///
        /// With `pairs` of queries and gates, the result is multiplied by `σ(gate)`.
        ///
        /// Launch: grid `[`[`max_tiles`]`(rows, n_span, n_head / n_head_kv), n_head_kv, 1]`, block [`THREADS`], shared
        /// memory [`shared_bytes`]`(head_dim)`. May be launched dependent.
        ///
        /// # Safety
        /// `n_head` is a multiple of `n_head_kv`, at most [`ROWS`] times it. `q` and `out` are `[rows, n_head, head_dim]`,
        /// `pairs` null or `[rows, n_head, 2, head_dim]`, the caches `[pages, PAGE_TOKENS, n_head_kv, head_dim]`; all are
        /// 16-byte aligned, and `out` overlaps nothing. `sinks` is null or has `n_head` elements. `pos` has `rows`
        /// elements; `first` and `span_rows` have `n_span`, a span's rows are `first ..` and in order of position, and
        /// its row of `page_table` names pages of the caches for all positions up to its last, which are written.
        #[kernel(max_threads = 128, min_blocks = $blocks)]
        pub unsafe fn $name(
            q: *const f32, k_cache: *const u16, v_cache: *const u16, pos: *const u32, first: *const u32,
            span_rows: *const u32, page_table: *const u32, sinks: *const f32, pairs: *const f32, out: *mut f32,
            p: PrefillParams,
        ) {
            // SAFETY: the caller's promise is the same.
            unsafe {
                attention::<{ $head_dim / 16 }, { tile_keys($head_dim) as usize / 16 }>(
                    q, k_cache, v_cache, pos, first, span_rows, page_table, sinks, pairs, out, p,
                )
            }
        }
    )+};
}

entries! {
    attention_prefill_d64: 64, 3;
    attention_prefill_d128: 128, 2;
    attention_prefill_d256: 256, 2;
}
