//! A batch's metadata on the device: one upload of words, whose places follow from the shape.
//!
//! A step that is fed by the one before ([`feed`](crate::gpu::ops::feed)) moves its rows' positions on by itself. Where
//! that makes the words what the next batch asks for, nothing is uploaded.

use std::ops::Range;
use std::sync::Arc;

use gpu_kernels::kernels::sample::SampleParams;

use super::{GpuBackend, Result, allocating, device_error};
use crate::backend::{self as api, Choose, Error, PAGE_TOKENS};
use crate::gpu::device::Device;
use crate::gpu::memory::{Buffer, Slice};
use crate::gpu::ops::{Fed, MIN_SPAN_ROWS, NOT_FED, Placement, Spans, sample_params};
use crate::gpu::staging::Staging;

/// What a batch's launches depend on: batches of one shape differ only in what their words say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchShape {
    /// Tokens.
    pub rows: u32,
    /// Sequences.
    pub spans: u32,
    /// Rows of the longest span.
    pub span_rows: u32,
    /// Rows whose logits are wanted.
    pub outputs: u32,
    /// Entries of a sequence's row of the page table, a power of two.
    pub max_pages: u32,
    /// Rows of sequences with few of them.
    pub short: u32,
    /// Whether rows take tokens that the step before chose.
    pub fed: bool,
    /// Whether tokens are drawn, and not just the most probable ones.
    pub drawn: bool,
}

/// Words of one draw.
const DRAW_WORDS: usize = size_of::<SampleParams>() / size_of::<u32>();

impl BatchShape {
    /// Words of `tokens`, `pos` and `span`, `[rows]`; `slot`, `first`, `span_rows` and `start`, `[spans]`;
    /// `outputs`; `short`, the rows of sequences with few; the page table, `[spans, max_pages]`. Then, where rows are
    /// fed, `fed`, `[rows]`, and `fresh`; and where tokens are drawn, at an even place, the draws,
    /// `[outputs, DRAW_WORDS]`.
    fn n_words(&self) -> usize {
        self.draws().end
    }

    fn pos(&self) -> Range<usize> {
        let rows = self.rows as usize;
        rows..2 * rows
    }

    fn start(&self) -> Range<usize> {
        let (rows, spans) = (self.rows as usize, self.spans as usize);
        3 * rows + 3 * spans..3 * rows + 4 * spans
    }

    fn short(&self) -> Range<usize> {
        let begin = self.start().end + self.outputs as usize;
        begin..begin + self.short as usize
    }

    fn page_table(&self) -> Range<usize> {
        let begin = self.short().end;
        begin..begin + self.spans as usize * self.max_pages as usize
    }

    fn fed(&self) -> Range<usize> {
        let begin = self.page_table().end;
        begin..begin + if self.fed { self.rows as usize } else { 0 }
    }

    fn fresh(&self) -> Range<usize> {
        let begin = self.fed().end;
        begin..begin + usize::from(self.fed)
    }

    fn draws(&self) -> Range<usize> {
        let begin = self.fresh().end.next_multiple_of(2);
        begin..begin + if self.drawn { self.outputs as usize * DRAW_WORDS } else { 0 }
    }
}

/// A batch whose metadata is on the device.
pub struct Batch<D: Device> {
    words: Arc<Buffer<D, u32>>,
    /// What rows are fed from.
    chosen: Option<Arc<Buffer<D, u32>>>,
    pub(super) shape: BatchShape,
    /// Above every page and every slot that it names.
    page_end: u32,
    slot_end: u32,
}

/// The memory for batches. It is used again when the batch before is gone.
pub(super) struct Pool<D: Device> {
    words: Option<Arc<Buffer<D, u32>>>,
    /// What the words say when the last batch's step has begun, but for the tokens of fed rows; `None` where that is
    /// not known.
    on_device: Option<(BatchShape, Vec<u32>)>,
    /// The way to the device.
    staging: Option<Staging<D>>,
    packed: Vec<u32>,
}

/// Chunks of the way to the device: the host fills one while the device may read those of the steps in flight.
const N_CHUNKS: usize = 4;
/// Enough for every decode step; prompts may want more.
const MIN_CHUNK_BYTES: usize = 1 << 16;

impl<D: Device> Default for Pool<D> {
    fn default() -> Self {
        Pool { words: None, on_device: None, staging: None, packed: Vec::new() }
    }
}

impl<D: Device> Pool<D> {
    /// Who holds the words while no batch does: the pool, and the backend's list of what is kept.
    const N_OWNERS: usize = 2;
}

/// The shape of a batch, after the checks that the kernels' safety rests on.
fn shape(batch: &api::Batch, choose: &Choose) -> Result<BatchShape> {
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
    let Choose { draws, fed, .. } = choose;
    if !(draws.is_empty() || draws.len() == batch.outputs.len()) || !(fed.is_empty() || fed.len() == n_rows) {
        return fail(format!("{} draws, {} fed rows", draws.len(), fed.len()));
    }
    let size = |n: usize| u32::try_from(n).map_err(|_| Error::Batch(format!("{n} of something")));
    Ok(BatchShape {
        rows: size(n_rows)?,
        spans: size(batch.spans.len())?,
        span_rows: batch.spans.iter().map(|span| span.rows).max().unwrap_or(0),
        outputs: size(batch.outputs.len())?,
        // At most 2^26 pages hold all positions.
        max_pages: max_pages.next_power_of_two(),
        short: batch.spans.iter().map(|span| span.rows).filter(|rows| *rows < MIN_SPAN_ROWS).sum(),
        fed: choose.fed.iter().any(Option::is_some),
        drawn: !choose.draws.is_empty(),
    })
}

/// Writes the words of a batch.
fn pack(batch: &api::Batch, choose: &Choose, shape: &BatchShape, words: &mut Vec<u32>) {
    words.clear();
    words.reserve(shape.n_words());
    words.extend(&batch.tokens);
    for (token, _) in words.iter_mut().zip(&choose.fed).filter(|(_, fed)| fed.is_some()) {
        *token = 0; // for it to be the same from step to step
    }
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
    if shape.fed {
        words.extend(choose.fed.iter().map(|fed| fed.unwrap_or(NOT_FED)));
        words.push(1);
    }
    words.resize(shape.draws().start, 0);
    let draws: Vec<_> = choose.draws.iter().map(sample_params).collect();
    words.extend(bytemuck::cast_slice::<SampleParams, u32>(&draws));
}

/// Moves words of a fed batch one position on.
fn move_on(shape: &BatchShape, words: &mut [u32]) {
    for range in [shape.pos(), shape.start()] {
        words[range].iter_mut().for_each(|position| *position = position.wrapping_add(1));
    }
}

impl<D: Device> GpuBackend<D> {
    pub(super) fn upload_batch(&mut self, batch: &api::Batch, choose: &Choose) -> Result<Batch<D>> {
        let shape = shape(batch, choose)?;
        let fed_end = choose.fed.iter().flatten().max().map(|last| last.saturating_add(1));
        let chosen = fed_end.map(|end| self.chosen_before(end)).transpose()?;
        let mut packed = std::mem::take(&mut self.batches.packed);
        pack(batch, choose, &shape, &mut packed);
        let words = self.batch_words(packed.len())?;
        // It holds until the words are known to be there.
        let on_device = self.batches.on_device.take();
        let is_there = on_device.is_some_and(|(other, mut words)| {
            shape.fed && other == shape && {
                move_on(&shape, &mut words);
                words == packed
            }
        });
        if !is_there {
            self.upload_words(&words, &packed)?;
        }
        self.batches.on_device = Some((shape, packed.clone()));
        self.batches.packed = packed;
        let pages = batch.spans.iter().flat_map(|span| span.pages.iter().take(shape.max_pages as usize));
        let slots = batch.spans.iter().map(|span| span.slot);
        let end = |last: Option<u32>| last.map_or(0, |last| last.saturating_add(1));
        Ok(Batch { words, chosen, shape, page_end: end(pages.copied().max()), slot_end: end(slots.max()) })
    }

    /// Memory for so many words: that of the batch before, where it is gone and was as large.
    fn batch_words(&mut self, len: usize) -> Result<Arc<Buffer<D, u32>>> {
        let fits = |words: &&Arc<Buffer<D, u32>>| words.len() >= len && Arc::strong_count(words) <= Pool::<D>::N_OWNERS;
        if let Some(words) = self.batches.words.as_ref().filter(fits) {
            return Ok(words.clone());
        }
        self.batches.on_device = None;
        let words = self.keep("a batch", len.next_power_of_two())?;
        self.batches.words = Some(words.clone());
        Ok(words)
    }

    fn upload_words(&mut self, words: &Buffer<D, u32>, packed: &[u32]) -> Result {
        let bytes = bytemuck::cast_slice::<u32, u8>(packed);
        let fits = |staging: &Staging<D>| staging.chunk_bytes() >= bytes.len();
        if !self.batches.staging.as_ref().is_some_and(fits) {
            let staging = Staging::new(&*self.device, bytes.len().next_power_of_two().max(MIN_CHUNK_BYTES), N_CHUNKS);
            self.batches.staging = Some(staging.map_err(|e| allocating("a batch", e))?);
        }
        let staging = self.batches.staging.as_mut().expect("made above");
        let to = words.part(..packed.len()).map_err(device_error)?.as_bytes();
        staging.upload_with(&*self.device, to, |chunk| chunk.copy_from_slice(bytes)).map_err(device_error)
    }

    /// After a step that may have stopped anywhere.
    pub(super) fn forget_batch(&mut self) {
        self.batches.on_device = None;
    }
}

impl<D: Device> Batch<D> {
    fn words(&self, before: usize, len: usize) -> Result<Slice<'_, u32>> {
        self.words.part(before..before + len).map_err(device_error)
    }

    fn range(&self, range: Range<usize>) -> Result<Slice<'_, u32>> {
        self.words.part(range).map_err(device_error)
    }

    /// Where the words lie: what a captured step has in it besides the shape.
    pub(super) fn address(&self) -> u64 {
        self.words.slice().address()
    }

    pub(super) fn tokens(&self) -> Result<Slice<'_, u32>> {
        self.words(0, self.shape.rows as usize)
    }

    pub(super) fn pos(&self) -> Result<Slice<'_, u32>> {
        self.range(self.shape.pos())
    }

    pub(super) fn outputs(&self) -> Result<Slice<'_, u32>> {
        self.words(3 * self.shape.rows as usize + 4 * self.shape.spans as usize, self.shape.outputs as usize)
    }

    /// Where the rows live in a cache of `n_pages` pages.
    pub(super) fn placement(&self, n_pages: u32) -> Result<Placement<'_>> {
        if self.page_end > n_pages {
            return Err(Error::Batch(format!("page {} of {n_pages}", self.page_end - 1)));
        }
        let BatchShape { rows, spans, max_pages, .. } = self.shape;
        let (rows, spans) = (rows as usize, spans as usize);
        Ok(Placement {
            pos: self.pos()?,
            span: self.words(2 * rows, rows)?,
            page_table: self.range(self.shape.page_table())?,
            max_pages,
            first: self.words(3 * rows + spans, spans)?,
            span_rows: self.words(3 * rows + 2 * spans, spans)?,
            short: self.range(self.shape.short())?,
        })
    }

    /// What is to be fed, and the tokens it is fed from.
    pub(super) fn fed(&self) -> Result<Option<(Fed<'_>, Slice<'_, u32>)>> {
        let Some(chosen) = &self.chosen else { return Ok(None) };
        let fed = Fed {
            tokens: self.tokens()?,
            pos: self.pos()?,
            start: self.range(self.shape.start())?,
            from: self.range(self.shape.fed())?,
            fresh: self.range(self.shape.fresh())?,
        };
        Ok(Some((fed, chosen.slice())))
    }

    /// How tokens are drawn; `None`: they are the most probable ones.
    pub(super) fn draws(&self) -> Result<Option<Slice<'_, SampleParams>>> {
        if !self.shape.drawn {
            return Ok(None);
        }
        self.range(self.shape.draws())?.cast().map(Some).map_err(device_error)
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
