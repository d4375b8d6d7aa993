//! The end of attention over splits: joins them, applies the sink, and does what comes after.
//!
//! `out = Σ_s e^(m_s−m)·o_s / (Σ_s e^(m_s−m)·l_s + e^(sink−m))`, over the splits `s` that have keys.

use super::output::{Output, inverse};
use super::{Keys, weight};
use bytemuck::{Pod, Zeroable};
use cuda_std::{cp_async, opaque, pdl, prelude::*};

/// Lanes a block.
pub const THREADS: u32 = 256;
/// Elements of a head that a block takes, at most.
pub const BLOCK_ELEMS: u32 = 128;
/// Most splits of a row.
pub const MAX_SPLIT: u32 = 128;
/// Splits that a lane loads at once.
const ROUND: u32 = 8;
/// Splits that a lane finds the weight of.
const PAIRS: usize = (MAX_SPLIT / warp::WARP_SIZE) as usize;
/// Where the weights lie in shared memory: behind what each lane copies in a round.
const WEIGHTS: u32 = ROUND * THREADS * 16;
/// Bytes of shared memory: a round's vectors, and for each warp a weight a split.
pub const SHARED_BYTES: u32 = WEIGHTS + THREADS / warp::WARP_SIZE * MAX_SPLIT * 4;

/// Which of a head's splits and elements a lane adds up.
///
/// Of few splits the first warp takes all, and nobody waits for another. Of more, the block's lanes form groups, each of
/// which takes every so many splits, so that copies of several are on their way.
#[derive(Clone, Copy)]
struct Share {
    /// Splits with keys.
    live: u32,
    /// Whether the first warp takes all of them.
    few: bool,
    /// The lane's group.
    group: u32,
    /// Groups.
    groups: u32,
    /// The lane's vector of a head.
    vec: u32,
    /// Vectors of a head.
    head_vecs: u32,
}

impl Share {
    /// Of the part of `elems` elements from `first_elem` on, of heads with `head_dim`.
    #[inline(always)]
    fn new(live: u32, (head_dim, first_elem, elems): (u32, u32, u32)) -> Self {
        let (thread, vecs) = (thread::thread_idx_x(), elems / 4);
        let few = live <= ROUND;
        // A power of two, which the device divides by with a shift.
        let log2 = vecs.trailing_zeros();
        let (group, groups) = if few { (0, 1) } else { (thread >> log2, THREADS >> log2) };
        Self { live, few, group, groups, vec: first_elem / 4 + (thread & (vecs - 1)), head_vecs: head_dim / 4 }
    }

    /// The lane's vectors of the round from split `split` on. In place of splits past the end, the last one again.
    #[inline(always)]
    fn round(&self, split: u32) -> [u32; ROUND as usize] {
        core::array::from_fn(|i| (split + i as u32 * self.groups).min(self.live - 1) * self.head_vecs + self.vec)
    }
}

/// Finds the splits' weights, which go to `weights`, a word for each that there may be, and returns what divides their sum:
/// by each warp for itself, so that none waits for another.
///
/// # Safety
/// The whole warp comes here; a head's maxima and sums are at `max_sum`, `live` of them and at most [`MAX_SPLIT`].
#[inline(always)]
unsafe fn find_weights(max_sum: *const F32x2, sink: f32, live: u32, weights: Shared<f32>) -> f32 {
    let lane = warp::lane_id();
    let mut of = [F32x2 { x: f32::NEG_INFINITY, y: 0.0 }; PAIRS];
    // SAFETY: the caller's promise.
    unsafe {
        let mut k = 0;
        while k < PAIRS {
            let split = lane + k as u32 * warp::WARP_SIZE;
            if split < live {
                of[k] = ld(max_sum.add(split as usize));
            }
            k += 1;
        }
        let max = of.iter().fold(f32::NEG_INFINITY, |max, of| math::max(max, of.x));
        let max = math::max(warp::max(max), sink);
        let mut sum = 0.0;
        let mut k = 0;
        while k < PAIRS {
            let weight = weight(of[k].x, max); // 0 past the end
            weights.set(lane + k as u32 * warp::WARP_SIZE, weight);
            sum = math::fma(weight, of[k].y, sum);
            k += 1;
        }
        let sum = warp::sum(sum) + weight(sink, max);
        warp::sync_warp(warp::FULL_MASK); // the weights are written before they are read
        sum
    }
}

/// In the block's first warp, the lane's four elements of the merged head; the others get nothing. Groups' sums are added
/// in order.
///
/// # Safety
/// The whole block comes here, or where the share is of few splits its first warp, with [`SHARED_BYTES`] of shared memory;
/// `first` is the share's first round, and `out` and `max_sum` are the head's partials.
#[inline(always)]
unsafe fn merge(
    out: *const F32x4,
    max_sum: *const F32x2,
    sink: f32,
    share: Share,
    first: [u32; ROUND as usize],
) -> Option<[f32; 4]> {
    let (thread, warp) = (thread::thread_idx_x(), thread::thread_idx_x() / warp::WARP_SIZE);
    let weights = dynamic::<f32>(WEIGHTS).add(warp * MAX_SPLIT);
    let mine = dynamic::<F32x4>(0).add(thread);
    // SAFETY: the caller's promise; a lane alone has its places until the barrier.
    unsafe {
        let copy = |round: [u32; ROUND as usize]| {
            for i in 0..ROUND {
                cp_async::copy_16(mine, i * THREADS, out.add(round[i as usize] as usize));
            }
            cp_async::commit();
        };
        copy(first);
        // Never, for there is a key. Left to itself the assembler starts the copies behind the weights, where registers are
        // free again, but not across a branch.
        if share.live == 0 {
            return None;
        }
        let sum = find_weights(max_sum, sink, share.live, weights);

        let mut merged = [0.0f32; 4];
        let mut split = share.group;
        loop {
            cp_async::wait::<0>();
            let mut i = 0;
            while i < ROUND {
                let at = split + i * share.groups;
                let weight = if at < share.live { weights.get(at) } else { 0.0 };
                let v = mine.get(i * THREADS).to_array();
                merged = core::array::from_fn(|e| math::fma(weight, v[e], merged[e]));
                i += 1;
            }
            split += ROUND * share.groups;
            if split >= share.live {
                break;
            }
            copy(share.round(split));
        }
        if !share.few {
            mine.set(0, F32x4::from_array(merged));
            thread::sync_threads(); // every group's sums are written before they are added
            if warp > 0 {
                return None;
            }
            merged = [0.0; 4];
            let mut group = 0;
            while group < share.groups {
                let v = dynamic::<F32x4>(0).get(group * (THREADS / share.groups) + thread).to_array();
                merged = core::array::from_fn(|e| merged[e] + v[e]);
                group += 1;
            }
        }
        let inverse = inverse(sum);
        Some(merged.map(|x| x * inverse))
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
    let output = Output { sinks, pairs, out, qs, d, s };
    // SAFETY: the head is below its count, so that is not zero; a lane alone writes its elements. What is read before the
    // wait is not the work of the grid ahead.
    unsafe {
        let (item, head_of_row) = math::div_rem(item_head, p.n_head);
        let row = if list.is_null() { item } else { ld(list.add(item as usize)) };
        let sink = output.sink(head_of_row);
        let keys = Keys::new(ld(pos.add(row as usize)), p.window, p.n_split);
        let (first_elem, elems) = (thread::block_idx_y() * BLOCK_ELEMS, p.head_dim.min(BLOCK_ELEMS));
        let head = row * p.n_head + head_of_row;
        let in_head = (first_elem + 4 * thread::thread_idx_x()).min(p.head_dim - 4);
        let gate = output.gate(head as usize, p.head_dim, in_head);
        // All that does not hang on the grid ahead is known before its end.
        let share = Share::new(opaque(keys.n_split()), (p.head_dim, first_elem, elems));
        if share.few && thread::thread_idx_x() >= warp::WARP_SIZE {
            return;
        }
        let first = share.round(share.group).map(opaque);
        let splits = item_head as usize * p.n_split as usize;
        let out_of = partial_out.add(splits * p.head_dim as usize).cast::<F32x4>();
        let max_sum_of = partial_max_sum.cast::<F32x2>().add(splits);
        pdl::grid_dependency_wait();
        pdl::launch_dependents();

        // A part has no more vectors than a warp has lanes; all of the warp is needed to quantise.
        let Some(merged) = merge(out_of, max_sum_of, sink, share, first) else {
            return;
        };
        let live = 4 * thread::thread_idx_x() < elems;
        output.store(merged, gate, live, head as usize * p.head_dim as usize + in_head as usize);
    }
}
