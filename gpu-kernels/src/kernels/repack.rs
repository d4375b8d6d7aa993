//! File blocks to device planes ([`crate::layout`]): every byte to its place, none changed.
//!
//! The host copies a tensor's bytes as they are in the file; this splits them up at the GPU's memory
//! speed. A lane moves one unit, two bytes (one for MXFP4, whose blocks have an odd size), and
//! neighbouring lanes read neighbouring units.

use cuda_std::{pdl, prelude::*};

use super::format::{self, Format};
use crate::layout::{Plane, planes};
use crate::params::RepackParams;

/// One lane: unit `i` of the source, where a block has `Self::TYPE.block_bytes() / size_of::<U>()`.
///
/// # Safety
/// As [`repack_q8_0`], for the type.
#[inline(always)]
unsafe fn repack<F: Format, U: Pod>(raw: *const u8, w: *mut u8, p: &RepackParams) {
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let units = (F::TYPE.block_bytes() / size_of::<U>()) as u64;
    let i = u64::from(thread::block_idx_x()) * u64::from(thread::block_dim_x()) + u64::from(thread::thread_idx_x());
    let (block, field) = (i / units, (i % units) as usize * size_of::<U>());
    if block >= p.n_blocks {
        return;
    }
    // SAFETY: the source has the unit, and the plane that its field belongs to has a place for it.
    unsafe {
        let value: U = ld(raw.cast::<U>().add(i as usize));
        let table = const { planes(F::TYPE) };
        for (plane, &Plane { field: start, bytes }) in table.iter().enumerate() {
            if (start..start + bytes).contains(&field) {
                let at = p.planes[plane] + (p.first_block + block) * bytes as u64 + (field - start) as u64;
                st(w.add(at as usize).cast::<U>(), value);
            }
        }
    }
}

macro_rules! entries {
    ($($ty:ident, $unit:ty: $name:ident;)+) => {$(
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
            repack::<format::$ty, $unit>(raw, w, &p);
        }
    )+};
}

entries! {
    Q4K, u16: repack_q4_k;
    Q5K, u16: repack_q5_k;
    Q6K, u16: repack_q6_k;
    Q8_0, u16: repack_q8_0;
    Q4_0, u16: repack_q4_0;
    Q4_1, u16: repack_q4_1;
    Q5_0, u16: repack_q5_0;
    Q5_1, u16: repack_q5_1;
    Mxfp4, u8: repack_mxfp4;
}
