//! What lies between an attention layer's projections and attention, a head at a time: bias, norm, rotation, and
//! where the result goes.
//!
//! Queries `q = rope(norm(q + bias))` are written out, keys, treated alike, and values `v + bias` to their pages. The
//! arithmetic is that of [`rms_norm`](crate::kernels::rms_norm), [`rope`](crate::kernels::rope) and
//! [`kv_cache`](crate::kernels::kv_cache), bit for bit.

use crate::kernels::kv_cache::{KvElem, physical_token};
use cuda_std::{pdl, prelude::*};

use super::head::{Common, Kind, Projected, store_head};
pub use super::head::{HeadsParams, MAX_HEAD_DIM};

/// Lanes a block; a warp takes one head of one row.
pub const THREADS: u32 = 128;
/// Heads a block.
pub const HEADS_PER_BLOCK: u32 = THREADS / warp::WARP_SIZE;

/// Bytes of shared memory: a head for each warp.
pub const fn shared_bytes(head_dim: u32) -> u32 {
    HEADS_PER_BLOCK * head_dim * 4
}

/// One body for both types of cache.
///
/// # Safety
/// As [`attention_heads_f32`].
#[inline(always)]
#[expect(
    clippy::too_many_arguments,
    reason = "a kernel's pointers are arguments of their own, so that they are known as global"
)]
unsafe fn heads<T: KvElem>(
    projected: Projected,
    pos: *const u32,
    span: *const u32,
    page_table: *const u32,
    q_out: *mut f32,
    k_cache: *mut T,
    v_cache: *mut T,
    p: HeadsParams,
) {
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let (row, head) = (thread::block_idx_y() as usize, thread::index_1d() / warp::WARP_SIZE);
    if head >= p.n_head + 2 * p.n_head_kv {
        return; // the whole warp
    }
    let (kind, head) = if head < p.n_head {
        (Kind::Query, head)
    } else if head < p.n_head + p.n_head_kv {
        (Kind::Key, head - p.n_head)
    } else {
        (Kind::Value, head - p.n_head - p.n_head_kv)
    };
    // SAFETY: the row and the head are within the caller's extents; the warp has a head of shared memory for itself.
    unsafe {
        let pos = ld(pos.add(row));
        let mine = dynamic::<f32>(thread::thread_idx_x() / warp::WARP_SIZE * p.head_dim * 4);
        let common = Common::<{ MAX_HEAD_DIM as usize / 16 }>::load(&projected, p.head_dim, &p);
        let loaded = common.fetch(projected.head(kind, (row, head), &p));
        let x = common.finish(kind, (&loaded, &common.at(pos, &p)), mine, &p);
        if kind == Kind::Query {
            let to = q_out.add((row * p.n_head as usize + head as usize) * p.head_dim as usize);
            store_head(to, &x, p.head_dim);
        } else {
            let pages = page_table.add(ld(span.add(row)) as usize * p.max_pages as usize);
            let in_row = head as usize * p.head_dim as usize;
            let to = physical_token(pages, pos) * p.n_head_kv as usize * p.head_dim as usize + in_row;
            store_head(if kind == Kind::Value { v_cache.add(to) } else { k_cache.add(to) }, &x, p.head_dim);
        }
    }
}

macro_rules! entries {
    ($($(#[$doc:meta])* $name:ident: $elem:ty;)+) => {$(
        $(#[$doc])*
        #[kernel(max_threads = 128)]
        pub unsafe fn $name(
            q: *const f32, k: *const f32, v: *const f32, q_bias: *const f32, k_bias: *const f32, v_bias: *const f32,
            q_norm: *const f32, k_norm: *const f32, turns: *const u64, pos: *const u32, span: *const u32,
            page_table: *const u32, q_out: *mut f32, k_cache: *mut $elem, v_cache: *mut $elem, p: HeadsParams,
        ) {
            // SAFETY: the caller's promise is the same.
            unsafe {
                let projected = Projected { q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm, turns };
                heads::<$elem>(projected, pos, span, page_table, q_out, k_cache, v_cache, p)
            }
        }
    )+};
}

entries! {
    /// Queries, keys and values of a batch, with an f32 cache.
    ///
    /// Launch: grid `[ceil((n_head + 2·n_head_kv) / HEADS_PER_BLOCK), rows, 1]`, block [`THREADS`], shared memory
    /// [`shared_bytes`]`(head_dim)`. May be launched dependent.
    ///
    /// # Safety
    /// - `head_dim` is a multiple of 4 up to [`MAX_HEAD_DIM`]; everything of f32 and the caches are 16-byte aligned.
    /// - `q` has `rows·n_head` heads, `q_stride` apart; `k` and `v` are `[rows, n_head_kv, head_dim]`, `q_out` is
    ///   `[rows, n_head, head_dim]` and may be `q` where the stride is `head_dim`; otherwise nothing written overlaps
    ///   anything.
    /// - Biases have an element for each of a row's, norms `head_dim`, or are null; `turns` has `n_rot/2`.
    /// - `pos` and `span` have `rows` elements; every row's `pos / PAGE_TOKENS` is among the entries of the span's row
    ///   of `page_table` that name a page of both caches, `[pages, PAGE_TOKENS, n_head_kv, head_dim]`.
    attention_heads_f32: f32;
    /// [`attention_heads_f32`] with an f16 cache.
    ///
    /// # Safety
    /// As there.
    attention_heads_f16: u16;
}
