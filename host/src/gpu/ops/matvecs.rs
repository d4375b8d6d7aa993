//! Launcher of `matvecs_*`.

use cuda_std::launch::Launch;
use gpu_kernels::blocks::GgmlType;
use gpu_kernels::kernels::matvecs as kernels;
use gpu_kernels::params::{
    Activations, MATVEC_BLOCK, MATVEC_SHARED_BYTES, MATVECS_MAX, MatvecShape, MatvecsParams, MatvecsPart,
};

use super::{Check, Matrix, OpError, Q8, Result, takes_q8};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// One of several products of the same activations.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// The weights, one matrix.
    pub w: Matrix<'a>,
    /// `[tokens, y_stride]`.
    pub y: Slice<'a, f32>,
    /// Elements from one row of `y` to the next.
    pub y_stride: u32,
}

impl Product<'_> {
    pub(super) fn is_plain(&self) -> bool {
        self.w.ty() == GgmlType::F32
    }

    /// The form of the activations, and how the kernel is unrolled for it.
    fn shape(&self, tokens: u32) -> MatvecShape {
        let form = match (self.is_plain(), tokens) {
            (true, _) => Activations::Plain,
            (false, 1) => Activations::Q8,
            (false, _) => Activations::Q8x4,
        };
        MatvecShape::new(self.w.ty(), form)
    }

    fn blocks(&self, tokens: u32) -> u32 {
        self.w.rows().div_ceil(self.shape(tokens).rows_per_block(self.w.ty(), self.w.chunks()))
    }

    pub(super) fn check<D: Device>(&self, check: Check, device: &D, tokens: u32, cols: u32) -> Result<()> {
        let w = self.w;
        device.check_owner(w.data())?;
        device.check_owner(self.y)?;
        check.that("w", w.cols() == cols && w.n_expert() == 1, "is not one matrix with the activations' columns")?;
        check.rows("y", self.y, u64::from(tokens), u64::from(self.y_stride), u64::from(w.rows()))?;
        check.apart("y", self.y, w.data())
    }
}

/// The quantised type of products that one launch can take together: all but F32 matrices have it, and one at
/// least. `None` where they have none or several, or a float type without a kernel.
pub fn common_type(types: impl IntoIterator<Item = GgmlType>) -> Option<GgmlType> {
    let mut quantised = types.into_iter().filter(|ty| *ty != GgmlType::F32);
    let first = quantised.next()?;
    (takes_q8(first) && quantised.all(|ty| ty == first)).then_some(first)
}

/// `y_i = w_i·x` for `tokens` rows of `x`, which `q8` is the int8 form of: up to four products in one launch, of
/// matrices of one quantised type or F32. With `dependent`, weights are loaded before the grid ahead has ended.
///
/// # Errors
/// [`OpError::Type`] where the types have no [`common_type`], else where a shape, an alignment or an overlap is not as
/// [`gpu_kernels::kernels::matvecs`] asks.
#[expect(unsafe_code, reason = "a launch")]
pub fn matvecs<D: Device>(
    device: &D,
    products: &[Product<'_>],
    x: Slice<'_, f32>,
    q8: Q8<'_>,
    tokens: u32,
    dependent: bool,
) -> Result<u64> {
    let check = Check("matvecs");
    check.that("w", (1..=MATVECS_MAX).contains(&products.len()), "is none, or more than four")?;
    let Some(ty) = common_type(products.iter().map(|product| product.w.ty())) else {
        return Err(OpError::Type { op: "matvecs", ty: products[0].w.ty() });
    };
    if tokens == 0 {
        return Ok(0);
    }
    let cols = q8.cols;
    check.grid_yz("tokens", tokens)?;
    device.check_owner(x)?;
    check.rows("x", x, u64::from(tokens), u64::from(cols), u64::from(cols))?;
    check.aligned("x", x, 16)?;
    q8.check(check, device, u64::from(tokens))?;
    for (i, product) in products.iter().enumerate() {
        product.check(check, device, tokens, cols)?;
        check.apart("y", product.y, x)?;
        check.apart("y", product.y, q8.qs)?;
        check.apart("y", product.y, q8.d)?;
        check.apart("y", product.y, q8.s)?;
        for other in &products[..i] {
            check.apart("y", product.y, other.y)?;
            check.apart("y", product.y, other.w.data())?;
            check.apart("y", other.y, product.w.data())?;
        }
    }

    let absent =
        MatvecsPart { planes: [0; 4], rows: 1, chunks: 1, lanes_log2: 0, y_stride: 1, first_block: u32::MAX, plain: 0 };
    let mut params = MatvecsParams { parts: [absent; MATVECS_MAX], cols, tokens };
    let mut blocks = 0;
    for (part, product) in params.parts.iter_mut().zip(products) {
        let w = product.w;
        *part = MatvecsPart {
            planes: w.planes(),
            rows: w.rows(),
            chunks: w.chunks(),
            lanes_log2: MatvecShape::lanes_log2(w.ty(), w.chunks()),
            y_stride: product.y_stride,
            first_block: blocks,
            plain: u32::from(product.is_plain()),
        };
        // Four times 2^26 rows at most.
        blocks += product.blocks(tokens);
    }
    let part = |i: usize| products.get(i).unwrap_or(&products[0]);
    let (w, y) = (|i| part(i).w.data().ptr(), |i| part(i).y.ptr_mut());
    let (qs, d, s) = (q8.qs.ptr(), q8.d.ptr(), q8.s.ptr());
    let args = (w(0), w(1), w(2), w(3), x.ptr(), qs, d, s, y(0), y(1), y(2), y(3), params);
    let tiles = if tokens == 1 { 1 } else { tokens.div_ceil(Activations::Q8x4.tokens()) };
    let launch = Launch::grid([blocks, 1, tiles], MATVEC_BLOCK).shared(MATVEC_SHARED_BYTES);
    let launch = Launch { pdl: dependent && device.properties().capability >= (9, 0), ..launch };
    macro_rules! launch {
        ($($ty:ident: $one:ident $four:ident),+) => {
            match (ty, tokens) {
                // SAFETY: `Matrix` has checked the weights; shapes, strides, alignment and overlap were checked above;
                // geometry and parameters come from the functions that the kernel uses.
                $((GgmlType::$ty, 1) => unsafe { device.launch(kernels::$one, launch, args)? },)+
                // SAFETY: as above.
                $((GgmlType::$ty, _) => unsafe { device.launch(kernels::$four, launch, args)? },)+
                (GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16, _) => return Err(OpError::Type { op: "matvecs", ty }),
            }
        };
    }
    launch!(
        Q4K: matvecs_q4_k matvecs_q4_k_x4, Q5K: matvecs_q5_k matvecs_q5_k_x4, Q6K: matvecs_q6_k matvecs_q6_k_x4,
        Q8_0: matvecs_q8_0 matvecs_q8_0_x4, Q4_0: matvecs_q4_0 matvecs_q4_0_x4, Q4_1: matvecs_q4_1 matvecs_q4_1_x4,
        Q5_0: matvecs_q5_0 matvecs_q5_0_x4, Q5_1: matvecs_q5_1 matvecs_q5_1_x4, Mxfp4: matvecs_mxfp4 matvecs_mxfp4_x4
    );
    let weights = |product: &Product<'_>| u64::from(product.w.rows()) * (product.w.row_bytes() + 4 * u64::from(tokens));
    Ok(products.iter().map(weights).sum::<u64>() + Q8::bytes(u64::from(tokens) * u64::from(cols)))
}
