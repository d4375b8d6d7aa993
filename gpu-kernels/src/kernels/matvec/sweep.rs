//! Many rows a lane, with the next step's weights in flight while one is multiplied.
//!
//! A grid that fits the device at once, whose lanes go from row to row: what a block does before its first product,
//! such as a norm, is then done once a multiprocessor, and the memory is not idle between two rows.

use cuda_std::pdl;

use super::{Lane, Operand, group_sum};
use crate::kernels::format::{self, Format, FormatHeld, Row};
use crate::params::WARP;

/// Which items a warp takes: `first`, and every `stride`-th after it that is below `end`.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Items {
    pub(in crate::kernels) first: u32,
    pub(in crate::kernels) stride: u32,
    pub(in crate::kernels) end: u32,
}

/// A step of an item: the rows' chunks from `done` on.
#[derive(Clone, Copy)]
struct Step {
    item: u32,
    done: u32,
}

/// Where a lane loads from.
struct Walk<const R: usize> {
    /// The last step whose weights are under way.
    at: Step,
    /// The rows of its item.
    rows: [Row; R],
}

/// Starts to load the weights of the step after the last one, if there is one, when `awaited` is there: a word of what was
/// loaded before.
///
/// # Safety
/// As [`sweep`].
#[inline(always)]
unsafe fn load_next<F: FormatHeld, const R: usize, const S: usize>(
    walk: &mut Walk<R>,
    (place, items): (Lane, Items),
    rows: &impl Fn(u32) -> [Row; R],
    awaited: u32,
) -> Option<[[F::Held; R]; S]> {
    let Step { item, done } = walk.at;
    let step = (S as u32) << place.lanes_log2;
    let ends = done + step >= place.chunks;
    walk.at = if ends { Step { item: item + items.stride, done: 0 } } else { Step { item, done: done + step } };
    // Whether there is more to load is known only once the word is there: a lane waits for all of its loads at once, and
    // would wait for the next step's, too.
    walk.at.item = format::after(awaited, place.chunks >> 31, walk.at.item);
    if walk.at.item >= items.end {
        return None;
    }
    if ends {
        walk.rows = rows(walk.at.item);
    }
    // SAFETY: the rows have `place.chunks` chunks.
    Some(unsafe { place.hold_step::<F, R, S>(&walk.rows, walk.at.done) })
}

/// The sums of an item so far, and what `begin` gave for it.
struct Sums<E, const R: usize> {
    extra: E,
    of: [f32; R],
}

/// A word that takes part of each load of a step.
#[inline(always)]
fn word<F: FormatHeld, const R: usize, const S: usize>(held: &[[F::Held; R]; S]) -> u32 {
    let mut word = 0;
    for s in 0..S {
        for r in 0..R {
            word ^= F::word(&held[s][r]);
        }
    }
    word
}

/// Multiplies the weights of step `at`, `held`. At an item's end its sums go to `store`, and those of the item of step
/// `next` begin.
///
/// # Safety
/// As [`sweep`].
#[inline(always)]
unsafe fn multiply<F: FormatHeld, X: Operand<F>, E: Copy, const R: usize, const S: usize>(
    sums: &mut Sums<E, R>,
    (place, x): (Lane, X),
    (at, held): (Step, &[[F::Held; R]; S]),
    next: Option<u32>,
    begin: &impl Fn(u32) -> E,
    store: &mut impl FnMut(u32, [f32; R], E),
) {
    let (start, phase) = (F::start(place.lane), place.lane % F::BLOCK_CHUNKS);
    for s in 0..S {
        let ahead = at.done + ((s as u32) << place.lanes_log2);
        let live = place.lane + ahead < place.chunks;
        let at = start + ahead * F::CHUNK_ELEMS;
        // SAFETY: a live chunk exists in `x` as in the weights.
        let chunk = unsafe { x.load(at, live) };
        for r in 0..R {
            // SAFETY: the whole warp is here; a block's lanes have the same rows and steps.
            let raw = unsafe { F::gather(&held[s][r], phase) };
            sums.of[r] += X::dot(&raw, &chunk, phase);
        }
    }
    if at.done + ((S as u32) << place.lanes_log2) >= place.chunks {
        // SAFETY: the whole warp is here: its lanes have the same items and steps.
        store(at.item, unsafe { group_sum(sums.of, (1u32 << place.lanes_log2).min(WARP)) }, sums.extra);
        sums.of = [0.0; R];
        if let Some(next) = next {
            sums.extra = begin(next);
        }
    }
}

/// How a block comes by the activations.
pub(in crate::kernels) trait Source<F: Format> {
    /// The activations.
    type X: Operand<F>;
    /// What is loaded ahead of the wait for the grid that makes them.
    type Early;
    /// Whether `make` calls `meanwhile`.
    const MEANWHILE: bool;

    /// Loads what the grid ahead does not make.
    ///
    /// # Safety
    /// The whole block comes here and then to `make`; otherwise what the implementation asks for.
    unsafe fn early(&self) -> Self::Early;

    /// Makes them, behind the wait. `meanwhile` is called with a word that takes part of all loads so far, before what takes
    /// long and needs no memory.
    ///
    /// # Safety
    /// As for `early`.
    unsafe fn make(&self, early: Self::Early, meanwhile: impl FnOnce(u32)) -> Self::X;
}

/// For each of the warp's items the products of `R` rows, `S` chunks of each a step, given to `store` in every lane of
/// the group, with what `begin` gave for the item when it was begun: loads for `store`.
///
/// The first weights are under way before the wait for the grid ahead, and the second step's while the activations are
/// made, where that takes long.
///
/// The sums have the order of [`matvec`](super::matvec).
///
/// # Safety
/// - Every lane of the block is here, those of a warp with the same items; there is one at least, though not for every
///   warp. `rows` gives those of an item, which exist and have `place.chunks` chunks, as the activations have.
/// - What `source` asks for; the items and `place` allow of what `store` asks, which is called by all lanes of the warp
///   together, once an item.
/// - The grid before in the stream is the only one still running (programmatic dependent launch).
#[inline(always)]
pub(in crate::kernels) unsafe fn sweep<F: FormatHeld, A: Source<F>, E: Copy, const R: usize, const S: usize>(
    place: Lane,
    items: Items,
    rows: impl Fn(u32) -> [Row; R],
    source: &A,
    begin: impl Fn(u32) -> E,
    mut store: impl FnMut(u32, [f32; R], E),
) {
    // A warp without an item reads the last one's first weights: the activations may want all of the block.
    let first = rows(items.first.min(items.end - 1));
    let mut walk = Walk { at: Step { item: items.first, done: 0 }, rows: first };
    let mut at = walk.at;
    // SAFETY: the caller's promise; the rows have `place.chunks` chunks; each step is multiplied after it was loaded.
    unsafe {
        let mut held = place.hold_step::<F, R, S>(&first, 0);
        let early = source.early();
        pdl::grid_dependency_wait();
        pdl::launch_dependents();
        // A warp without an item has no second step.
        let mut second = None;
        let x = source.make(early, |loaded| {
            second = load_next::<F, R, S>(&mut walk, (place, items), &rows, word::<F, R, S>(&held) ^ loaded);
        });
        if items.first >= items.end {
            return;
        }
        let mut sums = Sums { extra: begin(items.first), of: [0.0; R] };
        // Two steps a turn, so that no register is copied: a copy would wait for the load. Where the second step is under way
        // already, a turn begins with products, and otherwise with a load.
        loop {
            if !A::MEANWHILE {
                second = load_next::<F, R, S>(&mut walk, (place, items), &rows, F::word(&held[S - 1][R - 1]));
            }
            let odd_at = walk.at;
            let next = second.is_some().then_some(odd_at.item);
            multiply::<F, A::X, E, R, S>(&mut sums, (place, x), (at, &held), next, &begin, &mut store);
            let Some(odd) = second else { return };
            let third = load_next::<F, R, S>(&mut walk, (place, items), &rows, F::word(&odd[S - 1][R - 1]));
            at = walk.at;
            let next = third.is_some().then_some(at.item);
            multiply::<F, A::X, E, R, S>(&mut sums, (place, x), (odd_at, &odd), next, &begin, &mut store);
            let Some(even) = third else { return };
            held = even;
            if A::MEANWHILE {
                second = load_next::<F, R, S>(&mut walk, (place, items), &rows, F::word(&held[S - 1][R - 1]));
            }
        }
    }
}
