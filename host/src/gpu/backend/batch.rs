//! A batch's metadata on the device: one upload of words, whose places follow from the shape.

use std::sync::Arc;

use super::{GpuBackend, Result, device_error};
use crate::backend::{self as api, Error, PAGE_TOKENS};
use crate::gpu::device::Device;
use crate::gpu::memory::{Buffer, Slice};
use crate::gpu::ops::{MIN_SPAN_ROWS, Placement, Spans};

/// What a batch's launches depend on: batches of one shape differ only in what their words say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchShape {
    /// Tokens.
    pub rows: u32,
    /// Sequences.
    pub spans: u32,
    /// Rows whose logits are wanted.
    pub outputs: u32,
    /// Entries of a sequence's row of the page table, a power of two.
    pub max_pages: u32,
    /// Rows of sequences with few of them.
    pub short: u32,
}

impl BatchShape {
    /// Words of `tokens`, `pos` and `span`, `[rows]`; `slot`, `first`, `span_rows` and `start`, `[spans]`;
    /// `outputs`; `short`, the rows of sequences with few; the page table, `[spans, max_pages]`.
    fn n_words(&self) -> usize {
        self.table() + self.spans as usize * self.max_pages as usize
    }

    /// Words before the page table.
    fn table(&self) -> usize {
        let BatchShape { rows, spans, outputs, short, .. } = *self;
        3 * rows as usize + 4 * spans as usize + outputs as usize + short as usize
    }
}

/// A batch whose metadata is on the device.
pub struct Batch<D: Device> {
    words: Arc<Buffer<D, u32>>,
    pub(super) shape: BatchShape,
    /// Above every page and every slot that it names.
    page_end: u32,
    slot_end: u32,
}

/// The memory for batches. It is used again when the batch before is gone.
pub(super) struct Pool<D: Device> {
    words: Option<Arc<Buffer<D, u32>>>,
    packed: Vec<u32>,
}

impl<D: Device> Default for Pool<D> {
    fn default() -> Self {
        Pool { words: None, packed: Vec::new() }
    }
}

impl<D: Device> Pool<D> {
    /// Who holds the words while no batch does: the pool, and the backend's list of what is kept.
    const N_OWNERS: usize = 2;
}

/// The shape of a batch, after the checks that the kernels' safety rests on.
fn shape(batch: &api::Batch) -> Result<BatchShape> {
    let fail = |problem: String| Err(Error::Batch(problem));
    let n_rows = batch.tokens.len();
    let in_spans: u64 = batch.spans.iter().map(|span| u64::from(span.rows)).sum();
    if in_spans != n_rows as u64 {
        return fail(format!("{in_spans} rows in spans, {n_rows} tokens"));
    }
    if let Some(row) = batch.outputs.iter().find(|row| **row as usize >= n_rows) {
        return fail(format!("output {row} of {n_rows} rows"));
    }
    let mut max_pages = 1;
    for span in &batch.spans {
        let Some(end) = span.start.checked_add(span.rows) else {
            return fail(format!("positions from {} on, {} rows", span.start, span.rows));
        };
        let n_pages = end.div_ceil(PAGE_TOKENS);
        if (span.pages.len() as u64) < u64::from(n_pages) {
            return fail(format!("{} pages for {end} positions", span.pages.len()));
        }
        max_pages = max_pages.max(n_pages);
    }
    let mut slots: Vec<u32> = batch.spans.iter().map(|span| span.slot).collect();
    slots.sort_unstable();
    if let Some(pair) = slots.windows(2).find(|pair| pair[0] == pair[1]) {
        return fail(format!("slot {} is used twice", pair[0]));
    }
    let size = |n: usize| u32::try_from(n).map_err(|_| Error::Batch(format!("{n} of something")));
    Ok(BatchShape {
        rows: size(n_rows)?,
        spans: size(batch.spans.len())?,
        outputs: size(batch.outputs.len())?,
        // At most 2^26 pages hold all positions.
        max_pages: max_pages.next_power_of_two(),
        short: batch.spans.iter().map(|span| span.rows).filter(|rows| *rows < MIN_SPAN_ROWS).sum(),
    })
}

/// Writes the words of a batch.
fn pack(batch: &api::Batch, shape: &BatchShape, words: &mut Vec<u32>) {
    words.clear();
    words.reserve(shape.n_words());
    words.extend(&batch.tokens);
    words.extend(batch.spans.iter().flat_map(|span| span.start..span.start + span.rows));
    words.extend((0..).zip(&batch.spans).flat_map(|(i, span)| std::iter::repeat_n(i, span.rows as usize)));
    words.extend(batch.spans.iter().map(|span| span.slot));
    words.extend(batch.spans.iter().scan(0, |next, span| {
        let first = *next;
        *next += span.rows;
        Some(first)
    }));
    words.extend(batch.spans.iter().map(|span| span.rows));
    words.extend(batch.spans.iter().map(|span| span.start));
    words.extend(&batch.outputs);
    let mut next = 0;
    for span in &batch.spans {
        words.extend((next..next + span.rows).filter(|_| span.rows < MIN_SPAN_ROWS));
        next += span.rows;
    }
    for span in &batch.spans {
        let pages = span.pages.iter().copied().take(shape.max_pages as usize);
        words.extend(pages.chain(std::iter::repeat(0)).take(shape.max_pages as usize));
    }
}

impl<D: Device> GpuBackend<D> {
    pub(super) fn upload_batch(&mut self, batch: &api::Batch) -> Result<Batch<D>> {
        let shape = shape(batch)?;
        let mut packed = std::mem::take(&mut self.batches.packed);
        pack(batch, &shape, &mut packed);
        let free = self.batches.words.take();
        let fits = |words: &Arc<Buffer<D, u32>>| {
            words.len() >= packed.len() && Arc::strong_count(words) <= Pool::<D>::N_OWNERS
        };
        let words = match free.filter(fits) {
            Some(words) => words,
            None => self.keep("a batch", packed.len().next_power_of_two())?,
        };
        let to = words.part(..packed.len()).map_err(device_error)?;
        self.device.upload(to, &packed).map_err(device_error)?;
        self.batches = Pool { words: Some(words.clone()), packed };
        let pages = batch.spans.iter().flat_map(|span| span.pages.iter().take(shape.max_pages as usize));
        let slots = batch.spans.iter().map(|span| span.slot);
        let end = |last: Option<u32>| last.map_or(0, |last| last.saturating_add(1));
        Ok(Batch { words, shape, page_end: end(pages.copied().max()), slot_end: end(slots.max()) })
    }
}

impl<D: Device> Batch<D> {
    fn words(&self, before: usize, len: usize) -> Result<Slice<'_, u32>> {
        self.words.part(before..before + len).map_err(device_error)
    }

    /// Where the words lie: what a captured step has in it besides the shape.
    pub(super) fn address(&self) -> u64 {
        self.words.slice().address()
    }

    pub(super) fn tokens(&self) -> Result<Slice<'_, u32>> {
        self.words(0, self.shape.rows as usize)
    }

    pub(super) fn pos(&self) -> Result<Slice<'_, u32>> {
        self.words(self.shape.rows as usize, self.shape.rows as usize)
    }

    pub(super) fn outputs(&self) -> Result<Slice<'_, u32>> {
        self.words(3 * self.shape.rows as usize + 4 * self.shape.spans as usize, self.shape.outputs as usize)
    }

    /// Where the rows live in a cache of `n_pages` pages.
    pub(super) fn placement(&self, n_pages: u32) -> Result<Placement<'_>> {
        if self.page_end > n_pages {
            return Err(Error::Batch(format!("page {} of {n_pages}", self.page_end - 1)));
        }
        let BatchShape { rows, spans, max_pages, short, .. } = self.shape;
        let (rows, spans, table) = (rows as usize, spans as usize, self.shape.table());
        Ok(Placement {
            pos: self.pos()?,
            span: self.words(2 * rows, rows)?,
            page_table: self.words(table, spans * max_pages as usize)?,
            max_pages,
            first: self.words(3 * rows + spans, spans)?,
            span_rows: self.words(3 * rows + 2 * spans, spans)?,
            short: self.words(table - short as usize, short as usize)?,
        })
    }

    /// The spans, for a cache of `n_slots` slots.
    pub(super) fn spans(&self, n_slots: u32) -> Result<Spans<'_>> {
        if self.slot_end > n_slots {
            return Err(Error::Batch(format!("slot {} of {n_slots}", self.slot_end - 1)));
        }
        let BatchShape { rows, spans, .. } = self.shape;
        let of_spans = |i: usize| self.words(3 * rows as usize + i * spans as usize, spans as usize);
        Ok(Spans { slot: of_spans(0)?, first: of_spans(1)?, rows: of_spans(2)?, start: of_spans(3)? })
    }
}
