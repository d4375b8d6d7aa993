//! Activations as bf16, in the order in which products of warpgroups take them.
//!
//! Of each 16 consecutive elements of a row, those of columns `4t`, `4t + 2`, `4t + 1` and `4t + 3` come to places `2t`,
//! `2t + 1`, `2t + 8` and `2t + 9`: see [`format`](crate::kernels::format).

use bytemuck::{Pod, Zeroable};
use cuda_std::{pdl, prelude::*};

use crate::params::FLAT_BLOCK;

/// Elements that a lane takes.
pub const LANE_ELEMS: u32 = 4;

/// Parameters of [`to_bf16`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct ToBf16Params {
    /// Elements of a row, a multiple of 16.
    pub cols: u32,
    /// Elements from one row of `x` to the next, a multiple of 4.
    pub x_stride: u32,
}

/// Rounds `x: [rows, x_stride]`, `cols` elements of each row, to `y: [rows, cols]`, two to a word.
///
/// Grid: `(⌈cols / (LANE_ELEMS·FLAT_BLOCK)⌉, rows)`, blocks of `FLAT_BLOCK` lanes.
///
/// # Safety
/// `p.cols` is a multiple of 16, `p.x_stride` of 4; `x` is 16-byte aligned; the arrays have the shapes above for the
/// grid's rows and are apart.
#[kernel(max_threads = 256)]
pub unsafe fn to_bf16(x: *const f32, y: *mut u32, p: ToBf16Params) {
    const { assert!(FLAT_BLOCK <= 256) };
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let (row, column) = (thread::block_idx_y() as usize, thread::index_1d() * LANE_ELEMS);
    if column < p.cols {
        let x: F32x4 = ld(x.add(row * p.x_stride as usize + column as usize).cast());
        store4(x.to_array(), row * p.cols as usize + column as usize, y);
    }
}

/// Stores four elements, whose first is number `at`, a multiple of 4, of all rows of `y`.
///
/// # Safety
/// `y` has them; its rows are a multiple of 16 long.
#[inline(always)]
pub(crate) unsafe fn store4(x: [f32; 4], at: usize, y: *mut u32) {
    let word = at / 16 * 8 + at % 16 / 4;
    // SAFETY: the caller's promise.
    unsafe {
        st(y.add(word), convert::pack_bf16x2(x[0], x[2]));
        st(y.add(word + 4), convert::pack_bf16x2(x[1], x[3]));
    }
}
