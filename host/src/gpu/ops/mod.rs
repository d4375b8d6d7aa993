//! Launchers: each checks its operands, launches one kernel, and returns the bytes it moves.
//!
//! A kernel trusts its arguments; these functions are what it trusts. Every `# Safety` item of a kernel
//! is either checked here, at run time and with an error that names the operand, or follows from what a
//! [`Slice`] is. They are generic over the device, so the tests run the same launches emulated.
//!
//! The number that each returns is the least traffic with device memory that the operation needs; with
//! a time it gives GB/s.

mod argmax;
mod attention;
mod elementwise;
mod embedding;
mod expert_down;
mod expert_down_grouped;
mod feed;
mod gate_up;
mod gate_up_grouped;
mod heads;
mod kv_cache;
mod matmul;
mod matmul_float;
mod matmul_wide;
mod matrix;
mod matvec;
mod matvecs;
mod moe;
mod norm_gate_up;
mod norm_matvecs;
mod quantize_q8;
mod read_sweep;
mod repack;
mod rms_norm;
mod rope;
mod route_groups;
mod sample;
mod ssm;
mod to_bf16;

pub mod bench;

use bytemuck::Pod;
use gpu_kernels::blocks::GgmlType;

use super::device::DeviceError;
use super::memory::Slice;

pub use argmax::{Parts, argmax, n_part};
pub use attention::{
    Attention, AttentionOut, Partials, Queries, Split, attention, split, split_rows, takes_fresh, takes_head_dim,
};
pub use elementwise::{
    add, add_bias, gated_act, gated_act_q8, gather_rows, join_rows, scale_accumulate, sigmoid_mul, sigmoid_scale_acc,
    split_gate,
};
pub use embedding::embedding;
pub use expert_down::{ExpertDown, SharedDown, expert_down, takes_expert_down};
pub use expert_down_grouped::{ExpertDownGrouped, SharedDownGrouped, expert_down_grouped};
pub use feed::{Fed, NOT_FED, feed};
pub use gate_up::{GateUp, Routing, SharedAct, gate_up, takes_gate_up, takes_routing};
pub use gate_up_grouped::{GateUpGrouped, SharedGateUp, gate_up_grouped, takes_gate_up_grouped};
pub use heads::{Heads, attention_heads};
pub use kv_cache::{KvSlice, MIN_SPAN_ROWS, Placement, kv_cache_write};
pub use matmul::{Tiles, dense_tile, expert_tile, matmul_q8};
pub use matmul_float::{FloatProduct, matmul_float, takes_beside};
pub use matmul_wide::{matmul_wide, wide_dense_tile, wide_expert_tile};
pub use matrix::Matrix;
pub use matvec::{Experts, Matvec, matvec, matvec_q8, takes_q8};
pub use matvecs::{Product, common_type, matvecs};
pub use moe::{SharedOut, moe_weighted_acc, softmax_topk, takes_topk_groups, topk_groups};
pub use norm_gate_up::{NormGateUp, norm_gate_up, takes_norm_gate_up};
pub use norm_matvecs::{Norm, norm_matvecs, takes_norm};
pub use quantize_q8::{Q8, quantize_q8};
pub use read_sweep::read_sweep;
pub use repack::repack;
pub use rms_norm::{rms_norm, rms_norm_add, rms_norm_q8};
pub use rope::{rope, turns};
pub use route_groups::{RouteGroups, few_routes, max_tiles, route_groups};
pub use sample::{SampleRoom, sample, sample_params};
pub use ssm::{
    Decay, DeltaStep, MAX_STEP_ROWS, Spans, chunk_elems, ssm_conv1d, ssm_delta_net, ssm_delta_step, ssm_gated_norm,
    ssm_gated_norm_q8, takes_delta_net,
};
pub use to_bf16::{Bf16, to_bf16};

/// The result of a launcher.
pub type Result<T> = std::result::Result<T, OpError>;

/// Why an operation was not launched.
#[derive(Debug, thiserror::Error)]
pub enum OpError {
    /// An operand has the wrong size, alignment or place.
    #[error("{op}: {operand}: {reason}")]
    Operand {
        /// The operation.
        op: &'static str,
        /// The operand's name in the kernel's equation.
        operand: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// There is no such kernel for this weight type.
    #[error("{op} has no kernel for {ty} weights")]
    Type {
        /// The operation.
        op: &'static str,
        /// The weight type.
        ty: GgmlType,
    },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Checks of one operation's operands.
#[derive(Clone, Copy)]
pub(crate) struct Check(pub(crate) &'static str);

impl Check {
    /// The error for an operand.
    pub(crate) fn fail<T>(self, operand: &'static str, reason: impl Into<String>) -> Result<T> {
        Err(OpError::Operand { op: self.0, operand, reason: reason.into() })
    }

    /// Requires a condition.
    pub(crate) fn that(self, operand: &'static str, holds: bool, reason: &str) -> Result<()> {
        if holds { Ok(()) } else { self.fail(operand, reason) }
    }

    /// Requires `n_rows` rows, `stride` elements apart, of `cols` elements each, at the start of `slice`.
    pub(crate) fn rows<T: Pod>(
        self,
        operand: &'static str,
        slice: Slice<'_, T>,
        n_rows: u64,
        stride: u64,
        cols: u64,
    ) -> Result<()> {
        self.that(operand, stride >= cols, "rows overlap")?;
        let need = n_rows.checked_sub(1).map_or(Some(0), |before| before.checked_mul(stride)?.checked_add(cols));
        match need {
            Some(need) if need <= slice.len() as u64 => Ok(()),
            _ => self.fail(operand, format!("{} elements for {n_rows} rows of {cols}, {stride} apart", slice.len())),
        }
    }

    /// Requires an address that is a multiple of `bytes`.
    pub(crate) fn aligned<T: Pod>(self, operand: &'static str, slice: Slice<'_, T>, bytes: u64) -> Result<()> {
        if slice.address().is_multiple_of(bytes) {
            return Ok(());
        }
        self.fail(operand, format!("{:#x} is not a multiple of {bytes}", slice.address()))
    }

    /// Requires that an output shares no byte with an input.
    pub(crate) fn apart<T: Pod, U: Pod>(self, output: &'static str, y: Slice<'_, T>, x: Slice<'_, U>) -> Result<()> {
        self.that(output, !y.overlaps(x), "overlaps an input")
    }

    /// Requires a count that fits a grid's second and third dimension.
    pub(crate) fn grid_yz(self, operand: &'static str, count: u32) -> Result<()> {
        self.that(operand, count <= 65_535, "more than 65535")
    }
}
