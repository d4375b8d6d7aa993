//! Paged key-value cache: where a token lives, and how it gets there.
//!
//! A layer's cache is `[page][token of page][kv_dim]`, keys and values apart. A sequence owns a list of
//! pages, a row of the page table; position `t` is token `t % PAGE_TOKENS` of the list's entry
//! `t / PAGE_TOKENS`.

use cuda_std::prelude::*;

/// Tokens in a page.
pub const PAGE_TOKENS: u32 = 64;
/// Lanes a block of [`kv_cache_write_f32`] and [`kv_cache_write_f16`].
pub const THREADS: u32 = 128;

/// How keys and values are kept.
pub trait KvElem: Pod {
    /// The value to store.
    fn from_f32(value: f32) -> Self;
    /// Stores four consecutive elements, to a place aligned for all of them.
    ///
    /// # Safety
    /// As [`st`] for those elements.
    unsafe fn store4(p: *mut Self, values: [f32; 4]);
}

impl KvElem for f32 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
    #[inline(always)]
    unsafe fn store4(p: *mut Self, values: [f32; 4]) {
        // SAFETY: the caller's promise.
        unsafe { st(p.cast::<F32x4>(), F32x4::from_array(values)) }
    }
}

/// Half precision as bits: `half::f16` has no arithmetic that a GPU would like.
impl KvElem for u16 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        convert::f32_to_f16(value)
    }
    #[inline(always)]
    unsafe fn store4(p: *mut Self, [a, b, c, d]: [f32; 4]) {
        // SAFETY: the caller's promise.
        unsafe { st(p.cast::<U32x2>(), U32x2 { x: convert::pack_f16x2(a, b), y: convert::pack_f16x2(c, d) }) }
    }
}

/// The token index, in units of `kv_dim` elements, of position `pos` in a sequence's page list.
///
/// # Safety
/// `pages` has more than `pos / PAGE_TOKENS` entries.
#[inline(always)]
pub unsafe fn physical_token(pages: *const u32, pos: u32) -> usize {
    // SAFETY: the caller's promise.
    let page = unsafe { ld(pages.add((pos / PAGE_TOKENS) as usize)) };
    page as usize * PAGE_TOKENS as usize + (pos % PAGE_TOKENS) as usize
}

/// One body for both element types.
///
/// # Safety
/// As [`kv_cache_write_f32`].
#[inline(always)]
#[expect(
    clippy::too_many_arguments,
    reason = "a kernel's pointers are arguments of their own, so that they are known as global"
)]
unsafe fn kv_cache_write<T: KvElem>(
    k: *const f32,
    v: *const f32,
    pos: *const u32,
    span: *const u32,
    page_table: *const u32,
    k_cache: *mut T,
    v_cache: *mut T,
    max_pages: u32,
    kv_dim: u32,
) {
    let i = thread::index_1d();
    let row = thread::block_idx_y() as usize;
    if i >= kv_dim {
        return;
    }
    // SAFETY: the row's span and position name a page of the table by the caller's promise; `i < kv_dim`.
    unsafe {
        let pages = page_table.add(ld(span.add(row)) as usize * max_pages as usize);
        let to = physical_token(pages, ld(pos.add(row))) * kv_dim as usize + i as usize;
        let from = row * kv_dim as usize + i as usize;
        st(k_cache.add(to), T::from_f32(ld(k.add(from))));
        st(v_cache.add(to), T::from_f32(ld(v.add(from))));
    }
}

/// Writes the batch's keys and values, `[rows, kv_dim]`, to their pages, as f32.
///
/// Launch: grid `[ceil(kv_dim / THREADS), rows, 1]`, block `THREADS`.
///
/// # Safety
/// `k`, `v` have `rows·kv_dim` elements; `pos`, `span` have `rows`; `page_table` has `max_pages` entries for
/// each span, and every row's `pos / PAGE_TOKENS` is among the entries that name a page of both caches.
#[kernel(max_threads = 128)]
pub unsafe fn kv_cache_write_f32(
    k: *const f32,
    v: *const f32,
    pos: *const u32,
    span: *const u32,
    page_table: *const u32,
    k_cache: *mut f32,
    v_cache: *mut f32,
    max_pages: u32,
    kv_dim: u32,
) {
    // SAFETY: the caller's promise is the same.
    unsafe { kv_cache_write(k, v, pos, span, page_table, k_cache, v_cache, max_pages, kv_dim) }
}

/// [`kv_cache_write_f32`], rounding to f16.
///
/// # Safety
/// As [`kv_cache_write_f32`].
#[kernel(max_threads = 128)]
pub unsafe fn kv_cache_write_f16(
    k: *const f32,
    v: *const f32,
    pos: *const u32,
    span: *const u32,
    page_table: *const u32,
    k_cache: *mut u16,
    v_cache: *mut u16,
    max_pages: u32,
    kv_dim: u32,
) {
    // SAFETY: the caller's promise is the same.
    unsafe { kv_cache_write(k, v, pos, span, page_table, k_cache, v_cache, max_pages, kv_dim) }
}
