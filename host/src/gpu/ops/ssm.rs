//! Launchers of the gated delta net: convolution, recurrence, gated norm.

mod conv1d;
mod delta_net;
mod gated_norm;
mod step;

pub use conv1d::ssm_conv1d;
pub use delta_net::{chunk_elems, ssm_delta_net};
pub use gated_norm::{ssm_gated_norm, ssm_gated_norm_q8};
pub use step::{DeltaStep, MAX_STEP_ROWS, ssm_delta_step};

use super::{Check, Result};
use crate::backend::DeltaNetShape;
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// The spans of a batch, one element each: device arrays that were checked when the batch was made.
#[derive(Clone, Copy, Debug)]
pub struct Spans<'a> {
    /// Slot of the recurrent state.
    pub slot: Slice<'a, u32>,
    /// First row.
    pub first: Slice<'a, u32>,
    /// Number of rows.
    pub rows: Slice<'a, u32>,
    /// Position of the first row.
    pub start: Slice<'a, u32>,
}

impl Spans<'_> {
    /// Checks the arrays' sizes and returns the number of spans.
    fn check<D: Device>(&self, check: Check, device: &D) -> Result<u32> {
        for slice in [self.slot, self.first, self.rows, self.start] {
            device.check_owner(slice)?;
            check.that("spans", slice.len() == self.slot.len(), "differ in length")?;
        }
        let Ok(n) = u32::try_from(self.slot.len()) else { return check.fail("spans", "too many") };
        check.grid_yz("spans", n)?;
        Ok(n)
    }
}

/// A layer's decay parameters, one a value head.
#[derive(Clone, Copy, Debug)]
pub struct Decay<'a> {
    /// Added to alpha; none is 0.
    pub dt_bias: Option<Slice<'a, f32>>,
    /// Multiplies the softplus; none is −1.
    pub a: Option<Slice<'a, f32>>,
}

impl Decay<'_> {
    /// Checks that there is one of each for every head.
    fn check<D: Device>(&self, check: Check, device: &D, heads: usize) -> Result<()> {
        for (name, slice) in [("dt_bias", self.dt_bias), ("a", self.a)] {
            let Some(slice) = slice else { continue };
            check.that(name, slice.len() == heads, "has not one element a head")?;
            device.check_owner(slice)?;
        }
        Ok(())
    }

    /// `dt_bias` and `a`, null where there is none.
    fn pointers(&self) -> (*const f32, *const f32) {
        let pointer = |slice: Option<Slice<'_, f32>>| slice.map_or(std::ptr::null(), Slice::ptr);
        (pointer(self.dt_bias), pointer(self.a))
    }
}

/// Whether there are kernels for a delta net's shape.
pub fn takes_delta_net(shape: &DeltaNetShape) -> bool {
    shape.d_conv == 4 && matches!(shape.d_state, 64 | 128)
}
