//! Launchers of attention.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::attention::merge::{self, MergeParams};
use gpu_kernels::kernels::attention::prefill::{self, PrefillParams};
use gpu_kernels::kernels::attention::{AttentionParams, SPLIT_KEYS, decode, exact};

use super::kv_cache::{KvSlice, Placement};
use super::{Check, Heads, Q8, Result};
use crate::backend::AttentionShape;
use crate::gpu::device::{Device, Properties};
use crate::gpu::memory::Slice;

/// Room for the open softmaxes of a batch, between attention and its merge.
#[derive(Clone, Copy, Debug)]
pub struct Partials<'a> {
    /// `[split_rows, n_head, n_split, head_dim]`; splits without keys are not written.
    pub out: Slice<'a, f32>,
    /// `[split_rows, n_head, n_split, 2]`.
    pub max_sum: Slice<'a, f32>,
    /// How the work on a row is shared out.
    pub split: Split,
}

/// How the work on a row is shared out to blocks.
#[derive(Clone, Copy, Debug)]
pub struct Split {
    /// Parts that its keys are split into.
    pub n: u32,
    /// Query heads of a block, of those that share a key head; the f32 kernels have a number of their own.
    pub block_heads: u32,
}

impl Split {
    /// Into `n` parts, with as many heads a block as there can be.
    pub fn new(n: u32) -> Self {
        Self { n, block_heads: decode::HEADS }
    }

    /// Blocks for a part of a row.
    fn blocks(self, shape: &AttentionShape) -> u32 {
        shape.n_head_kv * (shape.n_head / shape.n_head_kv).div_ceil(self.block_heads)
    }
}

/// Whether there is a kernel for a head size.
pub fn takes_head_dim(head_dim: u32) -> bool {
    matches!(head_dim, 64 | 128 | 256)
}

/// Keys of a row that are not split: joining splits takes longer than a block with a few more keys.
const WHOLE_KEYS: u32 = 128;

/// How to share out the work on each row. Few keys are not split. Otherwise, the blocks of a single row have as much to do
/// each, and fill the device once: each of them makes the queries ready. Those of several fill it several times over:
/// lengths differ, and a long sequence's blocks are to find room when short ones have ended.
///
/// Where that leaves multiprocessors without a block, blocks have fewer heads each. More of them then read the same keys,
/// which are few, and what is done for each head is done sooner.
///
/// It depends on the shape alone, so that a captured launch stays right.
pub fn split(
    properties: &Properties,
    rows: u32,
    shape: &AttentionShape,
    kv: (KvSlice<'_>, KvSlice<'_>),
    max_keys: u32,
) -> Split {
    let keys = shape.window.map_or(max_keys, |window| window.saturating_add(SPLIT_KEYS).min(max_keys));
    let mut split = Split::new(1);
    if keys > WHOLE_KEYS || !joins_alone(kv) {
        let per_sm = if rows == 1 { decode::blocks_a_multiprocessor(shape.head_dim) } else { BLOCKS_PER_SM };
        let wanted = (per_sm * properties.n_sm).div_ceil(rows.saturating_mul(split.blocks(shape)).max(1));
        split.n = wanted.clamp(1, keys.div_ceil(SPLIT_KEYS).clamp(1, merge::MAX_SPLIT));
    }
    while split.block_heads > 1 {
        let finer = Split { block_heads: split.block_heads / 2, ..split };
        if rows.saturating_mul(split.n * finer.blocks(shape)) > FEW_BLOCKS_PER_SM * properties.n_sm {
            break;
        }
        split = finer;
    }
    split
}

/// Blocks for each multiprocessor that are made by taking fewer heads, at most.
const FEW_BLOCKS_PER_SM: u32 = 2;

/// Rows whose keys are split: all, or where there is a kernel for many rows of a span, those of short spans. The result
/// of the others has no int8 form.
pub fn split_rows(at: &Placement<'_>, kv: (KvSlice<'_>, KvSlice<'_>), shape: &AttentionShape) -> u32 {
    let tiled = matches!(kv.0, KvSlice::F16(_)) && shape.n_head <= prefill::ROWS * shape.n_head_kv;
    (if tiled { at.short.len() } else { at.pos.len() }) as u32
}

/// Blocks wanted for each multiprocessor where there are several rows. Two of head size 256 are there at a time.
const BLOCKS_PER_SM: u32 = 8;

/// Whether one split needs no merge.
fn joins_alone(kv: (KvSlice<'_>, KvSlice<'_>)) -> bool {
    matches!(kv.0, KvSlice::F16(_))
}

/// What attention is asked with.
#[derive(Clone, Copy, Debug)]
pub enum Queries<'a> {
    /// Queries, `[rows, n_head, head_dim]`, whose keys and values are in the cache.
    Ready(Slice<'a, f32>),
    /// Projections of which queries, keys and values are to be made as
    /// [`attention_heads`](super::attention_heads) makes them. No two rows are of one sequence.
    Fresh(&'a Heads<'a>),
}

/// Whether attention takes [`Queries::Fresh`], of rows that are each alone in their sequence.
pub fn takes_fresh(kv: (KvSlice<'_>, KvSlice<'_>), at: &Placement<'_>) -> bool {
    matches!(kv, (KvSlice::F16(_), KvSlice::F16(_))) && at.pos.len() == at.first.len() && at.short.len() == at.pos.len()
}

/// Attention of a batch's rows over their pages.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Queries.
    pub q: Queries<'a>,
    /// Keys and values.
    pub kv: (KvSlice<'a>, KvSlice<'a>),
    /// Where the rows live.
    pub at: Placement<'a>,
    /// Room between the kernels.
    pub partials: Partials<'a>,
    /// A score for each head that has no value.
    pub sinks: Option<Slice<'a, f32>>,
    /// Heads, scale and window.
    pub shape: AttentionShape,
    /// Launch before the kernel ahead has ended.
    pub dependent: bool,
}

/// Where the result of [`attention`] goes, and what is done to it first.
#[derive(Clone, Copy, Debug)]
pub struct AttentionOut<'a> {
    /// `[rows, n_head, head_dim]`.
    pub out: Slice<'a, f32>,
    /// Pairs of a query and its gate, `[rows, n_head, 2, head_dim]`: the result is multiplied by `σ(gate)`.
    pub pairs: Option<Slice<'a, f32>>,
    /// The result also as [`quantize_q8`](super::quantize_q8()) gives it, for rows of all heads.
    pub q8: Option<Q8<'a>>,
}

/// Grouped-query attention: of short spans, splits of the keys and then, where there are several, their merge; of the
/// others, tiles.
///
/// # Errors
/// Where the lengths do not agree, or there is no kernel for the head size.
///
/// # Safety
/// As [`kv_cache_write`](super::kv_cache_write), and every position up to each row's was written.
#[expect(unsafe_code, reason = "launches, whose indices live on the device")]
pub unsafe fn attention<D: Device>(device: &D, op: &Attention<'_>, to: AttentionOut<'_>) -> Result<()> {
    let rows = check_attention(device, op, &to)?;
    let n_split_rows = split_rows(&op.at, op.kv, &op.shape);
    // SAFETY: the operands were checked above; the pages are the caller's promise.
    unsafe {
        if n_split_rows > 0 {
            let list = if n_split_rows == rows { std::ptr::null() } else { op.at.short.ptr() };
            launch_splits(device, op, to, n_split_rows, list)?;
            if op.partials.split.n > 1 || !joins_alone(op.kv) {
                launch_merge(device, op, to, n_split_rows, list)?;
            }
        }
        if n_split_rows < rows {
            launch_prefill(device, op, to, rows)?;
        }
    }
    Ok(())
}

/// Checks the operands and returns the number of rows.
fn check_attention<D: Device>(device: &D, op: &Attention<'_>, to: &AttentionOut<'_>) -> Result<u32> {
    let check = Check("attention");
    let rows = op.at.check(check, device)?;
    let AttentionShape { n_head, n_head_kv, head_dim, .. } = op.shape;
    let Split { n: n_split, block_heads } = op.partials.split;
    check.that("head_dim", takes_head_dim(head_dim), "has no attention kernel: 64, 128 and 256 have")?;
    check.that("n_head", n_head_kv > 0 && n_head.is_multiple_of(n_head_kv), "is no multiple of n_head_kv")?;
    check.grid_yz("n_head", n_head)?;
    check.that("n_split", (1..=merge::MAX_SPLIT).contains(&n_split), "is 0 or more than 128")?;
    check.that("block_heads", (1..=decode::HEADS).contains(&block_heads), "is 0 or more than 8")?;
    let len = rows as usize * n_head as usize * head_dim as usize;
    let n_split_rows = split_rows(&op.at, op.kv, &op.shape);
    let split_heads = n_split_rows as usize * n_head as usize * n_split as usize;
    for (name, slice) in [("out", to.out), ("partials", op.partials.out), ("partials", op.partials.max_sum)]
        .into_iter()
        .chain(to.pairs.map(|pairs| ("pairs", pairs)))
    {
        device.check_owner(slice)?;
        check.aligned(name, slice, 16)?;
    }
    check_queries(check, device, op, to, len)?;
    check.that("out", to.out.len() == len, "has not rows·n_head·head_dim elements")?;
    check.that("partials", op.partials.out.len() >= split_heads * head_dim as usize, "has too few elements")?;
    check.that("partials", op.partials.max_sum.len() >= 2 * split_heads, "has too few elements")?;
    if let Some(sinks) = op.sinks {
        device.check_owner(sinks)?;
        check.that("sinks", sinks.len() == n_head as usize, "has not n_head elements")?;
    }
    if let Some(pairs) = to.pairs {
        check.that("pairs", pairs.len() == 2 * len, "has not two heads for each of q")?;
        check.apart("out", to.out, pairs)?;
    }
    for other in [op.partials.out, op.partials.max_sum] {
        check.apart("out", to.out, other)?;
    }
    if let Some(q8) = to.q8 {
        check.that("q8", n_split_rows == rows, "is not made of spans with many rows")?;
        check.that("q8", q8.cols == n_head * head_dim, "has another number of columns")?;
        q8.check_output(check, device, u64::from(rows), &[to.out, op.partials.out, op.partials.max_sum])?;
    }
    op.kv.0.check(check, device, "k_cache", n_head_kv * head_dim)?;
    op.kv.1.check(check, device, "v_cache", n_head_kv * head_dim)?;
    Ok(rows)
}

/// Checks what attention is asked with: `len` elements of queries, or projections of as many.
fn check_queries<D: Device>(
    check: Check,
    device: &D,
    op: &Attention<'_>,
    to: &AttentionOut<'_>,
    len: usize,
) -> Result<()> {
    let projections = match &op.q {
        Queries::Ready(q) => {
            device.check_owner(*q)?;
            check.aligned("q", *q, 16)?;
            check.that("q", q.len() == len, "has not rows·n_head·head_dim elements")?;
            vec![*q]
        }
        Queries::Fresh(heads) => {
            let AttentionShape { n_head, n_head_kv, head_dim, .. } = op.shape;
            let shape = (heads.rope.n_head, heads.n_head_kv, heads.rope.head_dim);
            check.that("q", shape == (n_head, n_head_kv, head_dim), "has another shape than attention")?;
            check.that("q", takes_fresh(op.kv, &op.at), "is fresh, of rows that share a sequence or an f32 cache")?;
            check.that("q", heads.at.pos.address() == op.at.pos.address(), "is of other rows")?;
            heads.check(check, device, op.kv)?;
            vec![heads.q, heads.k, heads.v]
        }
    };
    for q in projections {
        for written in [to.out, op.partials.out, op.partials.max_sum] {
            check.apart("out", written, q)?;
        }
        if let Some(q8) = to.q8 {
            check.apart("q8", q8.qs, q)?;
            check.apart("q8", q8.d, q)?;
            check.apart("q8", q8.s, q)?;
        }
    }
    Ok(())
}

/// Sinks and pairs of queries and gates, or null.
fn constants(op: &Attention<'_>, to: &AttentionOut<'_>) -> [*const f32; 2] {
    [op.sinks, to.pairs].map(|slice| slice.map_or(std::ptr::null(), Slice::ptr))
}

/// The int8 form of the result, or null.
fn q8_pointers(to: &AttentionOut<'_>) -> (*mut i8, *mut f32, *mut f32) {
    match to.q8 {
        Some(q8) => (q8.qs.ptr_mut(), q8.d.ptr_mut(), q8.s.ptr_mut()),
        None => (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut()),
    }
}

/// Attention over each split of the first rows, or of those that `list` names.
///
/// # Safety
/// The operands were checked, and are as [`attention`] says.
#[expect(unsafe_code, reason = "launches")]
unsafe fn launch_splits<D: Device>(
    device: &D,
    op: &Attention<'_>,
    to: AttentionOut<'_>,
    rows: u32,
    list: *const u32,
) -> Result<()> {
    let AttentionShape { n_head, n_head_kv, head_dim, scale, window } = op.shape;
    let Split { n: n_split, block_heads } = op.partials.split;
    let window = window.unwrap_or(0);
    let max_pages = op.at.max_pages;
    let params = AttentionParams { n_head, n_head_kv, scale, window, max_pages, block_heads };
    let (pos, span, pages) = (op.at.pos.ptr(), op.at.span.ptr(), op.at.page_table.ptr());
    let (part, max_sum) = (op.partials.out.ptr_mut(), op.partials.max_sum.ptr_mut());
    let q = match &op.q {
        Queries::Ready(q) => q.ptr(),
        // SAFETY: the caller's promise.
        Queries::Fresh(heads) => return unsafe { launch_fresh(device, op, to, heads, params, list) },
    };
    match op.kv {
        (KvSlice::F16(kc), KvSlice::F16(vc)) => {
            let launch = Launch::grid([rows, op.partials.split.blocks(&op.shape), n_split], decode::THREADS)
                .shared(decode::shared_bytes(head_dim));
            let launch = Launch { pdl: op.dependent, ..launch };
            let [sinks, pairs] = constants(op, &to);
            let (out, (qs, d, s)) = (to.out.ptr_mut(), q8_pointers(&to));
            let args =
                (q, kc.ptr(), vc.ptr(), pos, span, list, pages, part, max_sum, sinks, pairs, out, qs, d, s, params);
            // SAFETY: the caller's promise; the kernel waits for the grid ahead before it reads.
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
            let args = (q, kc.ptr(), vc.ptr(), pos, span, pages, part, max_sum, params);
            // SAFETY: the caller's promise.
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
        _ => return Check("attention").fail("v_cache", "has another type than k_cache"),
    }
    Ok(())
}

/// [`launch_splits`] of projections.
///
/// # Safety
/// As there.
#[expect(unsafe_code, reason = "launches")]
unsafe fn launch_fresh<D: Device>(
    device: &D,
    op: &Attention<'_>,
    to: AttentionOut<'_>,
    heads: &Heads<'_>,
    params: AttentionParams,
    list: *const u32,
) -> Result<()> {
    let (KvSlice::F16(kc), KvSlice::F16(vc)) = op.kv else {
        return Check("attention").fail("k_cache", "is not f16");
    };
    let (rows, head_dim) = (op.at.pos.len() as u32, op.shape.head_dim);
    let split = op.partials.split;
    let grid = [rows, split.blocks(&op.shape), split.n];
    let launch = Launch::grid(grid, decode::THREADS).shared(decode::shared_bytes(head_dim));
    let launch = Launch { pdl: op.dependent, ..launch };
    let ([q_bias, k_bias, v_bias], [q_norm, k_norm]) = heads.optional();
    let (q, k, v, turns) = (heads.q.ptr(), heads.k.ptr(), heads.v.ptr(), heads.turns.ptr());
    let (pos, span, pages) = (op.at.pos.ptr(), op.at.span.ptr(), op.at.page_table.ptr());
    let (kc, vc) = (kc.ptr_mut(), vc.ptr_mut());
    let (part, max_sum) = (op.partials.out.ptr_mut(), op.partials.max_sum.ptr_mut());
    let [sinks, pairs] = constants(op, &to);
    let (out, (qs, d, s)) = (to.out.ptr_mut(), q8_pointers(&to));
    let args = (
        q,
        k,
        v,
        q_bias,
        k_bias,
        v_bias,
        q_norm,
        k_norm,
        turns,
        kc,
        vc,
        pos,
        span,
        list,
        pages,
        part,
        max_sum,
        sinks,
        pairs,
        out,
        qs,
        d,
        s,
        heads.params(),
        params,
    );
    // SAFETY: the caller's promise; rows are as many as spans, so each is alone in one; the kernel waits for the grid
    // ahead before it reads.
    unsafe {
        match head_dim {
            64 => device.launch(decode::attention_fresh_d64, launch, args)?,
            128 => device.launch(decode::attention_fresh_d128, launch, args)?,
            _ => device.launch(decode::attention_fresh_d256, launch, args)?,
        }
    }
    Ok(())
}

/// The splits' merge.
///
/// # Safety
/// The operands were checked, and the splits are queued.
#[expect(unsafe_code, reason = "a launch")]
unsafe fn launch_merge<D: Device>(
    device: &D,
    op: &Attention<'_>,
    to: AttentionOut<'_>,
    rows: u32,
    list: *const u32,
) -> Result<()> {
    let AttentionShape { n_head, head_dim, window, .. } = op.shape;
    let p = MergeParams { n_head, head_dim, n_split: op.partials.split.n, window: window.unwrap_or(0) };
    let ([sinks, pairs], (qs, d, s)) = (constants(op, &to), q8_pointers(&to));
    let (part, max_sum) = (op.partials.out.ptr(), op.partials.max_sum.ptr());
    let args = (part, max_sum, op.at.pos.ptr(), list, sinks, pairs, to.out.ptr_mut(), qs, d, s, p);
    let launch = Launch::grid([rows * n_head, head_dim.div_ceil(merge::BLOCK_ELEMS), 1], merge::THREADS);
    let launch = Launch { pdl: op.dependent, ..launch.shared(merge::SHARED_BYTES) };
    // SAFETY: the caller's promise; a block a head or half of one; the kernel waits for the grid ahead before it reads.
    unsafe { device.launch(merge::attention_merge, launch, args)? };
    Ok(())
}

/// Attention of spans with many rows.
///
/// # Safety
/// The operands were checked, and are as [`attention`] says.
#[expect(unsafe_code, reason = "launches")]
unsafe fn launch_prefill<D: Device>(device: &D, op: &Attention<'_>, to: AttentionOut<'_>, rows: u32) -> Result<()> {
    let AttentionShape { n_head, n_head_kv, head_dim, scale, window } = op.shape;
    let (KvSlice::F16(kc), KvSlice::F16(vc), Queries::Ready(q)) = (op.kv.0, op.kv.1, op.q) else {
        return Check("attention").fail("q", "or the cache has no kernel for many rows");
    };
    let (n_span, max_pages, window) = (op.at.first.len() as u32, op.at.max_pages, window.unwrap_or(0));
    let p = PrefillParams { n_head, n_head_kv, scale, window, max_pages, n_span };
    let tiles = prefill::max_tiles(rows, n_span, n_head / n_head_kv);
    let launch = Launch::grid([tiles, n_head_kv, 1], prefill::THREADS).shared(prefill::shared_bytes(head_dim));
    let launch = Launch { pdl: op.dependent, ..launch };
    let [sinks, pairs] = constants(op, &to);
    let (pos, first, span_rows) = (op.at.pos.ptr(), op.at.first.ptr(), op.at.span_rows.ptr());
    let (pages, out) = (op.at.page_table.ptr(), to.out.ptr_mut());
    let args = (q.ptr(), kc.ptr(), vc.ptr(), pos, first, span_rows, pages, sinks, pairs, out, p);
    // SAFETY: the caller's promise; the kernel waits for the grid ahead before it reads.
    unsafe {
        match head_dim {
            64 => device.launch(prefill::attention_prefill_d64, launch, args)?,
            128 => device.launch(prefill::attention_prefill_d128, launch, args)?,
            _ => device.launch(prefill::attention_prefill_d256, launch, args)?,
        }
    }
    Ok(())
}
