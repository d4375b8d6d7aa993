//! Launcher of `norm_gate_up_*`.

use cuda_std::launch::Launch;
use gpu_kernels::blocks::GgmlType;
use gpu_kernels::kernels::gate_up::ROWS;
use gpu_kernels::kernels::norm_gate_up::{self as kernels, MAX_COLS, NormGateUpParams, THREADS, shared_bytes};
use gpu_kernels::params::MatvecShape;

use super::{Check, Matrix, OpError, Q8, Result, takes_gate_up};
use crate::backend::GatedAct;
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// `h = act(gate·x̂, up·x̂)` with `x̂ = norm(x)`, of one row, quantised.
#[derive(Clone, Copy, Debug)]
pub struct NormGateUp<'a> {
    /// `[cols]`.
    pub x: Slice<'a, f32>,
    /// The norm's weights, `[cols]`.
    pub norm: Slice<'a, f32>,
    /// Of the norm.
    pub eps: f32,
    /// The gate's weights.
    pub gate: Matrix<'a>,
    /// The others, of the same type and shape.
    pub up: Matrix<'a>,
    /// Between them.
    pub act: GatedAct,
    /// Launch while the grid ahead still runs, and load weights before it has ended.
    pub dependent: bool,
}

/// Whether [`norm_gate_up`] takes such weights.
pub fn takes_norm_gate_up(gate: &Matrix<'_>, up: &Matrix<'_>) -> bool {
    takes_gate_up(gate, up) && gate.n_expert() == 1 && gate.cols() <= MAX_COLS
}

impl NormGateUp<'_> {
    fn check<D: Device>(&self, check: Check, device: &D, h: Q8<'_>) -> Result<()> {
        let NormGateUp { x, norm, gate, up, .. } = *self;
        check.that(
            "up",
            takes_norm_gate_up(&gate, &up),
            "has not the gate's type and shape, or the kernel takes neither",
        )?;
        check.that("h", h.cols == gate.rows(), "columns differ from the weights' rows")?;
        h.check_output(check, device, 1, &[x, norm])?;
        for (name, slice) in [("x", x), ("norm", norm)] {
            device.check_owner(slice)?;
            check.that(name, slice.len() == gate.cols() as usize, "has another number of elements than a row")?;
            check.aligned(name, slice, 16)?;
        }
        for w in [gate, up] {
            device.check_owner(w.data())?;
            check.apart("h", h.qs, w.data())?;
            check.apart("h", h.d, w.data())?;
            check.apart("h", h.s, w.data())?;
        }
        Ok(())
    }
}

/// The first half of a dense feed-forward network and the norm before it, for one row: to the bits of
/// [`rms_norm_q8`](super::rms_norm_q8) and [`gate_up`](super::gate_up()).
///
/// # Errors
/// Where a type, a shape, an alignment or an overlap is not as [`gpu_kernels::kernels::norm_gate_up`] asks.
#[expect(unsafe_code, reason = "a launch")]
pub fn norm_gate_up<D: Device>(device: &D, op: &NormGateUp<'_>, h: Q8<'_>) -> Result<u64> {
    op.check(Check("norm_gate_up"), device, h)?;
    let gate = op.gate;
    let params = NormGateUpParams {
        planes: gate.planes(),
        rows: gate.rows(),
        chunks: gate.chunks(),
        lanes_log2: MatvecShape::lanes_log2(gate.ty(), gate.chunks()),
        cols: gate.cols(),
        eps: op.eps,
        oai: u32::from(op.act == GatedAct::SwiGluOai),
    };
    let properties = device.properties();
    let blocks = (gate.rows() / ROWS).min(properties.n_sm);
    let launch = Launch::linear(blocks, THREADS).shared(shared_bytes(gate.cols()));
    let launch = Launch { pdl: op.dependent && properties.capability >= (9, 0), ..launch };
    let (qs, d, s) = (h.qs.ptr_mut(), h.d.ptr_mut(), h.s.ptr_mut());
    let args = (gate.data().ptr(), op.up.data().ptr(), op.x.ptr(), op.norm.ptr(), qs, d, s, params);
    macro_rules! launch {
        ($($ty:ident: $name:ident),+) => {
            match gate.ty() {
                // SAFETY: `Matrix` has checked the weights; `check` the shapes, alignment and overlap; geometry and
                // parameters come from the functions that the kernel uses.
                $(GgmlType::$ty => unsafe { device.launch(kernels::$name, launch, args)? },)+
                ty @ (GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16) => {
                    return Err(OpError::Type { op: "norm_gate_up", ty });
                }
            }
        };
    }
    launch!(
        Q4K: norm_gate_up_q4_k, Q5K: norm_gate_up_q5_k, Q6K: norm_gate_up_q6_k, Q8_0: norm_gate_up_q8_0,
        Q4_0: norm_gate_up_q4_0, Q4_1: norm_gate_up_q4_1, Q5_0: norm_gate_up_q5_0, Q5_1: norm_gate_up_q5_1,
        Mxfp4: norm_gate_up_mxfp4
    );
    let (rows, cols) = (u64::from(gate.rows()), u64::from(gate.cols()));
    Ok(2 * rows * gate.row_bytes() + 8 * cols + Q8::bytes(rows))
}
