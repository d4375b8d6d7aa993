//! Launcher of `gate_up_grouped_*`.

use cuda_std::launch::Launch;
use gpu_kernels::blocks::GgmlType;
use gpu_kernels::kernels::gate_up::ROWS;
use gpu_kernels::kernels::gate_up_grouped::{self as kernels, GateUpGroupedParams, SHARED_BYTES};
use gpu_kernels::kernels::grouped::{THREADS, TILE, TILE_SIZE};
use gpu_kernels::params::MatvecShape;

use super::{Check, Matrix, OpError, Q8, Result, RouteGroups, takes_gate_up};
use crate::backend::GatedAct;
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// `h = act(gate·x, up·x)` for every route, quantised, and for every token's shared expert.
#[derive(Clone, Copy, Debug)]
pub struct GateUpGrouped<'a> {
    /// The gate's weights.
    pub gate: Matrix<'a>,
    /// The others, of the same type and shape.
    pub up: Matrix<'a>,
    /// `[n_expert, rows]`.
    pub gate_bias: Option<Slice<'a, f32>>,
    /// `[n_expert, rows]`.
    pub up_bias: Option<Slice<'a, f32>>,
    /// Between them.
    pub act: GatedAct,
    /// The routes by expert, in tiles of [`TILE`].
    pub groups: RouteGroups<'a>,
    /// Experts of a token.
    pub n_used: u32,
    /// The expert that every token goes to.
    pub shared: Option<SharedGateUp<'a>>,
    /// Launch while the grid ahead still runs.
    pub dependent: bool,
    /// Tokens.
    pub tokens: u32,
}

/// The first half of the expert that every token goes to.
#[derive(Clone, Copy, Debug)]
pub struct SharedGateUp<'a> {
    /// The gate's weights, one matrix.
    pub gate: Matrix<'a>,
    /// The others, of the same type and shape.
    pub up: Matrix<'a>,
    /// The result, `[tokens, gate.rows()]`.
    pub h: Q8<'a>,
}

/// Whether [`gate_up_grouped`] has a kernel for such experts beside such a shared one.
pub fn takes_gate_up_grouped(gate: &Matrix<'_>, up: &Matrix<'_>, shared: Option<(&Matrix<'_>, &Matrix<'_>)>) -> bool {
    let fits = |(shared_gate, shared_up): (&Matrix<'_>, &Matrix<'_>)| {
        takes_gate_up(shared_gate, shared_up) && (shared_gate.ty() == gate.ty() || shared_gate.ty() == GgmlType::Q8_0)
    };
    takes_gate_up(gate, up) && shared.is_none_or(fits)
}

impl GateUpGrouped<'_> {
    fn check<D: Device>(&self, check: Check, device: &D, x: Q8<'_>, h: Q8<'_>) -> Result<()> {
        let (gate, tokens) = (self.gate, u64::from(self.tokens));
        let Some(routes) = self.tokens.checked_mul(self.n_used).filter(|routes| *routes > 0) else {
            return check.fail("tokens", format!("{tokens} of {} routes", self.n_used));
        };
        check.that("tiles", self.groups.tile == TILE_SIZE, "are not those of the kernel")?;
        self.groups.check(check, device, routes, gate.n_expert())?;
        check.that("x", x.cols == gate.cols(), "columns differ from the weights'")?;
        x.check(check, device, tokens)?;
        check.that("h", h.cols == gate.rows(), "columns differ from the weights' rows")?;
        h.check_output(check, device, u64::from(routes), &[])?;
        for bias in [self.gate_bias, self.up_bias].into_iter().flatten() {
            device.check_owner(bias)?;
            let n = u64::from(gate.n_expert()) * u64::from(gate.rows());
            check.that("bias", bias.len() as u64 == n, "has not one element for each expert's row")?;
        }
        let mut inputs = vec![x.qs.as_bytes(), x.d.as_bytes(), x.s.as_bytes()];
        inputs.extend([self.groups.order.as_bytes(), self.groups.tiles.as_bytes()]);
        inputs.extend([self.gate_bias, self.up_bias].into_iter().flatten().map(Slice::as_bytes));
        let mut results = vec![("h", h)];
        let mut matrices = vec![gate, self.up];
        if let Some(shared) = self.shared {
            let fits = shared.gate.n_expert() == 1 && shared.gate.cols() == gate.cols();
            check.that("shared", fits, "is not one expert with the others' columns")?;
            check.that("shared h", shared.h.cols == shared.gate.rows(), "columns differ from the weights' rows")?;
            shared.h.check_output(check, device, tokens, &[])?;
            results.push(("shared h", shared.h));
            matrices.extend([shared.gate, shared.up]);
        }
        let x_elems = tokens * u64::from(x.cols);
        check.that("x", x_elems <= u64::from(u32::MAX), "has more elements than the kernel counts")?;
        for matrix in matrices {
            check.that("w", matrix.n_blocks() < 1 << 32, "has more blocks than the kernel counts")?;
            device.check_owner(matrix.data())?;
            inputs.push(matrix.data());
        }
        for (name, result) in results {
            for part in [result.qs.as_bytes(), result.d.as_bytes(), result.s.as_bytes()] {
                for input in &inputs {
                    check.apart(name, part, *input)?;
                }
                inputs.push(part);
            }
        }
        Ok(())
    }

    /// Grid and parameters.
    fn launch<D: Device>(&self, device: &D) -> (Launch, GateUpGroupedParams) {
        let lanes = |w: Matrix<'_>| MatvecShape::lanes_log2(w.ty(), w.chunks());
        let (gate, shared) = (self.gate, self.shared.map(|shared| shared.gate));
        let shared_tiles = shared.map_or(0, |_| self.tokens.div_ceil(TILE));
        let params = GateUpGroupedParams {
            planes: gate.planes(),
            shared_planes: shared.map_or([0; 4], |w| w.planes()),
            rows: gate.rows(),
            chunks: gate.chunks(),
            lanes_log2: lanes(gate),
            shared_rows: shared.map_or(0, |w| w.rows()),
            shared_chunks: shared.map_or(1, |w| w.chunks()),
            shared_lanes_log2: shared.map_or(0, lanes),
            cols: gate.cols(),
            n_used: self.n_used,
            tokens: self.tokens,
            shared_tiles,
            oai: u32::from(self.act == GatedAct::SwiGluOai),
            reserved: 0,
        };
        let tiles = shared_tiles + self.groups.n_tiles(self.tokens * self.n_used, gate.n_expert());
        let launch = Launch::grid([params.rows.max(params.shared_rows) / ROWS, tiles, 1], THREADS).shared(SHARED_BYTES);
        (Launch { pdl: self.dependent && device.properties().capability >= (9, 0), ..launch }, params)
    }
}

/// The first half of a mixture of experts: `h` has a row of `gate.rows()` elements for every route.
///
/// # Errors
/// [`OpError::Type`] where [`takes_gate_up_grouped`] says no, else where a shape, an alignment or an overlap is not as
/// [`gpu_kernels::kernels::gate_up_grouped`] asks.
#[expect(unsafe_code, reason = "a launch")]
pub fn gate_up_grouped<D: Device>(device: &D, op: &GateUpGrouped<'_>, x: Q8<'_>, h: Q8<'_>) -> Result<u64> {
    let check = Check("gate_up_grouped");
    let shared = op.shared.as_ref().map(|shared| (&shared.gate, &shared.up));
    if !takes_gate_up_grouped(&op.gate, &op.up, shared) {
        return Err(OpError::Type { op: "gate_up_grouped", ty: op.gate.ty() });
    }
    if op.tokens == 0 {
        return Ok(0);
    }
    op.check(check, device, x, h)?;
    let (launch, params) = op.launch(device);
    check.grid_yz("tiles", launch.grid[1])?;
    let float = |slice: Option<Slice<'_, f32>>| slice.map_or(std::ptr::null(), Slice::ptr);
    let weights = |w: Option<Matrix<'_>>| w.map_or(std::ptr::null(), |w| w.data().ptr());
    let shared_h = op.shared.map(|shared| shared.h);
    // What is not there has no results, and no block writes them.
    let null = std::ptr::null_mut();
    let args = (
        op.gate.data().ptr(),
        op.up.data().ptr(),
        weights(op.shared.map(|shared| shared.gate)),
        weights(op.shared.map(|shared| shared.up)),
        x.qs.ptr(),
        x.d.ptr(),
        x.s.ptr(),
        float(op.gate_bias),
        float(op.up_bias),
        op.groups.order.ptr(),
        op.groups.tiles.ptr(),
        h.qs.ptr_mut(),
        h.d.ptr_mut(),
        h.s.ptr_mut(),
        shared_h.map_or(std::ptr::null_mut(), |h| h.qs.ptr_mut()),
        shared_h.map_or(null, |h| h.d.ptr_mut()),
        shared_h.map_or(null, |h| h.s.ptr_mut()),
        params,
    );
    let shared_ty = op.shared.map(|shared| shared.gate.ty());
    macro_rules! launch {
        ($($ty:ident: $same:ident $q8_0:ident),+) => {
            match (op.gate.ty(), shared_ty) {
                $(
                    // SAFETY: `Matrix` has checked the weights; `check` the shapes, alignment and overlap; geometry and
                    // parameters come from the functions that the kernel uses. Order and tiles have the extents that
                    // the kernel reads, and those that group routes alone write them. What is null is not read.
                    (GgmlType::$ty, None | Some(GgmlType::$ty)) => unsafe { device.launch(kernels::$same, launch, args)? },
                    // SAFETY: as above.
                    (GgmlType::$ty, _) => unsafe { device.launch(kernels::$q8_0, launch, args)? },
                )+
                // SAFETY: as above.
                (GgmlType::Q8_0, _) => unsafe { device.launch(kernels::gate_up_grouped_q8_0, launch, args)? },
                (ty @ (GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16), _) => {
                    return Err(OpError::Type { op: "gate_up_grouped", ty });
                }
            }
        };
    }
    launch!(
        Q4K: gate_up_grouped_q4_k gate_up_grouped_q4_k_q8_0, Q5K: gate_up_grouped_q5_k gate_up_grouped_q5_k_q8_0,
        Q6K: gate_up_grouped_q6_k gate_up_grouped_q6_k_q8_0, Q4_0: gate_up_grouped_q4_0 gate_up_grouped_q4_0_q8_0,
        Q4_1: gate_up_grouped_q4_1 gate_up_grouped_q4_1_q8_0, Q5_0: gate_up_grouped_q5_0 gate_up_grouped_q5_0_q8_0,
        Q5_1: gate_up_grouped_q5_1 gate_up_grouped_q5_1_q8_0,
        Mxfp4: gate_up_grouped_mxfp4 gate_up_grouped_mxfp4_q8_0
    );
    let (tokens, routes) = (u64::from(op.tokens), u64::from(op.tokens) * u64::from(op.n_used));
    let half = |w: Matrix<'_>, n_matrix: u64, n_result: u64| {
        2 * n_matrix * u64::from(w.rows()) * w.row_bytes() + Q8::bytes(n_result * u64::from(w.rows()))
    };
    // Each expert's weights once, at most as many experts as routes.
    Ok(half(op.gate, u64::from(op.gate.n_expert()).min(routes), routes)
        + op.shared.map_or(0, |shared| half(shared.gate, 1, tokens))
        + Q8::bytes(tokens * u64::from(x.cols)))
}
