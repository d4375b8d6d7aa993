//! Tokens that the step before chose, to their rows; and the rows' positions, one further.
//!
//! A decode step differs from the one before in its tokens, which are on the device, and in positions that are one
//! larger. So a step whose metadata is otherwise the same needs nothing from the host.

use cuda_std::{pdl, prelude::*};

/// Lanes of the one block.
pub const THREADS: u32 = 256;

/// Marks a row that keeps the token it has.
pub const NOT_FED: u32 = u32::MAX;

/// `tokens[r] = chosen[fed[r]]` for every row that is fed. Then, unless `fresh` is set, `pos[r] += 1` and
/// `start[s] += 1`; `fresh` is cleared.
///
/// Launch: one block of [`THREADS`] lanes; dependent launch allowed.
///
/// # Safety
/// `tokens`, `pos` and `fed` have `rows` elements, `start` `spans`, `fresh` one; `chosen` is longer than every element
/// of `fed` but [`NOT_FED`]; none overlaps another.
#[kernel(max_threads = 256)]
pub unsafe fn feed(
    tokens: *mut u32,
    pos: *mut u32,
    start: *mut u32,
    fed: *const u32,
    fresh: *mut u32,
    chosen: *const u32,
    rows: u32,
    spans: u32,
) {
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let lane = thread::thread_idx_x();
    // SAFETY: rows and spans are below their counts, fed outputs below that of the chosen tokens.
    unsafe {
        let step = if ld(fresh) == 0 { 1 } else { 0 };
        thread::sync_threads(); // everybody has seen it before it is cleared
        if lane == 0 {
            st(fresh, 0);
        }
        let mut r = lane;
        while r < rows {
            let from = ld(fed.add(r as usize));
            if from != NOT_FED {
                st(tokens.add(r as usize), ld(chosen.add(from as usize)));
            }
            st(pos.add(r as usize), ld(pos.add(r as usize)) + step);
            r += THREADS;
        }
        let mut s = lane;
        while s < spans {
            st(start.add(s as usize), ld(start.add(s as usize)) + step);
            s += THREADS;
        }
    }
}
