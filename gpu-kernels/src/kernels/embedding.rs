//! Row gather: `y[t, :] = w[tokens[t], :]` in f32, for every weight type.
//!
//! The values are those that the type's definition gives in f32 arithmetic, bit for bit.

use cuda_std::{pdl, prelude::*};

use super::format::{self, Format, Row};
use crate::params::EmbeddingParams;

/// Stores quad `I` of a chunk at `y`, where its first run starts, if the format's chunk has so many.
///
/// # Safety
/// `y` has the chunk's elements.
#[inline(always)]
unsafe fn store_quad<F: Format, const I: u32>(y: *mut f32, raw: &F::Raw, phase: u32) {
    if 4 * I < F::CHUNK_ELEMS {
        // SAFETY: the caller's promise; rows and runs are multiples of four elements.
        unsafe { st(y.add(F::quad_offset(I) as usize).cast(), F32x4::from_array(F::quad::<I>(raw, phase))) };
    }
}

/// One lane: one chunk of one row.
///
/// # Safety
/// As [`embedding_q8_0`], for the format.
#[inline(always)]
unsafe fn embedding<F: Format>(w: *const u8, tokens: *const u32, y: *mut f32, p: &EmbeddingParams) {
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let (chunk, t) = (thread::index_1d(), thread::block_idx_y());
    if chunk >= p.chunks {
        return;
    }
    // SAFETY: the launcher has checked the shapes; a bad token becomes the last row.
    unsafe {
        let token = ld(tokens.add(t as usize)).min(p.rows - 1);
        let row = Row::new::<F>(w, &p.planes, u64::from(token), p.chunks);
        let raw = F::load(&row, chunk);
        let y = y.add(t as usize * p.y_stride as usize + F::start(chunk) as usize);
        let phase = chunk % F::BLOCK_CHUNKS;
        store_quad::<F, 0>(y, &raw, phase);
        store_quad::<F, 1>(y, &raw, phase);
        store_quad::<F, 2>(y, &raw, phase);
        store_quad::<F, 3>(y, &raw, phase);
        store_quad::<F, 4>(y, &raw, phase);
        store_quad::<F, 5>(y, &raw, phase);
        store_quad::<F, 6>(y, &raw, phase);
        store_quad::<F, 7>(y, &raw, phase);
    }
}

macro_rules! entries {
    ($($ty:ident: $name:ident;)+) => {$(
        #[doc = concat!("[`embedding`](self) from a table of [`", stringify!($ty), "`](format::", stringify!($ty), ").")]
        ///
        /// `w: [rows, cols]` planar; `tokens: [n]`; `y: [n, y_stride]`.
        /// Grid: `(⌈p.chunks / FLAT_BLOCK⌉, n)`, blocks of `FLAT_BLOCK` lanes.
        ///
        /// # Safety
        /// - `w` points to the whole tensor, 16-byte aligned, with `p.planes` its plane offsets; nobody writes it.
        /// - `y` and its stride are 16-byte aligned; `y` has a row of `cols` elements, `p.chunks` chunks' worth, for
        ///   every token and overlaps nothing else.
        #[kernel(max_threads = 256)]
        pub unsafe fn $name(w: *const u8, tokens: *const u32, y: *mut f32, p: EmbeddingParams) {
            embedding::<format::$ty>(w, tokens, y, &p);
        }
    )+};
}

entries! {
    Q4K: embedding_q4_k;
    Q5K: embedding_q5_k;
    Q6K: embedding_q6_k;
    Q8_0: embedding_q8_0;
    Q4_0: embedding_q4_0;
    Q4_1: embedding_q4_1;
    Q5_0: embedding_q5_0;
    Q5_1: embedding_q5_1;
    Mxfp4: embedding_mxfp4;
    F16: embedding_f16;
    Bf16: embedding_bf16;
    F32: embedding_f32;
}
