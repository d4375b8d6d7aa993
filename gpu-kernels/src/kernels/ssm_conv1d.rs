//! Depthwise causal convolution of a gated delta net, with its rolling state.
//!
//! `out[t, c] = SiLU(Σ_j w[c, j]·x[t − (D − 1) + j, c])`, `D` taps. Inputs before the batch come from the
//! state, `[slot][D − 1][channel]`, oldest first, which ends as the last `D − 1` inputs. A sequence that
//! begins in this batch starts from zeros.
//!
//! Source: Yang et al., Gated Delta Networks (2024).

use cuda_std::prelude::*;

/// Lanes a block.
pub const THREADS: u32 = 128;

/// One lane a channel; a lane walks through its span's tokens, so a prefill reads each input once.
///
/// # Safety
/// As [`ssm_conv1d_4`], with `D` taps.
#[inline(always)]
#[expect(
    clippy::too_many_arguments,
    reason = "a kernel's pointers are arguments of their own, so that they are known as global"
)]
unsafe fn ssm_conv1d<const D: usize>(
    x: *const f32,
    w: *const f32,
    state: *mut f32,
    span_slot: *const u32,
    span_first: *const u32,
    span_rows: *const u32,
    span_start: *const u32,
    out: *mut f32,
    channels: u32,
) {
    let c = thread::index_1d() as usize;
    if c >= channels as usize {
        return;
    }
    let span = thread::block_idx_y() as usize;
    let channels = channels as usize;
    // SAFETY: channel, span, its rows and its slot are within the caller's extents, and this lane alone
    // touches this channel of the span's rows and of its slot.
    unsafe {
        let state = state.add(ld(span_slot.add(span)) as usize * (D - 1) * channels + c);
        let fresh = ld(span_start.add(span)) == 0;
        let mut taps = [0.0f32; D];
        let mut window = [0.0f32; D]; // the last D inputs, the newest at D − 1
        let mut j = 0;
        while j < D {
            taps[j] = ld(w.add(c * D + j));
            if j > 0 && !fresh {
                window[j] = ld(state.add((j - 1) * channels));
            }
            j += 1;
        }
        let first = ld(span_first.add(span)) as usize;
        let end = first + ld(span_rows.add(span)) as usize;
        let mut row = first;
        while row < end {
            let mut sum = 0.0;
            let mut j = 0;
            while j < D - 1 {
                window[j] = window[j + 1];
                sum = math::fma(taps[j], window[j], sum);
                j += 1;
            }
            window[D - 1] = ld(x.add(row * channels + c));
            sum = math::fma(taps[D - 1], window[D - 1], sum);
            st(out.add(row * channels + c), math::silu(sum));
            row += 1;
        }
        let mut j = 1;
        while j < D {
            st(state.add((j - 1) * channels), window[j]);
            j += 1;
        }
    }
}

/// The convolution with four taps.
///
/// Launch: grid `[ceil(channels / THREADS), spans, 1]`, block [`THREADS`].
///
/// # Safety
/// `x` and `out` are `[rows, channels]` and do not overlap; `w` is `[channels, 4]`; `state` is
/// `[slots, 3, channels]`; the `span_*` arrays have an element for each span of the grid, whose rows lie in
/// the batch and whose slots differ.
#[kernel(max_threads = 128)]
pub unsafe fn ssm_conv1d_4(
    x: *const f32,
    w: *const f32,
    state: *mut f32,
    span_slot: *const u32,
    span_first: *const u32,
    span_rows: *const u32,
    span_start: *const u32,
    out: *mut f32,
    channels: u32,
) {
    // SAFETY: the caller's promise is the same.
    unsafe { ssm_conv1d::<4>(x, w, state, span_slot, span_first, span_rows, span_start, out, channels) }
}
