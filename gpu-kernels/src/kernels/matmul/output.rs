//! Storing a tile.

use cuda_std::prelude::*;

use super::MatmulParams;
use super::product::{Place, Sums};
use super::stage::Geometry;
use super::tile::{Part, Target};
use crate::params::WARP;

/// Adds up what the warps along the columns have, and stores the tile.
///
/// # Safety
/// As [`matmul`](super::tile::matmul).
#[inline(always)]
pub(super) unsafe fn finish<G: Geometry, const MT: usize, const NT: usize>(
    to: &Target,
    p: &MatmulParams,
    part: &Part,
    at: Place,
    sums: &Sums<MT, NT>,
) {
    let k_warps = const { G::WARPS[2] };
    let first_row = thread::block_idx_y() * G::TILE.rows + at.row;
    let (g, t) = (at.lane / 4, at.lane % 4);
    // SAFETY: the caller's promise; the partial sums take 16·NT bytes a lane, less than a stage.
    unsafe {
        if k_warps == 1 {
            for n in 0..NT {
                for j in 0..2 {
                    let out = Out::new(to, p, part, first_row + g, at.token + 8 * n as u32 + 2 * t + j);
                    for m in 0..MT {
                        out.store(p, 16 * m as u32, sums[m][n][j as usize]);
                        out.store(p, 16 * m as u32 + 8, sums[m][n][j as usize + 2]);
                    }
                }
            }
            return;
        }
        // `[warp along k, value, other warps and lanes]`
        const { assert!(G::WARPS[2] == 1 || (MT == 1 && G::WARPS[1] == 1)) };
        let values = 4 * NT as u32;
        let others = const { G::TILE.threads / G::WARPS[2] };
        let partial = dynamic::<f32>(0).add(at.row / 16 * WARP + at.lane);
        block::sync_threads(); // everybody is done with the stages
        for n in 0..NT {
            for j in 0..4 {
                partial.set((at.k * values + 4 * n as u32 + j) * others, sums[0][n][j as usize]);
            }
        }
        block::sync_threads(); // all partial sums are there
        // The warps share the values; each adds in the order of the columns.
        let mut value = at.k;
        while value < values {
            let mut sum = 0.0;
            for k in 0..k_warps {
                sum += partial.get((k * values + value) * others);
            }
            let (n, j) = (value / 4, value % 4);
            Out::new(to, p, part, first_row + g, at.token + 8 * n + 2 * t + j % 2).store(p, 8 * (j / 2), sum);
            value += k_warps;
        }
    }
}

/// Where a lane's sums of one token go.
pub(super) struct Out {
    y: *mut f32,
    /// Null without a bias.
    bias: *const f32,
    /// Rows from here to the matrix's end; none for a token past the tile's.
    rows: u32,
}

impl Out {
    /// For the matrix's row `row` and those after it, and the tile's token `token`.
    ///
    /// # Safety
    /// As [`matmul`](super::tile::matmul).
    #[inline(always)]
    pub(super) unsafe fn new(to: &Target, p: &MatmulParams, part: &Part, row: u32, token: u32) -> Self {
        let rows = if token < part.n && row < p.rows { p.rows - row } else { 0 };
        // SAFETY: the caller's promise; a place past the end is formed, but not used.
        unsafe {
            let at = part.route(to, token) as usize * p.y_stride as usize + row as usize;
            let bias = part.expert as usize * p.rows as usize + row as usize;
            Out {
                y: to.y.wrapping_add(at),
                bias: if to.bias.is_null() { to.bias } else { to.bias.wrapping_add(bias) },
                rows,
            }
        }
    }

    /// Stores the sum of the row `further` on, if there is one.
    ///
    /// # Safety
    /// As [`matmul`](super::tile::matmul).
    #[inline(always)]
    pub(super) unsafe fn store(&self, p: &MatmulParams, further: u32, sum: f32) {
        if further >= self.rows {
            return;
        }
        // SAFETY: the row exists.
        unsafe {
            let y = self.y.add(further as usize);
            let mut sum = sum;
            // What is there comes before the bias, as where that is added by a kernel of its own.
            if p.accumulate != 0 {
                sum += ld(y);
            }
            if !self.bias.is_null() {
                sum += ld(self.bias.add(further as usize));
            }
            st(y, sum);
        }
    }
}
