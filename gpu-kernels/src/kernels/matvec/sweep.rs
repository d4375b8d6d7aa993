//! Many rows a lane, with the next step's weights in flight while one is multiplied.
//!
//! A grid that fits the device at once, whose lanes go from row to row: what a block does before its first product,
//! such as a norm, is then done once a multiprocessor, and the memory is not idle between two rows.

use super::{Lane, Operand, group_sum};
use crate::kernels::format::{self, FormatHeld, Row};
use crate::params::WARP;

/// Which items a warp takes: `first`, and every `stride`-th after it that is below `end`.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Items {
    pub(in crate::kernels) first: u32,
    pub(in crate::kernels) stride: u32,
    pub(in crate::kernels) end: u32,
}

/// Where a lane is, and the sums of its item so far.
struct Walk<E, const R: usize> {
    item: u32,
    /// What `begin` gave for it.
    extra: E,
    /// Chunks of the item's rows that are multiplied.
    done: u32,
    /// The rows that are loaded from.
    rows: [Row; R],
    sums: [f32; R],
}

/// Starts to load the next step's weights and multiplies those of this step, `held`. The next step's, if there is one.
///
/// # Safety
/// As [`sweep`]; `held` are the weights at `walk`, which is below `items.end`.
#[inline(always)]
unsafe fn step<F: FormatHeld, X: Operand<F>, E: Copy, const R: usize, const S: usize>(
    walk: &mut Walk<E, R>,
    (place, items, x): (Lane, Items, X),
    rows: &impl Fn(u32) -> [Row; R],
    begin: &impl Fn(u32) -> E,
    store: &mut impl FnMut(u32, [f32; R], E),
    held: &[[F::Held; R]; S],
) -> Option<[[F::Held; R]; S]> {
    let (start, phase) = (F::start(place.lane), place.lane % F::BLOCK_CHUNKS);
    let (item, done, step) = (walk.item, walk.done, (S as u32) << place.lanes_log2);
    let ends = done + step >= place.chunks;
    (walk.item, walk.done) = if ends { (item + items.stride, 0) } else { (item, done + step) };
    // Whether there is more to load is known only once this step's weights are there: a lane waits for all of its loads
    // at once, and would wait for the next step's, too.
    walk.item = format::after(F::word(&held[S - 1][R - 1]), place.chunks >> 31, walk.item);
    let next = if walk.item < items.end {
        if ends {
            walk.rows = rows(walk.item);
        }
        // SAFETY: the rows have `place.chunks` chunks.
        Some(unsafe { place.hold_step::<F, R, S>(&walk.rows, walk.done) })
    } else {
        None
    };
    for s in 0..S {
        let ahead = done + ((s as u32) << place.lanes_log2);
        let live = place.lane + ahead < place.chunks;
        let at = format::select(live, start + ahead * F::CHUNK_ELEMS, 0);
        // SAFETY: a live chunk exists in `x` as in the weights, and chunk 0 does in any case.
        let chunk = unsafe { x.load(at, live) };
        for r in 0..R {
            // SAFETY: the whole warp is here; a block's lanes have the same rows and steps.
            let raw = unsafe { F::gather(&held[s][r], phase) };
            walk.sums[r] += X::dot(&raw, &chunk, phase);
        }
    }
    if ends {
        // SAFETY: the whole warp is here: its lanes have the same items and steps.
        store(item, unsafe { group_sum(walk.sums, (1u32 << place.lanes_log2).min(WARP)) }, walk.extra);
        walk.sums = [0.0; R];
        if next.is_some() {
            walk.extra = begin(walk.item);
        }
    }
    next
}

/// For each of the warp's items the products of `R` rows, `S` chunks of each a step, given to `store` in every lane of
/// the group, with what `begin` gave for the item when it was begun: loads for `store`. `ready` makes the activations once
/// the first weights are under way.
///
/// The sums have the order of [`matvec`](super::matvec).
///
/// # Safety
/// - Every lane of the warp is here, with the same items; there is one at least, though not for every warp. `rows` gives
///   those of an item, which exist and have `place.chunks` chunks, as the activations have.
/// - The items and `place` allow of what `ready` and `store` ask: the one is called once by every lane, the other by
///   all lanes of the warp together, once an item.
#[inline(always)]
pub(in crate::kernels) unsafe fn sweep<F: FormatHeld, X: Operand<F>, E: Copy, const R: usize, const S: usize>(
    place: Lane,
    items: Items,
    rows: impl Fn(u32) -> [Row; R],
    ready: impl FnOnce() -> X,
    begin: impl Fn(u32) -> E,
    mut store: impl FnMut(u32, [f32; R], E),
) {
    // A warp without an item reads the last one's first weights: `ready` may want all of the block.
    let first = rows(items.first.min(items.end - 1));
    // SAFETY: the rows have `place.chunks` chunks.
    let mut even = unsafe { place.hold_step::<F, R, S>(&first, 0) };
    let with = (place, items, ready());
    if items.first >= items.end {
        return;
    }
    let mut walk = Walk { item: items.first, extra: begin(items.first), done: 0, rows: first, sums: [0.0; R] };
    // Two steps a turn, so that no register is copied: a copy would wait for the load.
    // SAFETY: the caller's promise; each step is multiplied after it was loaded.
    unsafe {
        while let Some(odd) = step::<F, X, E, R, S>(&mut walk, with, &rows, &begin, &mut store, &even) {
            let Some(next) = step::<F, X, E, R, S>(&mut walk, with, &rows, &begin, &mut store, &odd) else { return };
            even = next;
        }
    }
}
