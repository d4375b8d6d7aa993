//! Launcher of `expert_down_grouped_*`.

use cuda_std::launch::Launch;
use gpu_kernels::blocks::GgmlType;
use gpu_kernels::kernels::expert_down_grouped::{self as kernels, ExpertDownGroupedParams, ROWS};
use gpu_kernels::kernels::grouped::{THREADS, TILE, TILE_SIZE};
use gpu_kernels::params::MatvecShape;

use super::{Check, Matrix, OpError, Q8, Result, RouteGroups, takes_expert_down, takes_q8};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// `y[i] = w[e]·h[i] + bias[e]` for every route `i` to expert `e`, and `shared_y[t] = shared_w·shared_h[t]` for every
/// token.
#[derive(Clone, Copy, Debug)]
pub struct ExpertDownGrouped<'a> {
    /// The experts' weights.
    pub w: Matrix<'a>,
    /// `[n_expert, rows]`.
    pub bias: Option<Slice<'a, f32>>,
    /// The routes by expert, in tiles of [`TILE`].
    pub groups: RouteGroups<'a>,
    /// Experts of a token.
    pub n_used: u32,
    /// The expert that every token goes to.
    pub shared: Option<SharedDownGrouped<'a>>,
    /// Launch while the grid ahead still runs.
    pub dependent: bool,
    /// Tokens.
    pub tokens: u32,
}

/// The second half of the expert that every token goes to.
#[derive(Clone, Copy, Debug)]
pub struct SharedDownGrouped<'a> {
    /// Its weights, one matrix.
    pub w: Matrix<'a>,
    /// `[tokens, w.cols()]`.
    pub h: Q8<'a>,
    /// The result, `[tokens, w.rows()]`.
    pub y: Slice<'a, f32>,
}

impl ExpertDownGrouped<'_> {
    fn check<D: Device>(&self, check: Check, device: &D, h: Q8<'_>, y: Slice<'_, f32>) -> Result<()> {
        let (w, tokens, rows) = (self.w, u64::from(self.tokens), u64::from(self.w.rows()));
        let Some(routes) = self.tokens.checked_mul(self.n_used).filter(|routes| *routes > 0) else {
            return check.fail("tokens", format!("{tokens} of {} routes", self.n_used));
        };
        check.that("tiles", self.groups.tile == TILE_SIZE, "are not those of the kernel")?;
        self.groups.check(check, device, routes, w.n_expert())?;
        check.that("h", h.cols == w.cols(), "columns differ from the weights'")?;
        h.check(check, device, u64::from(routes))?;
        let h_elems = u64::from(routes) * u64::from(h.cols);
        check.that("h", h_elems <= u64::from(u32::MAX), "has more elements than the kernel counts")?;
        check.that("w", w.n_blocks() < 1 << 32, "has more blocks than the kernel counts")?;
        device.check_owner(w.data())?;
        device.check_owner(y)?;
        check.rows("y", y, u64::from(routes), rows, rows)?;
        let mut inputs = vec![w.data(), h.qs.as_bytes(), h.d.as_bytes(), h.s.as_bytes()];
        inputs.extend([self.groups.order.as_bytes(), self.groups.tiles.as_bytes()]);
        if let Some(bias) = self.bias {
            device.check_owner(bias)?;
            check.rows("bias", bias, u64::from(w.n_expert()), rows, rows)?;
            inputs.push(bias.as_bytes());
        }
        if let Some(shared) = self.shared {
            device.check_owner(shared.w.data())?;
            device.check_owner(shared.y)?;
            let fits = shared.w.rows() == w.rows() && shared.w.n_expert() == 1 && shared.w.cols() == shared.h.cols;
            check.that("shared", fits, "has other rows than the experts, or other columns than its activations")?;
            shared.h.check(check, device, tokens)?;
            let h_elems = tokens * u64::from(shared.h.cols);
            check.that("shared", h_elems <= u64::from(u32::MAX), "has more elements than the kernel counts")?;
            check.that("shared", shared.w.n_blocks() < 1 << 32, "has more blocks than the kernel counts")?;
            check.rows("shared y", shared.y, tokens, rows, rows)?;
            inputs.extend([shared.w.data(), shared.h.qs.as_bytes(), shared.h.d.as_bytes(), shared.h.s.as_bytes()]);
            check.apart("y", y, shared.y)?;
            for input in &inputs {
                check.apart("shared y", shared.y, *input)?;
            }
        }
        for input in inputs {
            check.apart("y", y, input)?;
        }
        Ok(())
    }

    fn params(&self) -> ExpertDownGroupedParams {
        let lanes = |w: Matrix<'_>| MatvecShape::lanes_log2(w.ty(), w.chunks());
        let (w, shared) = (self.w, self.shared.map(|shared| shared.w));
        ExpertDownGroupedParams {
            planes: w.planes(),
            shared_planes: shared.map_or([0; 4], |w| w.planes()),
            rows: w.rows(),
            chunks: w.chunks(),
            lanes_log2: lanes(w),
            cols: w.cols(),
            shared_chunks: shared.map_or(1, |w| w.chunks()),
            shared_lanes_log2: shared.map_or(0, lanes),
            shared_cols: shared.map_or(0, |w| w.cols()),
            tokens: self.tokens,
            shared_tiles: shared.map_or(0, |_| self.tokens.div_ceil(TILE)),
            reserved: 0,
        }
    }
}

/// The second half of a mixture of experts before its outputs are joined: `y` is `[tokens·n_used, w.rows()]`.
///
/// # Errors
/// [`OpError::Type`] where [`takes_expert_down`] says no, else where a shape, an alignment or an overlap is not as
/// [`gpu_kernels::kernels::expert_down_grouped`] asks.
#[expect(unsafe_code, reason = "a launch")]
pub fn expert_down_grouped<D: Device>(
    device: &D,
    op: &ExpertDownGrouped<'_>,
    h: Q8<'_>,
    y: Slice<'_, f32>,
) -> Result<u64> {
    let check = Check("expert_down_grouped");
    let shared_ty = op.shared.map(|shared| shared.w.ty());
    if !takes_expert_down(op.w.ty(), shared_ty) {
        let ty = shared_ty.filter(|_| takes_q8(op.w.ty())).unwrap_or(op.w.ty());
        return Err(OpError::Type { op: "expert_down_grouped", ty });
    }
    if op.tokens == 0 {
        return Ok(0);
    }
    op.check(check, device, h, y)?;
    let (params, routes) = (op.params(), op.tokens * op.n_used);
    let tiles = params.shared_tiles + op.groups.n_tiles(routes, op.w.n_expert());
    check.grid_yz("tiles", tiles)?;
    let float = |slice: Option<Slice<'_, f32>>| slice.map_or(std::ptr::null(), Slice::ptr);
    let shared_h = op.shared.map(|shared| shared.h);
    let args = (
        op.w.data().ptr(),
        h.qs.ptr(),
        h.d.ptr(),
        h.s.ptr(),
        float(op.bias),
        op.shared.map_or(std::ptr::null(), |shared| shared.w.data().ptr()),
        shared_h.map_or(std::ptr::null(), |h| h.qs.ptr()),
        float(shared_h.map(|h| h.d)),
        float(shared_h.map(|h| h.s)),
        op.groups.order.ptr(),
        op.groups.tiles.ptr(),
        y.ptr_mut(),
        op.shared.map_or(std::ptr::null_mut(), |shared| shared.y.ptr_mut()),
        params,
    );
    let launch = Launch::grid([op.w.rows().div_ceil(ROWS), tiles, 1], THREADS);
    let launch = Launch { pdl: op.dependent && device.properties().capability >= (9, 0), ..launch };
    macro_rules! launch {
        ($($ty:ident: $same:ident $q8_0:ident),+) => {
            match (op.w.ty(), shared_ty) {
                $(
                    // SAFETY: `Matrix` has checked the weights; `check` the shapes, alignment and overlap; geometry and
                    // parameters come from the functions that the kernel uses. Order and tiles have the extents that
                    // the kernel reads, and those that group routes alone write them. What is null is not read.
                    (GgmlType::$ty, None | Some(GgmlType::$ty)) => unsafe { device.launch(kernels::$same, launch, args)? },
                    // SAFETY: as above.
                    (GgmlType::$ty, _) => unsafe { device.launch(kernels::$q8_0, launch, args)? },
                )+
                // SAFETY: as above.
                (GgmlType::Q8_0, _) => unsafe { device.launch(kernels::expert_down_grouped_q8_0, launch, args)? },
                (ty @ (GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16), _) => {
                    return Err(OpError::Type { op: "expert_down_grouped", ty });
                }
            }
        };
    }
    launch!(
        Q4K: expert_down_grouped_q4_k expert_down_grouped_q4_k_q8_0,
        Q5K: expert_down_grouped_q5_k expert_down_grouped_q5_k_q8_0,
        Q6K: expert_down_grouped_q6_k expert_down_grouped_q6_k_q8_0,
        Q4_0: expert_down_grouped_q4_0 expert_down_grouped_q4_0_q8_0,
        Q4_1: expert_down_grouped_q4_1 expert_down_grouped_q4_1_q8_0,
        Q5_0: expert_down_grouped_q5_0 expert_down_grouped_q5_0_q8_0,
        Q5_1: expert_down_grouped_q5_1 expert_down_grouped_q5_1_q8_0,
        Mxfp4: expert_down_grouped_mxfp4 expert_down_grouped_mxfp4_q8_0
    );
    let product = |w: Matrix<'_>, n_matrix: u32, n_row: u32| {
        let rows = u64::from(w.rows());
        u64::from(n_matrix) * rows * w.row_bytes()
            + u64::from(n_row) * 4 * rows
            + Q8::bytes(u64::from(n_row) * u64::from(w.cols()))
    };
    // Each expert's weights once, at most as many experts as routes.
    Ok(product(op.w, op.w.n_expert().min(routes), routes)
        + op.shared.map_or(0, |shared| product(shared.w, 1, op.tokens)))
}
