//! Launchers of the paged cache's writes and of attention.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::attention::{AttentionParams, SPLIT_KEYS, decode, exact, merge};
use gpu_kernels::kernels::kv_cache::{self, PAGE_TOKENS};

use super::{Check, Result};
use crate::backend::AttentionShape;
use crate::gpu::device::{Device, Properties};
use crate::gpu::memory::Slice;

/// One layer's keys or values on the device, `[pages, PAGE_TOKENS, kv_dim]`.
#[derive(Clone, Copy, Debug)]
pub enum KvSlice<'a> {
    /// f32 elements.
    F32(Slice<'a, f32>),
    /// f16 elements, as bits.
    F16(Slice<'a, u16>),
}

impl KvSlice<'_> {
    fn len(&self) -> usize {
        match self {
            KvSlice::F32(s) => s.len(),
            KvSlice::F16(s) => s.len(),
        }
    }

    fn check<D: Device>(&self, check: Check, device: &D, operand: &'static str, kv_dim: u32) -> Result<()> {
        match self {
            KvSlice::F32(s) => {
                device.check_owner(*s)?;
                check.aligned(operand, *s, 16)?;
            }
            KvSlice::F16(s) => {
                device.check_owner(*s)?;
                check.aligned(operand, *s, 16)?;
            }
        }
        let page = PAGE_TOKENS as usize * kv_dim as usize;
        check.that(operand, page > 0 && self.len().is_multiple_of(page), "is not whole pages")
    }
}

/// Where the rows of a batch live: device arrays that were checked when the batch was made.
#[derive(Clone, Copy, Debug)]
pub struct Placement<'a> {
    /// Position of each row.
    pub pos: Slice<'a, u32>,
    /// Span of each row.
    pub span: Slice<'a, u32>,
    /// `[spans, max_pages]`.
    pub page_table: Slice<'a, u32>,
    /// Entries of a span's row of the page table.
    pub max_pages: u32,
}

impl Placement<'_> {
    /// Checks the arrays' sizes and returns the number of rows.
    fn check<D: Device>(&self, check: Check, device: &D) -> Result<u32> {
        device.check_owner(self.pos)?;
        device.check_owner(self.span)?;
        device.check_owner(self.page_table)?;
        check.that("span", self.span.len() == self.pos.len(), "has not one element a row")?;
        let whole = self.max_pages > 0 && self.page_table.len().is_multiple_of(self.max_pages as usize);
        check.that("page_table", whole, "is not whole rows")?;
        let Ok(rows) = u32::try_from(self.pos.len()) else { return check.fail("pos", "too many") };
        Ok(rows)
    }
}

/// Writes keys and values `[rows, kv_dim]` of a batch to their pages.
///
/// # Errors
/// Where the lengths do not agree, or the caches differ in type.
///
/// # Safety
/// Every span of the placement is a row of its page table, whose entries up to `pos / PAGE_TOKENS` name pages
/// of both caches.
#[expect(unsafe_code, reason = "a launch, whose indices live on the device")]
pub unsafe fn kv_cache_write<D: Device>(
    device: &D,
    k: Slice<'_, f32>,
    v: Slice<'_, f32>,
    at: Placement<'_>,
    (k_cache, v_cache): (KvSlice<'_>, KvSlice<'_>),
    kv_dim: u32,
) -> Result<u64> {
    let check = Check("kv_cache_write");
    let rows = at.check(check, device)?;
    check.grid_yz("pos", rows)?;
    device.check_owner(k)?;
    device.check_owner(v)?;
    let len = rows as usize * kv_dim as usize;
    check.that("k", k.len() == len, "has not rows·kv_dim elements")?;
    check.that("v", v.len() == len, "has not rows·kv_dim elements")?;
    k_cache.check(check, device, "k_cache", kv_dim)?;
    v_cache.check(check, device, "v_cache", kv_dim)?;
    if len == 0 {
        return Ok(0);
    }
    let launch = Launch::grid([kv_dim.div_ceil(kv_cache::THREADS), rows, 1], kv_cache::THREADS);
    let (k, v, pos, span, pages) = (k.ptr(), v.ptr(), at.pos.ptr(), at.span.ptr(), at.page_table.ptr());
    match (k_cache, v_cache) {
        (KvSlice::F32(kc), KvSlice::F32(vc)) => {
            let args = (k, v, pos, span, pages, kc.ptr_mut(), vc.ptr_mut(), at.max_pages, kv_dim);
            // SAFETY: lengths and alignment were checked above; the pages are the caller's promise.
            unsafe { device.launch(kv_cache::kv_cache_write_f32, launch, args)? };
            Ok(16 * len as u64)
        }
        (KvSlice::F16(kc), KvSlice::F16(vc)) => {
            let args = (k, v, pos, span, pages, kc.ptr_mut(), vc.ptr_mut(), at.max_pages, kv_dim);
            // SAFETY: as above.
            unsafe { device.launch(kv_cache::kv_cache_write_f16, launch, args)? };
            Ok(12 * len as u64)
        }
        _ => check.fail("v_cache", "has another type than k_cache"),
    }
}

/// Room for the open softmaxes of a batch, between attention and its merge.
#[derive(Clone, Copy, Debug)]
pub struct Partials<'a> {
    /// `[rows, n_head, n_split, head_dim]`; splits without keys are not written.
    pub out: Slice<'a, f32>,
    /// `[rows, n_head, n_split, 2]`.
    pub max_sum: Slice<'a, f32>,
    /// Parts that a row's keys are split into.
    pub n_split: u32,
}

/// Whether there is a kernel for a head size.
pub fn takes_head_dim(head_dim: u32) -> bool {
    matches!(head_dim, 64 | 128 | 256)
}

/// Parts to split the keys of each row into, so that the grid fills the device several times over: lengths differ,
/// and a long sequence's blocks are to find room when short ones have ended. It depends on the shape alone, so that a
/// captured launch stays right.
pub fn n_split(properties: &Properties, rows: u32, shape: &AttentionShape, max_keys: u32) -> u32 {
    let per_row = shape.n_head_kv * blocks_per_kv(shape);
    let keys = shape.window.map_or(max_keys, |window| window.saturating_add(SPLIT_KEYS).min(max_keys));
    let wanted = (BLOCKS_PER_SM * properties.n_sm).div_ceil(rows.saturating_mul(per_row).max(1));
    wanted.clamp(1, keys.div_ceil(SPLIT_KEYS).clamp(1, merge::MAX_SPLIT))
}

/// Blocks wanted for each multiprocessor. Two of head size 256 are there at a time.
const BLOCKS_PER_SM: u32 = 8;

/// Blocks for the query heads of one key head.
fn blocks_per_kv(shape: &AttentionShape) -> u32 {
    (shape.n_head / shape.n_head_kv).div_ceil(decode::HEADS)
}

/// Grouped-query attention of `q`, `[rows, n_head, head_dim]`, over the pages; `out` has `q`'s shape.
///
/// # Errors
/// Where the lengths do not agree, or there is no kernel for the head size.
///
/// # Safety
/// As [`kv_cache_write`], and every position up to each row's was written.
#[expect(unsafe_code, reason = "a launch, whose indices live on the device")]
#[expect(clippy::too_many_arguments, reason = "the operation has that many operands")]
pub unsafe fn attention<D: Device>(
    device: &D,
    q: Slice<'_, f32>,
    (k_cache, v_cache): (KvSlice<'_>, KvSlice<'_>),
    at: Placement<'_>,
    partials: Partials<'_>,
    sinks: Option<Slice<'_, f32>>,
    out: Slice<'_, f32>,
    shape: &AttentionShape,
) -> Result<()> {
    let check = Check("attention");
    let rows = at.check(check, device)?;
    let (n_head, n_head_kv, head_dim, n_split) = (shape.n_head, shape.n_head_kv, shape.head_dim, partials.n_split);
    check.that("head_dim", takes_head_dim(head_dim), "has no attention kernel: 64, 128 and 256 have")?;
    check.that("n_head", n_head_kv > 0 && n_head.is_multiple_of(n_head_kv), "is no multiple of n_head_kv")?;
    check.grid_yz("n_head", n_head)?;
    check.that("n_split", (1..=merge::MAX_SPLIT).contains(&n_split), "is 0 or more than 128")?;
    for slice in [q, out, partials.out, partials.max_sum].into_iter().chain(sinks) {
        device.check_owner(slice)?;
    }
    let heads = rows as usize * n_head as usize;
    let len = heads * head_dim as usize;
    for (name, slice) in [("q", q), ("out", out), ("partials", partials.out), ("partials", partials.max_sum)] {
        check.aligned(name, slice, 16)?;
    }
    check.that("q", q.len() == len, "has not rows·n_head·head_dim elements")?;
    check.that("out", out.len() == len, "has not rows·n_head·head_dim elements")?;
    check.that("partials", partials.out.len() >= len * n_split as usize, "has too few elements")?;
    check.that("partials", partials.max_sum.len() >= 2 * heads * n_split as usize, "has too few elements")?;
    check.that("sinks", sinks.is_none_or(|s| s.len() == n_head as usize), "has not n_head elements")?;
    k_cache.check(check, device, "k_cache", n_head_kv * head_dim)?;
    v_cache.check(check, device, "v_cache", n_head_kv * head_dim)?;
    if rows == 0 {
        return Ok(());
    }

    let params = AttentionParams {
        n_head,
        n_head_kv,
        scale: shape.scale,
        window: shape.window.unwrap_or(0),
        max_pages: at.max_pages,
    };
    let (pos, span, pages) = (at.pos.ptr(), at.span.ptr(), at.page_table.ptr());
    let (part, max_sum) = (partials.out.ptr_mut(), partials.max_sum.ptr_mut());
    match (k_cache, v_cache) {
        (KvSlice::F16(kc), KvSlice::F16(vc)) => {
            let launch = Launch::grid([rows, n_head_kv * blocks_per_kv(shape), n_split], decode::THREADS)
                .shared(decode::shared_bytes(head_dim));
            let args = (q.ptr(), kc.ptr(), vc.ptr(), pos, span, pages, part, max_sum, params);
            // SAFETY: lengths and alignment were checked above; the pages are the caller's promise.
            unsafe {
                match head_dim {
                    64 => device.launch(decode::attention_decode_d64, launch, args)?,
                    128 => device.launch(decode::attention_decode_d128, launch, args)?,
                    _ => device.launch(decode::attention_decode_d256, launch, args)?,
                }
            }
        }
        (KvSlice::F32(kc), KvSlice::F32(vc)) => {
            let per_block = if (n_head / n_head_kv).is_multiple_of(4) { 4 } else { 1 };
            let launch = Launch::grid([rows, n_head / per_block, n_split], exact::THREADS)
                .shared(exact::shared_bytes(head_dim, per_block));
            let args = (q.ptr(), kc.ptr(), vc.ptr(), pos, span, pages, part, max_sum, params);
            // SAFETY: as above.
            unsafe {
                match (head_dim, per_block) {
                    (64, 1) => device.launch(exact::attention_f32_d64_h1, launch, args)?,
                    (64, _) => device.launch(exact::attention_f32_d64_h4, launch, args)?,
                    (128, 1) => device.launch(exact::attention_f32_d128_h1, launch, args)?,
                    (128, _) => device.launch(exact::attention_f32_d128_h4, launch, args)?,
                    (_, 1) => device.launch(exact::attention_f32_d256_h1, launch, args)?,
                    (..) => device.launch(exact::attention_f32_d256_h4, launch, args)?,
                }
            }
        }
        _ => return check.fail("v_cache", "has another type than k_cache"),
    }
    let sinks = sinks.map_or(std::ptr::null(), Slice::ptr);
    let (part, max_sum) = (part.cast_const(), max_sum.cast_const());
    let args = (part, max_sum, pos, sinks, out.ptr_mut(), n_head, head_dim, n_split, params.window);
    let launch = Launch::grid([heads as u32, head_dim.div_ceil(merge::BLOCK_ELEMS), 1], merge::THREADS)
        .shared(merge::SHARED_BYTES);
    // SAFETY: the partials were just queued; lengths were checked above; a block a head.
    unsafe { device.launch(merge::attention_merge, launch, args)? };
    Ok(())
}
