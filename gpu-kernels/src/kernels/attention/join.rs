//! The end of a block of [`decode`](super::decode): its warps' softmaxes are joined.
//!
//! Where the keys of a row are one split, nothing else is missing, and the block does what [`merge`](super::merge) does
//! with several, to the bits that it gives of one.

use cuda_std::{cp_async, prelude::*};

use super::decode::{HEADS, PAD, Partial, THREADS, WARPS};
use super::output::{Output, closed};
use super::weight;

/// Where the results of blocks go.
#[derive(Clone, Copy)]
pub(super) struct Results {
    /// Open softmaxes, of several splits: `[items, n_head, n_split, head_dim]` and `[items, n_head, n_split, 2]`.
    pub(super) partial_out: *mut f32,
    pub(super) partial_max_sum: *mut f32,
    /// The heads, of one split.
    pub(super) output: Output,
}

/// What a block has made.
#[derive(Clone, Copy)]
pub(super) struct Done {
    /// Which of the launch's rows it is, and which of all rows.
    pub(super) item: u32,
    pub(super) row: u32,
    pub(super) first_head: u32,
    pub(super) heads: u32,
    /// Query heads of a row.
    pub(super) n_head: u32,
}

/// Vectors that a lane joins, at most: all of the heads' elements are dealt out, four to a lane.
const MAX_VECS: usize = (HEADS * 256 / 4 / THREADS) as usize;

impl<const K: usize> Partial<K> {
    /// Vectors of a head, and of the heads for each lane.
    const HEAD_VECS: u32 = 4 * K as u32;
    const LANE_VECS: u32 = HEADS * Self::HEAD_VECS / THREADS;

    /// Joins the warps' softmaxes and stores the result, as that of split `z` of the grid.
    ///
    /// # Safety
    /// The whole block comes here, with a ring for each warp in shared memory that it alone has used; the results have
    /// what `done` names.
    #[inline(always)]
    pub(super) unsafe fn join(&self, done: Done, to: &Results) {
        let (split, n_split) = (thread::block_idx_z(), thread::grid_dim_z());
        let (thread, warp, lane) = (thread::thread_idx_x(), thread::thread_idx_x() / warp::WARP_SIZE, warp::lane_id());
        let head_dim = 16 * K as u32;
        let row_elems = head_dim + PAD;
        let shared_out = dynamic::<f32>(0);
        let shared_max_sum = shared_out.add(WARPS * HEADS * row_elems).cast::<F32x2>();
        // The lane's vectors; past the heads there are, the last one's again.
        let vec = |i: u32| {
            let at = thread + i * THREADS;
            let head = at / Self::HEAD_VECS;
            (at % Self::HEAD_VECS, head.min(done.heads - 1), head < done.heads)
        };
        // Whether any of the warp's lanes has one.
        let some = |i: u32| warp * warp::WARP_SIZE + i * THREADS < done.heads * Self::HEAD_VECS;
        let whole = n_split == 1;
        // SAFETY: the caller's promise; a warp alone writes its part of shared memory, once all are done with their rings.
        unsafe {
            let mut gates = [None; MAX_VECS];
            let mut i = 0;
            while whole && i < Self::LANE_VECS && some(i) {
                let (vec, head, _) = vec(i);
                let head = done.row as usize * done.n_head as usize + (done.first_head + head) as usize;
                gates[i as usize] = to.output.gate(head, head_dim, 4 * vec);
                i += 1;
            }
            // A head's lanes add up.
            let mut sum = self.sum;
            sum += warp::shuffle_xor(sum, 1);
            sum += warp::shuffle_xor(sum, 2);

            cp_async::wait::<0>();
            thread::sync_threads(); // no warp uses its ring any more
            let mine = warp * HEADS + lane / 4;
            let mut k = 0;
            while k < K {
                let to = mine * row_elems + 16 * k as u32 + 2 * (lane % 4);
                let [a, b, c, d] = self.out[k];
                shared_out.cast::<F32x2>().set(to / 2, F32x2 { x: a, y: b });
                shared_out.cast::<F32x2>().set(to / 2 + 4, F32x2 { x: c, y: d });
                k += 1;
            }
            if lane % 4 == 0 {
                shared_max_sum.set(mine, F32x2 { x: self.max, y: sum });
            }
            thread::sync_threads(); // every warp's softmax is written before they are joined

            // Four elements a lane, warps in order.
            let mut i = 0;
            while i < Self::LANE_VECS && some(i) {
                let (vec, head, live) = vec(i);
                let of: [F32x2; WARPS as usize] = core::array::from_fn(|w| shared_max_sum.get(w as u32 * HEADS + head));
                let max = of.iter().fold(f32::NEG_INFINITY, |max, of| math::max(max, of.x));
                let (mut sum, mut out) = (0.0, [0.0f32; 4]);
                let mut w = 0;
                while w < WARPS {
                    let weight = weight(of[w as usize].x, max);
                    sum = math::fma(weight, of[w as usize].y, sum);
                    let v = shared_out.add((w * HEADS + head) * row_elems).cast::<F32x4>().get(vec).to_array();
                    out = core::array::from_fn(|e| math::fma(weight, v[e], out[e]));
                    w += 1;
                }
                let head = done.first_head + head;
                if whole {
                    let (inverse, kept) = closed((max, sum), to.output.sink(head));
                    let out = out.map(|x| math::fma(kept, x, 0.0) * inverse);
                    let head = done.row as usize * done.n_head as usize + head as usize;
                    to.output.store(out, gates[i as usize], live, head * head_dim as usize + 4 * vec as usize);
                } else if live {
                    let head = done.item as usize * done.n_head as usize + head as usize;
                    let at = head * n_split as usize + split as usize;
                    let out_of = to.partial_out.add(at * head_dim as usize).cast::<F32x4>();
                    st(out_of.add(vec as usize), F32x4::from_array(out));
                    if vec == 0 {
                        st(to.partial_max_sum.cast::<F32x2>().add(at), F32x2 { x: max, y: sum });
                    }
                }
                i += 1;
            }
        }
    }
}
