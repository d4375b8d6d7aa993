//! Launcher of `norm_matvecs_*`.

use cuda_std::launch::Launch;
use gpu_kernels::blocks::GgmlType;
use gpu_kernels::kernels::norm_matvecs::{
    self as kernels, MAX_COLS, NormMatvecsParams, NormMatvecsPart, THREADS, rows_per_item, shared_bytes,
};
use gpu_kernels::params::{MATVECS_MAX, MatvecShape, WARP};

use super::{Check, OpError, Product, Q8, Result, common_type};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// A row to norm, and where the normed row goes.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// `[cols]`.
    pub x: Slice<'a, f32>,
    /// `[cols]`.
    pub w: Slice<'a, f32>,
    /// Of the norm.
    pub eps: f32,
    /// The normed row, `[cols]`.
    pub y: Slice<'a, f32>,
    /// Its int8 form.
    pub q8: Q8<'a>,
}

/// Whether [`norm_matvecs`] takes rows of so many columns.
pub fn takes_norm(cols: u32) -> bool {
    cols <= MAX_COLS
}

impl Norm<'_> {
    fn check<D: Device>(&self, check: Check, device: &D) -> Result<()> {
        let Norm { x, w, y, q8, .. } = *self;
        let n = q8.cols as usize;
        check.that("x", n > 0 && takes_norm(q8.cols), "has no columns, or more than the kernel takes")?;
        for (name, slice) in [("x", x), ("norm_w", w), ("norm_y", y)] {
            device.check_owner(slice)?;
            check.that(name, slice.len() == n, "has another number of elements than the int8 form")?;
            check.aligned(name, slice, 16)?;
        }
        check.apart("norm_y", y, x)?;
        check.apart("norm_y", y, w)?;
        q8.check_output(check, device, 1, &[x, w, y])
    }
}

/// The results overlap nothing; the matrices have the row's columns.
fn check_products<D: Device>(check: Check, device: &D, products: &[Product<'_>], norm: &Norm<'_>) -> Result<()> {
    for (i, product) in products.iter().enumerate() {
        product.check(check, device, 1, norm.q8.cols)?;
        let w = product.w.data();
        for row in [norm.x, norm.w, norm.y] {
            check.apart("y", product.y, row)?;
        }
        check.apart("y", product.y, norm.q8.qs)?;
        check.apart("y", product.y, norm.q8.d)?;
        check.apart("y", product.y, norm.q8.s)?;
        check.apart("norm_y", norm.y, w)?;
        check.apart("qs", norm.q8.qs, w)?;
        check.apart("d", norm.q8.d, w)?;
        check.apart("s", norm.q8.s, w)?;
        for other in &products[..i] {
            check.apart("y", product.y, other.y)?;
            check.apart("y", product.y, other.w.data())?;
            check.apart("y", other.y, product.w.data())?;
        }
    }
    Ok(())
}

/// What the kernel is told of the products.
fn params(products: &[Product<'_>], ty: GgmlType, norm: &Norm<'_>) -> NormMatvecsParams {
    let absent = NormMatvecsPart { planes: [0; 4], rows: 1, plain: 0, first: u32::MAX, reserved: 0 };
    let mut params = NormMatvecsParams {
        parts: [absent; MATVECS_MAX],
        items: 0,
        tiles: 0,
        cols: norm.q8.cols,
        chunks: 1,
        lanes_log2: 0,
        plain_chunks: 1,
        plain_lanes_log2: 0,
        eps: norm.eps,
    };
    for (part, product) in params.parts.iter_mut().zip(products) {
        let (w, plain) = (product.w, product.is_plain());
        let lanes_log2 = MatvecShape::lanes_log2(w.ty(), w.chunks());
        // At most four times 2^26 of either.
        let count = if plain {
            (params.plain_chunks, params.plain_lanes_log2) = (w.chunks(), lanes_log2);
            &mut params.tiles
        } else {
            (params.chunks, params.lanes_log2) = (w.chunks(), lanes_log2);
            &mut params.items
        };
        *part =
            NormMatvecsPart { planes: w.planes(), rows: w.rows(), plain: u32::from(plain), first: *count, reserved: 0 };
        let rows = if plain { THREADS >> lanes_log2 } else { rows_per_item(ty, lanes_log2) };
        *count += w.rows().div_ceil(rows);
    }
    params
}

/// `norm.y = norm(x)` as [`rms_norm_q8`](super::rms_norm_q8) makes it, and `y_i = w_i·norm.y` as
/// [`matvecs`](super::matvecs()) does, for one row: both in one launch. With `dependent`, weights are loaded before the
/// grid ahead has ended.
///
/// # Errors
/// [`OpError::Type`] where the types have no [`common_type`], else where a shape, an alignment or an overlap is not as
/// [`gpu_kernels::kernels::norm_matvecs`] asks.
#[expect(unsafe_code, reason = "a launch")]
pub fn norm_matvecs<D: Device>(device: &D, products: &[Product<'_>], norm: &Norm<'_>, dependent: bool) -> Result<u64> {
    let check = Check("norm_matvecs");
    check.that("w", (1..=MATVECS_MAX).contains(&products.len()), "is none, or more than four")?;
    let Some(ty) = common_type(products.iter().map(|product| product.w.ty())) else {
        return Err(OpError::Type { op: "norm_matvecs", ty: products[0].w.ty() });
    };
    norm.check(check, device)?;
    check_products(check, device, products, norm)?;

    let params = params(products, ty, norm);
    let part = |i: usize| products.get(i).unwrap_or(&products[0]);
    let (w, y) = (|i| part(i).w.data().ptr(), |i| part(i).y.ptr_mut());
    let q8 = norm.q8;
    let args = (
        w(0),
        w(1),
        w(2),
        w(3),
        norm.x.ptr(),
        norm.w.ptr(),
        norm.y.ptr_mut(),
        q8.qs.ptr_mut(),
        q8.d.ptr_mut(),
        q8.s.ptr_mut(),
        y(0),
        y(1),
        y(2),
        y(3),
        params,
    );
    let wanted = params.items.div_ceil(THREADS / WARP).max(params.tiles);
    let blocks = wanted.min(device.properties().n_sm);
    let launch = Launch::linear(blocks, THREADS).shared(shared_bytes(q8.cols));
    let launch = Launch { pdl: dependent && device.properties().capability >= (9, 0), ..launch };
    macro_rules! launch {
        ($($ty:ident: $name:ident),+) => {
            match ty {
                // SAFETY: `Matrix` has checked the weights; shapes, alignment and overlap were checked above; geometry
                // and parameters come from the functions that the kernel uses.
                $(GgmlType::$ty => unsafe { device.launch(kernels::$name, launch, args)? },)+
                GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16 => {
                    return Err(OpError::Type { op: "norm_matvecs", ty });
                }
            }
        };
    }
    launch!(
        Q4K: norm_matvecs_q4_k, Q5K: norm_matvecs_q5_k, Q6K: norm_matvecs_q6_k, Q8_0: norm_matvecs_q8_0,
        Q4_0: norm_matvecs_q4_0, Q4_1: norm_matvecs_q4_1, Q5_0: norm_matvecs_q5_0, Q5_1: norm_matvecs_q5_1,
        Mxfp4: norm_matvecs_mxfp4
    );
    let weights = |product: &Product<'_>| u64::from(product.w.rows()) * (product.w.row_bytes() + 4);
    let n = u64::from(q8.cols);
    Ok(products.iter().map(weights).sum::<u64>() + 12 * n + Q8::bytes(n))
}
