//! Launcher of the convolution.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::spans::n_tiles;
use gpu_kernels::kernels::ssm_conv1d::{self as kernels, RING, TAPS, THREADS, TILE_ROWS};

use super::Spans;
use crate::backend::DeltaNetShape;
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;
use crate::gpu::ops::{Check, Result};

/// The causal convolution of `x`, `[rows, channels]`, with taps `w`, `[channels, 4]`, over each span.
///
/// # Errors
/// Where the lengths do not agree, the operands overlap, or there is no kernel for the number of taps or channels.
///
/// # Safety
/// The spans follow each other from row 0 on and end within `x`; their slots differ and lie in `ring`,
/// `[slots, RING, channels]`.
#[expect(unsafe_code, reason = "a launch, whose indices live on the device")]
pub unsafe fn ssm_conv1d<D: Device>(
    device: &D,
    x: Slice<'_, f32>,
    w: Slice<'_, f32>,
    ring: Slice<'_, f32>,
    spans: Spans<'_>,
    out: Slice<'_, f32>,
    shape: &DeltaNetShape,
) -> Result<u64> {
    let check = Check("ssm_conv1d");
    let n_spans = spans.check(check, device)?;
    let channels = shape.conv_dim();
    check.that("w", shape.d_conv == TAPS, "has no kernel for its number of taps: 4 has")?;
    check.that("w", w.len() == 4 * channels as usize, "has not 4 taps a channel")?;
    check.that("x", channels > 0 && channels.is_multiple_of(4), "has no positive multiple of 4 channels")?;
    check.that("x", x.len().is_multiple_of(channels as usize), "is not whole rows")?;
    check.that("out", out.len() == x.len(), "has another length than x")?;
    check.that("ring", ring.len().is_multiple_of((RING * channels) as usize), "is not whole slots")?;
    for (name, slice) in [("x", x), ("w", w), ("ring", ring), ("out", out)] {
        device.check_owner(slice)?;
        check.aligned(name, slice, 16)?;
    }
    check.apart("out", out, x)?;
    check.apart("out", out, w)?;
    check.apart("out", out, ring)?;
    check.apart("ring", ring, x)?;
    let Ok(rows) = u32::try_from(x.len() / channels as usize) else { return check.fail("x", "has too many rows") };
    if n_spans > 0 && rows > 0 {
        let tiles = n_tiles(TILE_ROWS, rows, n_spans);
        check.grid_yz("x", tiles)?;
        let launch = Launch::grid([channels.div_ceil(4 * THREADS), tiles, 1], THREADS);
        let Spans { slot, first, rows, start } = spans;
        let (slot, first, rows, start) = (slot.ptr(), first.ptr(), rows.ptr(), start.ptr());
        let args = (x.ptr(), w.ptr(), ring.ptr_mut(), slot, first, rows, start, n_spans, out.ptr_mut(), channels);
        // SAFETY: lengths, alignment and overlap were checked above; the grid covers channels and tiles; spans and
        // slots are the caller's promise.
        unsafe { device.launch(kernels::ssm_conv1d_4, launch, args)? };
    }
    // A span of one row reads three and writes one of the ring.
    Ok(8 * x.len() as u64 + u64::from(n_spans) * 16 * u64::from(channels))
}
