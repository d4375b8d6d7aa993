//! A batch's place in the paged cache, and the launcher of the cache's writes.

use cuda_std::launch::Launch;
pub use gpu_kernels::kernels::attention::prefill::MIN_SPAN_ROWS;
use gpu_kernels::kernels::kv_cache::{self, PAGE_TOKENS};

use super::{Check, Result};
use crate::gpu::device::Device;
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

    pub(super) fn check<D: Device>(&self, check: Check, device: &D, operand: &'static str, kv_dim: u32) -> Result<()> {
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
    /// First row of each span.
    pub first: Slice<'a, u32>,
    /// Rows of each span.
    pub span_rows: Slice<'a, u32>,
    /// The rows of spans with fewer than [`MIN_SPAN_ROWS`] rows.
    pub short: Slice<'a, u32>,
}

impl Placement<'_> {
    /// Checks the arrays' sizes and returns the number of rows.
    pub(super) fn check<D: Device>(&self, check: Check, device: &D) -> Result<u32> {
        device.check_owner(self.pos)?;
        device.check_owner(self.span)?;
        for slice in [self.page_table, self.first, self.span_rows, self.short] {
            device.check_owner(slice)?;
        }
        check.that("span", self.span.len() == self.pos.len(), "has not one element a row")?;
        let whole = self.max_pages > 0 && self.page_table.len().is_multiple_of(self.max_pages as usize);
        check.that("page_table", whole, "is not whole rows")?;
        let n_span = self.page_table.len() / self.max_pages as usize;
        let of_spans = self.first.len() == n_span && self.span_rows.len() == n_span;
        check.that("span_rows", of_spans, "has not one element a span")?;
        check.that("short", self.short.len() <= self.pos.len(), "has more elements than there are rows")?;
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
/// of both caches. A span's rows are `first .. first + span_rows`, in order of position, and the short ones are `short`.
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
