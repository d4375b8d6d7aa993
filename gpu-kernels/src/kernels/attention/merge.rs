//! The end of attention over splits: joins them, applies the sink, and does what comes after.
//!
//! `out = Σ_s e^(m_s−m)·o_s / (Σ_s e^(m_s−m)·l_s + e^(sink−m))`, over the splits `s` that have keys.

use super::{Keys, weight};
use crate::kernels::quantize_q8::quantize4;
use bytemuck::{Pod, Zeroable};
use cuda_std::{pdl, prelude::*};

/// Lanes a block.
pub const THREADS: u32 = 256;
/// Elements of a head that a block takes, at most.
pub const BLOCK_ELEMS: u32 = 128;
/// Most splits of a row.
pub const MAX_SPLIT: u32 = 128;
/// Splits that a lane loads at once.
const ROUND: u32 = 8;
/// Bytes of shared memory: a weight a lane, which is more than there are splits and than a round goes past them; a word a
/// warp; and four elements a lane.
pub const SHARED_BYTES: u32 = (THREADS + THREADS / warp::WARP_SIZE + 4 * THREADS) * 4;

/// Lane `i`'s elements of the merged head, four from element `4·i` of the block's part on, while there are lanes for
/// them; the part starts at element `first_elem` and has `elems`.
///
/// The block's lanes form `4·THREADS / elems` groups, each of which adds up every so many splits, so that loads of
/// several are on their way; then the groups' sums are added in order.
///
/// # Safety
/// The whole block comes here, with [`SHARED_BYTES`] of shared memory; otherwise as [`attention_merge`], for head `head`
/// of all items'.
#[inline(always)]
unsafe fn merge(
    partial_out: *const f32,
    partial_max_sum: *const f32,
    sink: f32,
    keys: Keys,
    head: u32,
    (head_dim, first_elem, elems): (u32, u32, u32),
    n_split: u32,
) -> [f32; 4] {
    let weights = dynamic::<f32>(0);
    let scratch = weights.add(THREADS);
    let sums = scratch.add(THREADS / warp::WARP_SIZE).cast::<F32x4>();
    let (lane, live) = (thread::thread_idx_x(), keys.n_split());
    let first = head as usize * n_split as usize;
    let vecs = elems / 4;
    // SAFETY: the splits with keys are at most `n_split`, and that at most `MAX_SPLIT`, hence below `THREADS`.
    unsafe {
        let (group, vec) = math::div_rem(lane, vecs);
        let groups = math::div_rem(THREADS, vecs).0;
        let from = partial_out.add(first * head_dim as usize + first_elem as usize).cast::<F32x4>().add(vec as usize);
        // Splits past the end are the last one again, with no weight.
        let load = |split: u32| -> [[f32; 4]; ROUND as usize] {
            core::array::from_fn(|i| {
                let at = (split + i as u32 * groups).min(live - 1) as usize;
                ld(from.add(at * (head_dim / 4) as usize)).to_array()
            })
        };
        // The first round is on its way while the weights are found.
        let mut values = load(group);
        let mut mine = F32x2 { x: f32::NEG_INFINITY, y: 0.0 };
        if lane < live {
            mine = ld(partial_max_sum.cast::<F32x2>().add(first + lane as usize));
        }
        let max = math::max(block::reduce_max(scratch, mine.x), sink);
        let share = weight(mine.x, max);
        weights.set(lane, share); // 0 past the end
        // Its barriers also stand between the weights and their use.
        let sum = block::reduce_sum(scratch, share * mine.y) + weight(sink, max);

        let mut out = [0.0f32; 4];
        let mut split = group;
        loop {
            let mut i = 0;
            while i < ROUND {
                let at = split + i * groups;
                let w = weights.get(at);
                out = core::array::from_fn(|e| math::fma(w, values[i as usize][e], out[e]));
                i += 1;
            }
            split += ROUND * groups;
            if split >= live {
                break;
            }
            values = load(split);
        }
        sums.set(lane, F32x4::from_array(out));
        thread::sync_threads(); // every group's sums are written before they are added
        let mut out = [0.0f32; 4];
        if lane < vecs {
            let mut group = 0;
            while group < groups {
                let v = sums.get(group * vecs + lane).to_array();
                out = core::array::from_fn(|e| out[e] + v[e]);
                group += 1;
            }
        }
        let inverse = if sum > 0.0 { 1.0 / sum } else { 0.0 };
        out.map(|x| x * inverse)
    }
}

/// Scalars of [`attention_merge`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct MergeParams {
    /// Query heads of a row.
    pub n_head: u32,
    /// Dimensions of a head.
    pub head_dim: u32,
    /// Splits of a row that there is room for.
    pub n_split: u32,
    /// Keys a query sees, itself included; 0: all.
    pub window: u32,
}

/// Joins the splits of every head to `o`, and stores `out = o`, or with gates `out = o·σ(gate)`; also as
/// [`quantize_q8`](crate::kernels::quantize_q8) gives it, where that is asked for.
///
/// An empty sum gives 0. Launch: grid `[items·n_head, ceil(head_dim / BLOCK_ELEMS), 1]`, block [`THREADS`], shared
/// memory [`SHARED_BYTES`]. May be launched dependent.
///
/// # Safety
/// - `head_dim` is 64, 128 or 256, `n_split` 1 to [`MAX_SPLIT`].
/// - Partials, `pos`, `list` and `window` are those of [`attention_decode_d64`](super::decode::attention_decode_d64) or
///   [`attention_f32_d64_h1`](super::exact::attention_f32_d64_h1); `sinks` has `n_head` elements or is null.
/// - `pairs` is null or `[rows, n_head, 2, head_dim]`, the second of each pair the gate.
/// - The grid before in the stream is the only one still running (programmatic dependent launch); it writes nothing but
///   the partials, and to the caches.
/// - `out` is `[rows, n_head, head_dim]`; `qs` is null or has as many elements, `d` and `s` then a 16th of them.
///   They overlap nothing else. All but `sinks` are 16-byte aligned.
#[kernel(max_threads = 256)]
pub unsafe fn attention_merge(
    partial_out: *const f32,
    partial_max_sum: *const f32,
    pos: *const u32,
    list: *const u32,
    sinks: *const f32,
    pairs: *const f32,
    out: *mut f32,
    qs: *mut i8,
    d: *mut f32,
    s: *mut f32,
    p: MergeParams,
) {
    let item_head = thread::block_idx_x();
    // SAFETY: the head is below its count, so that is not zero; a lane alone writes its elements. What is read before the
    // wait is not the work of the grid ahead.
    unsafe {
        let (item, head_of_row) = math::div_rem(item_head, p.n_head);
        let row = if list.is_null() { item } else { ld(list.add(item as usize)) };
        let sink = if sinks.is_null() { f32::NEG_INFINITY } else { ld(sinks.add(head_of_row as usize)) };
        let keys = Keys::new(ld(pos.add(row as usize)), p.window, p.n_split);
        let (first_elem, elems) = (thread::block_idx_y() * BLOCK_ELEMS, p.head_dim.min(BLOCK_ELEMS));
        let head = row * p.n_head + head_of_row;
        let in_head = (first_elem + 4 * thread::thread_idx_x()).min(p.head_dim - 4) as usize;
        let gate = if pairs.is_null() {
            None
        } else {
            Some(ld(pairs.add((2 * head as usize + 1) * p.head_dim as usize + in_head).cast::<F32x4>()).to_array())
        };
        pdl::grid_dependency_wait();
        pdl::launch_dependents();

        let part = (p.head_dim, first_elem, elems);
        let mut merged = merge(partial_out, partial_max_sum, sink, keys, item_head, part, p.n_split);

        if thread::thread_idx_x() >= warp::WARP_SIZE {
            return; // a part has no more vectors than a warp has lanes; all of the warp is needed to quantise
        }
        let live = 4 * thread::thread_idx_x() < elems;
        let at = head as usize * p.head_dim as usize + in_head;
        if let Some(gate) = gate {
            merged = core::array::from_fn(|e| merged[e] * math::sigmoid(gate[e]));
        }
        if live {
            st(out.add(at).cast::<F32x4>(), F32x4::from_array(merged));
        }
        if !qs.is_null() {
            quantize4(merged, live, at, qs, d, s);
        }
    }
}
