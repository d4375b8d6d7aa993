//! Reads memory and does nearly nothing with it: what the others' speed is measured against.

use cuda_std::prelude::*;

use crate::params::{READ_SWEEP_BLOCK, READ_SWEEP_LOADS};

/// Reads `n` 16-byte words of `x`, eight in flight a lane, and writes the XOR of each block's to `sums`.
///
/// Grid: `⌈n / (READ_SWEEP_BLOCK·READ_SWEEP_LOADS)⌉` blocks of `READ_SWEEP_BLOCK` lanes.
///
/// # Safety
/// `x` has `n` ≥ 1 words, 16-byte aligned; `sums` has a word for every warp of the grid.
#[kernel(max_threads = 256)]
pub unsafe fn read_sweep(x: *const U32x4, sums: *mut u32, n: u32) {
    let first = thread::block_idx_x() * (READ_SWEEP_BLOCK * READ_SWEEP_LOADS) + thread::thread_idx_x();
    let words: [U32x4; READ_SWEEP_LOADS as usize] =
        core::array::from_fn(|i| mem::ld_cs(x.add((first + i as u32 * READ_SWEEP_BLOCK).min(n - 1) as usize)));
    let mut sum = 0;
    for word in words {
        sum ^= word.x ^ word.y ^ word.z ^ word.w;
    }
    let sum = warp::reduce(sum, |a, b| a ^ b);
    if warp::lane_id() == 0 {
        st(sums.add((thread::index_1d() / warp::WARP_SIZE) as usize), sum);
    }
}
