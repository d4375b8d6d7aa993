//! Launcher of `expert_down_*`.

use cuda_std::launch::Launch;
use gpu_kernels::blocks::GgmlType;
use gpu_kernels::kernels::expert_down::{self as kernels, ExpertDownParams, MAX_USED, ROWS, THREADS};
use gpu_kernels::params::{Activations, MatvecShape};

use super::{Check, Matrix, OpError, Q8, Result, takes_q8};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// `x[t] += Σ_j weights[t, j]·(w[ids[t, j]]·h[t·n_used + j] + bias[ids[t, j]])`, and with a shared expert
/// `x[t] += σ(gate[t])·shared_w·shared_h[t]`.
#[derive(Clone, Copy, Debug)]
pub struct ExpertDown<'a> {
    /// The experts' weights.
    pub w: Matrix<'a>,
    /// `[n_expert, rows]`.
    pub bias: Option<Slice<'a, f32>>,
    /// `[tokens, n_used]`; one past the end is read as the last expert.
    pub ids: Slice<'a, u32>,
    /// `[tokens, n_used]`.
    pub weights: Slice<'a, f32>,
    /// Experts of a token.
    pub n_used: u32,
    /// The expert that every token goes to.
    pub shared: Option<SharedDown<'a>>,
    /// Launch while the grid ahead still runs, and load the shared expert's weights before it has ended.
    pub dependent: bool,
    /// Tokens.
    pub tokens: u32,
}

/// The expert that every token goes to.
#[derive(Clone, Copy, Debug)]
pub struct SharedDown<'a> {
    /// Its weights, one matrix.
    pub w: Matrix<'a>,
    /// `[tokens, w.cols()]`.
    pub h: Q8<'a>,
    /// `[tokens]`: the logit of its weight, which is 1 without.
    pub gate: Option<Slice<'a, f32>>,
}

/// Whether [`expert_down`] has a kernel for experts of type `ty` beside a shared one of type `shared`.
pub fn takes_expert_down(ty: GgmlType, shared: Option<GgmlType>) -> bool {
    takes_q8(ty) && shared.is_none_or(|shared| shared == ty || shared == GgmlType::Q8_0)
}

impl ExpertDown<'_> {
    fn check<D: Device>(&self, check: Check, device: &D, h: Q8<'_>, x: Slice<'_, f32>) -> Result<()> {
        let (w, tokens, n_used) = (self.w, u64::from(self.tokens), u64::from(self.n_used));
        let rows = u64::from(w.rows());
        check.grid_yz("tokens", self.tokens)?;
        check.that("ids", (1..=MAX_USED).contains(&self.n_used), "are none a token, or more than 32")?;
        check.that("w", w.n_blocks() < 1 << 32, "has more blocks than the kernel counts")?;
        device.check_owner(w.data())?;
        device.check_owner(x)?;
        check.rows("x", x, tokens, rows, rows)?;
        check.that("h", h.cols == w.cols(), "columns differ from the weights'")?;
        h.check(check, device, tokens * n_used)?;
        device.check_owner(self.ids)?;
        device.check_owner(self.weights)?;
        check.rows("ids", self.ids, tokens, n_used, n_used)?;
        check.rows("weights", self.weights, tokens, n_used, n_used)?;
        check.apart("x", x, w.data())?;
        check.apart("x", x, self.ids)?;
        check.apart("x", x, h.qs)?;
        for input in [self.weights, h.d, h.s].into_iter().chain(self.bias) {
            check.apart("x", x, input)?;
        }
        if let Some(bias) = self.bias {
            device.check_owner(bias)?;
            check.rows("bias", bias, u64::from(w.n_expert()), rows, rows)?;
        }
        let Some(shared) = self.shared else { return Ok(()) };
        device.check_owner(shared.w.data())?;
        let fits = shared.w.rows() == w.rows() && shared.w.n_expert() == 1 && shared.w.cols() == shared.h.cols;
        check.that("shared", fits, "has other rows than the experts, or other columns than its activations")?;
        shared.h.check(check, device, tokens)?;
        check.apart("x", x, shared.w.data())?;
        check.apart("x", x, shared.h.qs)?;
        for input in [shared.h.d, shared.h.s].into_iter().chain(shared.gate) {
            check.apart("x", x, input)?;
        }
        if let Some(gate) = shared.gate {
            device.check_owner(gate)?;
            check.rows("gate", gate, tokens, 1, 1)?;
        }
        Ok(())
    }

    fn params(&self) -> ExpertDownParams {
        let w = self.w;
        let lanes = |w: Matrix<'_>| MatvecShape::lanes_log2(w.ty(), w.chunks());
        let shared = self.shared.map(|shared| shared.w);
        ExpertDownParams {
            planes: w.planes(),
            shared_planes: shared.map_or([0; 4], |w| w.planes()),
            rows: w.rows(),
            chunks: w.chunks(),
            lanes_log2: MatvecShape::lanes_log2(w.ty(), w.chunks()),
            cols: w.cols(),
            n_expert: w.n_expert(),
            n_used: self.n_used,
            shared_chunks: shared.map_or(1, |w| w.chunks()),
            shared_lanes_log2: shared.map_or(0, lanes),
            shared_cols: shared.map_or(0, |w| w.cols()),
            reserved: 0,
        }
    }
}

/// The second half of a mixture of experts, onto the residual stream `x`, `[tokens, w.rows()]`.
///
/// # Errors
/// [`OpError::Type`] where [`takes_expert_down`] says no, else where a shape, an alignment or an overlap is not as
/// [`gpu_kernels::kernels::expert_down`] asks.
#[expect(unsafe_code, reason = "a launch")]
pub fn expert_down<D: Device>(device: &D, op: &ExpertDown<'_>, h: Q8<'_>, x: Slice<'_, f32>) -> Result<u64> {
    let shared_ty = op.shared.map(|shared| shared.w.ty());
    if !takes_expert_down(op.w.ty(), shared_ty) {
        return Err(OpError::Type {
            op: "expert_down",
            ty: shared_ty.filter(|_| takes_q8(op.w.ty())).unwrap_or(op.w.ty()),
        });
    }
    if op.tokens == 0 {
        return Ok(0);
    }
    op.check(Check("expert_down"), device, h, x)?;
    let float = |slice: Option<Slice<'_, f32>>| slice.map_or(std::ptr::null(), Slice::ptr);
    let shared_h = op.shared.map(|shared| shared.h);
    let args = (
        op.w.data().ptr(),
        h.qs.ptr(),
        h.d.ptr(),
        h.s.ptr(),
        op.ids.ptr(),
        op.weights.ptr(),
        float(op.bias),
        op.shared.map_or(std::ptr::null(), |shared| shared.w.data().ptr()),
        shared_h.map_or(std::ptr::null(), |h| h.qs.ptr()),
        float(shared_h.map(|h| h.d)),
        float(shared_h.map(|h| h.s)),
        float(op.shared.and_then(|shared| shared.gate)),
        x.ptr_mut(),
        op.params(),
    );
    let launch = Launch::grid([op.w.rows().div_ceil(ROWS), 1, op.tokens], THREADS);
    let launch = Launch { pdl: op.dependent && device.properties().capability >= (9, 0), ..launch };
    macro_rules! launch {
        ($($ty:ident: $same:ident $q8_0:ident),+) => {
            match (op.w.ty(), shared_ty) {
                $(
                    // SAFETY: `Matrix` has checked the weights; `check` the shapes, alignment and overlap; geometry
                    // and parameters come from the functions that the kernel uses. What is null is not read.
                    (GgmlType::$ty, None | Some(GgmlType::$ty)) => unsafe { device.launch(kernels::$same, launch, args)? },
                    // SAFETY: as above.
                    (GgmlType::$ty, _) => unsafe { device.launch(kernels::$q8_0, launch, args)? },
                )+
                // SAFETY: as above.
                (GgmlType::Q8_0, _) => unsafe { device.launch(kernels::expert_down_q8_0, launch, args)? },
                (ty @ (GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16), _) => {
                    return Err(OpError::Type { op: "expert_down", ty });
                }
            }
        };
    }
    launch!(
        Q4K: expert_down_q4_k expert_down_q4_k_q8_0, Q5K: expert_down_q5_k expert_down_q5_k_q8_0,
        Q6K: expert_down_q6_k expert_down_q6_k_q8_0, Q4_0: expert_down_q4_0 expert_down_q4_0_q8_0,
        Q4_1: expert_down_q4_1 expert_down_q4_1_q8_0, Q5_0: expert_down_q5_0 expert_down_q5_0_q8_0,
        Q5_1: expert_down_q5_1 expert_down_q5_1_q8_0, Mxfp4: expert_down_mxfp4 expert_down_mxfp4_q8_0
    );
    let (tokens, rows) = (u64::from(op.tokens), u64::from(op.w.rows()));
    let shared =
        op.shared.map_or(0, |shared| rows * shared.w.row_bytes() + Q8::bytes(tokens * u64::from(shared.h.cols)));
    let routes = tokens * u64::from(op.n_used);
    Ok(routes * rows * op.w.row_bytes() + Q8::bytes(routes * u64::from(h.cols)) + shared + 8 * tokens * rows)
}
