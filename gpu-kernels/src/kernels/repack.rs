//! File blocks to device planes ([`crate::layout`]): every byte to its place, none changed; in Q5_K every bit.
//!
//! The host copies a tensor's bytes as they are in the file; this splits them up at the GPU's memory
//! speed. A lane moves one unit, two bytes (one for MXFP4, whose blocks have an odd size), and
//! neighbouring lanes read neighbouring units, or for Q5_K write them.

use cuda_std::{pdl, prelude::*};

use super::format::{self, Format, Q5K, pack_q5_k};
use crate::layout::{CHUNK_BYTES, Plane, planes};
use crate::params::RepackParams;

/// One lane: unit `i` of the source, where a block has `Self::TYPE.block_bytes() / size_of::<U>()`.
///
/// # Safety
/// As [`repack_q8_0`], for the type.
#[inline(always)]
unsafe fn repack<F: Format, U: Pod>(raw: *const u8, w: *mut u8, p: &RepackParams) {
    let Some((block, field)) = unit::<F, U>(p) else { return };
    let table = const { planes(F::TYPE) };
    // SAFETY: the source has the unit, and the plane that its field belongs to has a place for it.
    unsafe {
        let value: U = ld(raw.add(block as usize * F::TYPE.block_bytes() + field).cast());
        for (plane, &Plane { field: start, bytes }) in table.iter().enumerate() {
            if (start..start + bytes).contains(&field) {
                let at = p.planes[plane] + (p.first_block + block) * bytes as u64 + (field - start) as u64;
                st(w.add(at as usize).cast::<U>(), value);
            }
        }
    }
}

/// The block and the byte of it where the lane's unit begins, if there is one, when the grid ahead has ended.
#[inline(always)]
fn unit<F: Format, U>(p: &RepackParams) -> Option<(u64, usize)> {
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let units = (F::TYPE.block_bytes() / size_of::<U>()) as u64;
    let i = u64::from(thread::block_idx_x()) * u64::from(thread::block_dim_x()) + u64::from(thread::thread_idx_x());
    let (block, field) = (i / units, (i % units) as usize * size_of::<U>());
    (block < p.n_blocks).then_some((block, field))
}

/// One lane of Q5_K: two bytes of a block's planes, which lie after each other here, from the file's that have their bits.
///
/// # Safety
/// As [`repack_q5_k`].
#[inline(always)]
unsafe fn repack_q5_k_unit(raw: *const u8, w: *mut u8, p: &RepackParams) {
    let Some((block, at)) = unit::<Q5K, u16>(p) else { return };
    let [chunks, rests, head] = const {
        let table = planes(Q5K::TYPE);
        [table[0], table[1], table[2]]
    };
    // SAFETY: the source has the block, and the planes have places for it.
    unsafe {
        let raw = raw.add(block as usize * Q5K::TYPE.block_bytes());
        let two = |byte: usize| u32::from(ld(raw.add(byte).cast::<u16>()));
        // Bytes `byte` and the next of word `i` of chunk `chunk`.
        let packed = |chunk: usize, i: usize, byte: usize| {
            let qs = two(chunks.field + chunk * CHUNK_BYTES as usize + 4 * i + byte);
            let qh = two(rests.field + chunk % 2 * CHUNK_BYTES as usize + 4 * i + byte);
            pack_q5_k(qs, qh, chunk as u32 / 2, i as u32)
        };
        let (plane, bytes, at, value) = if at < chunks.bytes {
            let in_chunk = at % CHUNK_BYTES as usize;
            (0, chunks.bytes, at, packed(at / CHUNK_BYTES as usize, in_chunk / 4, in_chunk % 4)[0])
        } else if at < chunks.bytes + rests.bytes {
            let at = at - chunks.bytes;
            let mut word = 0;
            let mut i = 0;
            while i < 4 {
                word |= packed(at / 4, i, at % 4)[1];
                i += 1;
            }
            (1, rests.bytes, at, word)
        } else {
            let at = at - chunks.bytes - rests.bytes;
            (2, head.bytes, at, two(head.field + at))
        };
        let to = p.planes[plane] + (p.first_block + block) * bytes as u64 + at as u64;
        st(w.add(to as usize).cast::<u16>(), value as u16);
    }
}

macro_rules! entries {
    ($($ty:ident, $unit:ty, $lane:expr => $name:ident;)+) => {$(
        #[doc = concat!("[`repack`](self) for [`", stringify!($ty), "`](format::", stringify!($ty), "): blocks")]
        /// `raw: [n_blocks]` as in the file become blocks `first_block..` of the planar tensor `w`.
        #[doc = concat!("Grid: one lane a `", stringify!($unit), "` of `raw`, blocks of `FLAT_BLOCK` lanes.")]
        ///
        /// # Safety
        /// - `raw` is aligned for the unit and has `p.n_blocks` blocks.
        /// - `w` is the whole tensor, 256-byte aligned, with `p.planes` its plane offsets; it has
        ///   `p.first_block + p.n_blocks` blocks or more. `raw` and `w` do not overlap.
        #[kernel(max_threads = 256)]
        pub unsafe fn $name(raw: *const u8, w: *mut u8, p: RepackParams) {
            $lane(raw, w, &p);
        }
    )+};
}

entries! {
    Q4K, u16, repack::<format::Q4K, u16> => repack_q4_k;
    Q5K, u16, repack_q5_k_unit => repack_q5_k;
    Q6K, u16, repack::<format::Q6K, u16> => repack_q6_k;
    Q8_0, u16, repack::<format::Q8_0, u16> => repack_q8_0;
    Q4_0, u16, repack::<format::Q4_0, u16> => repack_q4_0;
    Q4_1, u16, repack::<format::Q4_1, u16> => repack_q4_1;
    Q5_0, u16, repack::<format::Q5_0, u16> => repack_q5_0;
    Q5_1, u16, repack::<format::Q5_1, u16> => repack_q5_1;
    Mxfp4, u8, repack::<format::Mxfp4, u8> => repack_mxfp4;
}
