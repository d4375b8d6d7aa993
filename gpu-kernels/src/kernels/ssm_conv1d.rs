//! Depthwise causal convolution of a gated delta net, with its rolling state.
//!
//! `out[p, c] = SiLU(Σ_j w[c, j]·x[p − 3 + j, c])` at position `p`, inputs before position 0 being zero.
//!
//! What a later batch needs of this one is kept in a ring of [`RING`] rows, `[slot][RING][channel]`: the input at
//! position `p` is row `p mod RING`. Nothing is moved when a token comes, so a block that reads old inputs and
//! another one that writes the new input of the same channel do not meet; and a sequence can go back by as many
//! tokens as the ring has rows to spare.
//!
//! Source: Yang et al., Gated Delta Networks (2024).

use cuda_std::prelude::*;

use crate::kernels::spans::Spans;

/// Lanes a block; a lane takes four channels.
pub const THREADS: u32 = 128;
/// Rows that a lane walks through. A tile reads the 3 rows before it again, which are in the cache by then.
pub const TILE_ROWS: u32 = 16;
/// Taps.
pub const TAPS: u32 = 4;
/// Rows of the ring, a power of two.
pub const RING: u32 = 8;

/// Rows whose loads are under way together.
const AHEAD: usize = 4;

/// Four channels' taps: `[channel][tap]`.
pub(crate) type Taps = [[f32; 4]; 4];

/// The taps of channels `4·vector ..`.
///
/// # Safety
/// They are in `w`, `[channels, 4]`, 16-byte aligned.
#[inline(always)]
pub(crate) unsafe fn load_taps(w: *const f32, vector: usize) -> Taps {
    let mut taps = [[0.0; 4]; 4];
    let mut c = 0;
    while c < 4 {
        // SAFETY: the caller's promise.
        taps[c] = unsafe { ld(w.cast::<F32x4>().add(4 * vector + c)) }.to_array();
        c += 1;
    }
    taps
}

/// `SiLU(Σ_j taps[j]·window[j])` of four channels.
#[inline(always)]
pub(crate) fn convolve(taps: &Taps, window: &[F32x4; 4]) -> F32x4 {
    let window = [window[0].to_array(), window[1].to_array(), window[2].to_array(), window[3].to_array()];
    let mut out = [0.0; 4];
    let mut c = 0;
    while c < 4 {
        let mut sum = taps[c][0] * window[0][c];
        let mut j = 1;
        while j < 4 {
            sum = math::fma(taps[c][j], window[j][c], sum);
            j += 1;
        }
        out[c] = math::silu(sum);
        c += 1;
    }
    F32x4::from_array(out)
}

/// The input of four channels at `back` positions before `pos`, out of a slot's ring; zero before position 0.
///
/// # Safety
/// `ring` is at the four channels in a ring of rows of `n_vec` vectors.
#[inline(always)]
pub(crate) unsafe fn past(ring: *const F32x4, n_vec: usize, pos: u32, back: u32) -> F32x4 {
    if pos < back {
        return F32x4::splat(0.0);
    }
    // SAFETY: the caller's promise.
    unsafe { ld(ring.add((pos - back) as usize % RING as usize * n_vec)) }
}

/// The convolution with four taps.
///
/// Launch: grid `[ceil(channels / (4·THREADS)), n_tiles(TILE_ROWS, rows, n_spans), 1]`, block [`THREADS`].
///
/// # Safety
/// - `channels` is a multiple of 4; `x` and `out` are `[rows, channels]`, `w` is `[channels, 4]`, `ring` is
///   `[slots, RING, channels]`, all 16-byte aligned; `out` overlaps no other.
/// - The `span_*` arrays have `n_spans > 0` elements; spans follow each other from row 0 on, end within the rows, and
///   have slots that differ.
#[kernel(max_threads = 128)]
pub unsafe fn ssm_conv1d_4(
    x: *const f32,
    w: *const f32,
    ring: *mut f32,
    span_slot: *const u32,
    span_first: *const u32,
    span_rows: *const u32,
    span_start: *const u32,
    n_spans: u32,
    out: *mut f32,
    channels: u32,
) {
    let spans = Spans { slot: span_slot, first: span_first, rows: span_rows, start: span_start };
    let (span, row) = spans.of_tile::<TILE_ROWS>(n_spans, thread::block_idx_y());
    let (vector, n_vec) = (thread::index_1d() as usize, channels as usize / 4);
    if row >= span.rows || vector >= n_vec {
        return;
    }
    let x = x.cast::<F32x4>().add(span.first as usize * n_vec + vector);
    let out = out.cast::<F32x4>().add(span.first as usize * n_vec + vector);
    let ring = ring.cast::<F32x4>().add(span.slot as usize * RING as usize * n_vec + vector);
    let taps = load_taps(w, vector);

    // The last four inputs, the newest at 3.
    let mut window = [F32x4::splat(0.0); 4];
    let mut back = 1;
    while back < TAPS {
        window[(TAPS - back) as usize] =
            if row > 0 { ld(x.add((row - back) as usize * n_vec)) } else { past(ring, n_vec, span.start, back) };
        back += 1;
    }
    if row == 0 {
        // This lane alone has read the ring's old rows of its channels, so it may write the new ones.
        let mut r = span.rows - span.rows.min(RING);
        while r < span.rows {
            st(ring.add((span.start + r) as usize % RING as usize * n_vec), ld(x.add(r as usize * n_vec)));
            r += 1;
        }
    }

    let end = (row + TILE_ROWS).min(span.rows);
    let mut row = row;
    while row < end {
        let mut inputs = [F32x4::splat(0.0); AHEAD];
        let mut i = 0;
        while i < AHEAD {
            // Rows past the end are read as the last one, and not used.
            inputs[i] = ld(x.add((row + i as u32).min(end - 1) as usize * n_vec));
            i += 1;
        }
        let mut i = 0;
        while i < AHEAD {
            window = [window[1], window[2], window[3], inputs[i]];
            if row + (i as u32) < end {
                st(out.add((row + i as u32) as usize * n_vec), convolve(&taps, &window));
            }
            i += 1;
        }
        row += AHEAD as u32;
    }
}
