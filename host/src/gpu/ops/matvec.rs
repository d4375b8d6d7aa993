//! Launchers of `matvec_*`.

use cuda_std::launch::Launch;
use gpu_kernels::blocks::GgmlType;
use gpu_kernels::kernels::{matvec as kernels, matvec_swept as swept};
use gpu_kernels::params::{
    Activations, MATVEC_ACCUMULATE, MATVEC_BLOCK, MATVEC_SHARED_BYTES, MATVEC_SHARED_X, MatvecParams, MatvecShape, WARP,
};

use super::{Check, Matrix, OpError, Q8, Result};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// Which experts each token is routed to. The ids live on the device; one past the end is read as the
/// last expert.
#[derive(Clone, Copy, Debug)]
pub struct Experts<'a> {
    /// `[tokens, ids_stride]`, the first `n_used` of each row.
    pub ids: Slice<'a, u32>,
    /// Elements from one token's ids to the next token's.
    pub ids_stride: u32,
    /// Experts of a token.
    pub n_used: u32,
    /// Whether a token's routes share its row of `x`; otherwise `x` has a row for each route.
    pub shared_x: bool,
}

/// `y[t, r] (= or +=) bias[r] + Σ_k w[r, k]·x[t, k]` for every token `t`; with experts the rows of `y`
/// are routes, `t·n_used + i`, and `w` and `bias` are those of expert `ids[t, i]`.
#[derive(Clone, Copy, Debug)]
pub struct Matvec<'a> {
    /// The weights.
    pub w: Matrix<'a>,
    /// `[tokens or routes, y_stride]`.
    pub y: Slice<'a, f32>,
    /// Elements from one row of `y` to the next.
    pub y_stride: u32,
    /// `[n_expert, rows]`.
    pub bias: Option<Slice<'a, f32>>,
    /// The routing; without, `w` has one expert.
    pub experts: Option<Experts<'a>>,
    /// `+=` instead of `=`.
    pub accumulate: bool,
    /// Launch while the grid ahead still runs, and load weights before it has ended. Only where nothing
    /// in flight writes the weights; below sm_90 it has no effect.
    pub dependent: bool,
    /// Tokens.
    pub tokens: u32,
}

impl<'a> Matvec<'a> {
    /// `y = w·x` for `tokens` tokens, rows of `y` next to each other.
    pub fn new(w: Matrix<'a>, y: Slice<'a, f32>, tokens: u32) -> Self {
        Matvec { w, y, y_stride: w.rows(), bias: None, experts: None, accumulate: false, dependent: false, tokens }
    }

    pub(super) fn n_used(&self) -> u32 {
        self.experts.map_or(1, |experts| experts.n_used)
    }

    /// Checks everything but `x`, and returns the number of rows that `x` has to have.
    pub(super) fn check<D: Device>(&self, check: Check, device: &D) -> Result<u64> {
        let (w, tokens) = (self.w, u64::from(self.tokens));
        let routes = tokens * u64::from(self.n_used());
        check.grid_yz("tokens", self.tokens)?;
        check.grid_yz("ids", self.n_used())?;
        device.check_owner(w.data())?;
        device.check_owner(self.y)?;
        check.rows("y", self.y, routes, u64::from(self.y_stride), u64::from(w.rows()))?;
        check.apart("y", self.y, w.data())?;
        if let Some(bias) = self.bias {
            device.check_owner(bias)?;
            let rows = u64::from(w.rows());
            check.rows("bias", bias, u64::from(w.n_expert()), rows, rows)?;
            check.apart("y", self.y, bias)?;
        }
        let Some(experts) = self.experts else {
            check.that("ids", w.n_expert() == 1, "missing: the weights are those of several experts")?;
            return Ok(tokens);
        };
        device.check_owner(experts.ids)?;
        check.rows("ids", experts.ids, tokens, u64::from(experts.ids_stride), u64::from(experts.n_used))?;
        check.apart("y", self.y, experts.ids)?;
        Ok(if experts.shared_x { tokens } else { routes })
    }

    fn launch<D: Device>(&self, device: &D, x: Activations) -> Launch {
        let (w, shape) = (self.w, MatvecShape::new(self.w.ty(), x));
        let blocks = w.rows().div_ceil(shape.rows_per_block(w.ty(), w.chunks()));
        let launch = Launch::grid([blocks, self.n_used(), self.tokens.div_ceil(x.tokens())], MATVEC_BLOCK);
        let dependent = self.dependent && device.properties().capability >= (9, 0);
        Launch { pdl: dependent, ..launch }
    }

    fn params(&self, x_stride: u32) -> MatvecParams {
        let w = self.w;
        let shared = if self.experts.is_some_and(|experts| experts.shared_x) { MATVEC_SHARED_X } else { 0 };
        let accumulate = if self.accumulate { MATVEC_ACCUMULATE } else { 0 };
        MatvecParams {
            planes: w.planes(),
            rows: w.rows(),
            chunks: w.chunks(),
            lanes_log2: MatvecShape::lanes_log2(w.ty(), w.chunks()),
            n_expert: w.n_expert(),
            x_stride,
            y_stride: self.y_stride,
            ids_stride: self.experts.map_or(0, |experts| experts.ids_stride),
            n_used: self.n_used(),
            routes: self.tokens * self.n_used(),
            flags: shared | accumulate,
        }
    }

    /// The least traffic: every row of the weights that a route takes (routes of one expert count each,
    /// tokens of a dense product once), and `y`.
    fn bytes(&self) -> u64 {
        let routes = u64::from(self.tokens) * u64::from(self.n_used());
        let matrices = if self.experts.is_some() { routes } else { 1 };
        let y = if self.accumulate { 8 } else { 4 };
        u64::from(self.w.rows()) * (matrices * self.w.row_bytes() + routes * y)
    }

    /// The addresses of the optional operands, null where there are none.
    pub(super) fn optional(&self) -> (*const u32, *const f32) {
        (
            self.experts.map_or(std::ptr::null(), |experts| experts.ids.ptr()),
            self.bias.map_or(std::ptr::null(), Slice::ptr),
        )
    }
}

/// The product with f32 activations, whose rows are `x_stride` elements apart. Every weight type.
///
/// # Errors
/// Where a shape, an alignment or an overlap is not as [`gpu_kernels::kernels::matvec`] asks.
#[expect(unsafe_code, reason = "a launch")]
pub fn matvec<D: Device>(device: &D, op: &Matvec<'_>, x: Slice<'_, f32>, x_stride: u32) -> Result<u64> {
    let check = Check("matvec");
    if op.tokens == 0 || op.n_used() == 0 {
        return Ok(0);
    }
    let x_rows = op.check(check, device)?;
    device.check_owner(x)?;
    check.rows("x", x, x_rows, u64::from(x_stride), u64::from(op.w.cols()))?;
    check.that("x", x_stride.is_multiple_of(4), "stride is no multiple of 4")?;
    check.aligned("x", x, 16)?;
    check.apart("y", op.y, x)?;
    let (ids, bias) = op.optional();
    let form = Activations::Plain;
    let args = (op.w.data().ptr(), x.ptr(), op.y.ptr_mut(), ids, bias, op.params(x_stride));
    let launch = op.launch(device, form).shared(MATVEC_SHARED_BYTES);
    macro_rules! launch {
        ($($ty:ident: $name:ident),+) => {
            match op.w.ty() {
                // SAFETY: `Matrix` has checked the weights; `x`, `y`, `ids`, `bias` and the strides were
                // checked above; geometry and parameters come from the functions the kernel uses.
                $(GgmlType::$ty => unsafe { device.launch(kernels::$name, launch, args)? },)+
            }
        };
    }
    launch!(
        Q4K: matvec_q4_k, Q5K: matvec_q5_k, Q6K: matvec_q6_k, Q8_0: matvec_q8_0, Q4_0: matvec_q4_0,
        Q4_1: matvec_q4_1, Q5_0: matvec_q5_0, Q5_1: matvec_q5_1, Mxfp4: matvec_mxfp4,
        F16: matvec_f16, Bf16: matvec_bf16, F32: matvec_f32
    );
    Ok(op.bytes() + 4 * x_rows * u64::from(op.w.cols()))
}

/// Whether [`matvec_q8`] has a kernel for a weight type: all but the float types.
pub fn takes_q8(ty: GgmlType) -> bool {
    !matches!(ty, GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16)
}

/// The product with quantised activations. Several tokens of a dense product share the weights, four at a
/// time.
///
/// # Errors
/// As [`matvec`]; [`OpError::Type`] for the float types.
#[expect(unsafe_code, reason = "a launch")]
pub fn matvec_q8<D: Device>(device: &D, op: &Matvec<'_>, x: Q8<'_>) -> Result<u64> {
    let check = Check("matvec_q8");
    if op.tokens == 0 || op.n_used() == 0 {
        return Ok(0);
    }
    let x_rows = op.check(check, device)?;
    check.that("x", x.cols == op.w.cols(), "columns differ from the weights'")?;
    x.check(check, device, x_rows)?;
    check.apart("y", op.y, x.qs)?;
    check.apart("y", op.y, x.d)?;
    check.apart("y", op.y, x.s)?;
    if op.tokens == 1 && op.experts.is_none() && x.cols <= swept::MAX_COLS {
        launch_swept(device, op, x)?;
        return Ok(op.bytes() + Q8::bytes(u64::from(op.w.cols())));
    }
    let (ids, bias) = op.optional();
    let form = if op.tokens > 1 && op.experts.is_none() { Activations::Q8x4 } else { Activations::Q8 };
    let (qs, d, s) = (x.qs.ptr(), x.d.ptr(), x.s.ptr());
    let args = (op.w.data().ptr(), qs, d, s, op.y.ptr_mut(), ids, bias, op.params(x.cols));
    let launch = op.launch(device, form);
    macro_rules! launch {
        ($($ty:ident: $one:ident $four:ident),+) => {
            match (op.w.ty(), form) {
                // SAFETY: as in `matvec`; `Q8::check` has checked the activations.
                $((GgmlType::$ty, Activations::Q8x4) => unsafe { device.launch(kernels::$four, launch, args)? },)+
                // SAFETY: as above.
                $((GgmlType::$ty, _) => unsafe { device.launch(kernels::$one, launch, args)? },)+
                (ty @ (GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16), _) => {
                    return Err(OpError::Type { op: "matvec_q8", ty });
                }
            }
        };
    }
    launch!(
        Q4K: matvec_q4_k_q8 matvec_q4_k_q8x4, Q5K: matvec_q5_k_q8 matvec_q5_k_q8x4,
        Q6K: matvec_q6_k_q8 matvec_q6_k_q8x4, Q8_0: matvec_q8_0_q8 matvec_q8_0_q8x4,
        Q4_0: matvec_q4_0_q8 matvec_q4_0_q8x4, Q4_1: matvec_q4_1_q8 matvec_q4_1_q8x4,
        Q5_0: matvec_q5_0_q8 matvec_q5_0_q8x4, Q5_1: matvec_q5_1_q8 matvec_q5_1_q8x4,
        Mxfp4: matvec_mxfp4_q8 matvec_mxfp4_q8x4
    );
    Ok(op.bytes() + Q8::bytes(x_rows * u64::from(op.w.cols())))
}

/// One row of activations and one matrix, in a grid that fits the device at once.
#[expect(unsafe_code, reason = "a launch")]
fn launch_swept<D: Device>(device: &D, op: &Matvec<'_>, x: Q8<'_>) -> Result<()> {
    let params = op.params(x.cols);
    let items = swept::n_items(params.rows, MatvecShape::swept(op.w.ty()).rows, params.lanes_log2);
    let properties = device.properties();
    let most = properties.n_sm * swept::BLOCKS_A_MULTIPROCESSOR;
    let launch = Launch::linear(items.div_ceil(swept::THREADS / WARP).min(most), swept::THREADS);
    let launch = launch.shared(swept::shared_bytes(op.w.cols()));
    let launch = Launch { pdl: op.dependent && properties.capability >= (9, 0), ..launch };
    let (_, bias) = op.optional();
    let args = (op.w.data().ptr(), x.qs.ptr(), x.d.ptr(), x.s.ptr(), op.y.ptr_mut(), bias, params);
    macro_rules! launch {
        ($($ty:ident: $name:ident),+) => {
            match op.w.ty() {
                // SAFETY: the operands were checked by `matvec_q8`; geometry and parameters come from the functions
                // that the kernel uses.
                $(GgmlType::$ty => unsafe { device.launch(swept::$name, launch, args)? },)+
                ty @ (GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16) => {
                    return Err(OpError::Type { op: "matvec_q8", ty });
                }
            }
        };
    }
    launch!(
        Q4K: matvec_swept_q4_k, Q5K: matvec_swept_q5_k, Q6K: matvec_swept_q6_k, Q8_0: matvec_swept_q8_0,
        Q4_0: matvec_swept_q4_0, Q4_1: matvec_swept_q4_1, Q5_0: matvec_swept_q5_0, Q5_1: matvec_swept_q5_1,
        Mxfp4: matvec_swept_mxfp4
    );
    Ok(())
}
