//! Launchers of the element-wise kernels and the gated activations.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::{elementwise, gated_act};

use super::{Check, Q8, Result};
use crate::backend::GatedAct;
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// The launch that gives each of `n` elements a lane, and `n` as the kernel takes it.
fn one_lane_each(check: Check, operand: &'static str, n: usize) -> Result<(Launch, u32)> {
    match u32::try_from(n) {
        Ok(n) => Ok((Launch::linear(n.div_ceil(elementwise::THREADS), elementwise::THREADS), n)),
        Err(_) => check.fail(operand, format!("{n} elements are more than a grid indexes")),
    }
}

/// Requires `len` elements, on this device.
fn operand<D: Device>(check: Check, device: &D, name: &'static str, slice: Slice<'_, f32>, len: usize) -> Result<()> {
    device.check_owner(slice)?;
    check.that(name, slice.len() == len, "has another number of elements")
}

/// `x += y`.
///
/// # Errors
/// Where the lengths differ or the operands overlap.
#[expect(unsafe_code, reason = "a launch")]
pub fn add<D: Device>(device: &D, x: Slice<'_, f32>, y: Slice<'_, f32>) -> Result<u64> {
    let check = Check("add");
    let (launch, n) = one_lane_each(check, "x", x.len())?;
    operand(check, device, "x", x, x.len())?;
    operand(check, device, "y", y, x.len())?;
    check.apart("x", x, y)?;
    if n > 0 {
        // SAFETY: both have `n` elements and are apart; the grid covers them.
        unsafe { device.launch(elementwise::add, launch, (x.ptr_mut(), y.ptr(), n))? };
    }
    Ok(12 * u64::from(n))
}

/// `x += scale·y`.
///
/// # Errors
/// Where the lengths differ or the operands overlap.
#[expect(unsafe_code, reason = "a launch")]
pub fn scale_accumulate<D: Device>(device: &D, x: Slice<'_, f32>, y: Slice<'_, f32>, scale: f32) -> Result<u64> {
    let check = Check("scale_accumulate");
    let (launch, n) = one_lane_each(check, "x", x.len())?;
    operand(check, device, "x", x, x.len())?;
    operand(check, device, "y", y, x.len())?;
    check.apart("x", x, y)?;
    if n > 0 {
        // SAFETY: both have `n` elements and are apart; the grid covers them.
        unsafe { device.launch(elementwise::scale_accumulate, launch, (x.ptr_mut(), y.ptr(), scale, n))? };
    }
    Ok(12 * u64::from(n))
}

/// `x[m] += bias` for the rows of `x`, `[rows, bias.len()]`.
///
/// # Errors
/// Where `x` is not whole rows or the operands overlap.
#[expect(unsafe_code, reason = "a launch")]
pub fn add_bias<D: Device>(device: &D, x: Slice<'_, f32>, bias: Slice<'_, f32>) -> Result<u64> {
    let check = Check("add_bias");
    let (launch, n) = one_lane_each(check, "x", x.len())?;
    device.check_owner(x)?;
    device.check_owner(bias)?;
    check.that("bias", !bias.is_empty() && x.len().is_multiple_of(bias.len()), "does not divide x into rows")?;
    check.apart("x", x, bias)?;
    if n > 0 {
        // SAFETY: `x` has `n` elements in rows of `bias.len()`, which is not 0 and at most `n`.
        unsafe { device.launch(elementwise::add_bias, launch, (x.ptr_mut(), bias.ptr(), bias.len() as u32, n))? };
    }
    Ok(8 * u64::from(n))
}

/// `x *= σ(gate)`.
///
/// # Errors
/// Where the lengths differ or the operands overlap.
#[expect(unsafe_code, reason = "a launch")]
pub fn sigmoid_mul<D: Device>(device: &D, x: Slice<'_, f32>, gate: Slice<'_, f32>) -> Result<u64> {
    let check = Check("sigmoid_mul");
    let (launch, n) = one_lane_each(check, "x", x.len())?;
    operand(check, device, "x", x, x.len())?;
    operand(check, device, "gate", gate, x.len())?;
    check.apart("x", x, gate)?;
    if n > 0 {
        // SAFETY: both have `n` elements and are apart; the grid covers them.
        unsafe { device.launch(elementwise::sigmoid_mul, launch, (x.ptr_mut(), gate.ptr(), n))? };
    }
    Ok(12 * u64::from(n))
}

/// `x[m] += σ(gate[m])·y[m]`, one gate a row.
///
/// # Errors
/// Where the lengths do not agree or the operands overlap.
#[expect(unsafe_code, reason = "a launch")]
pub fn sigmoid_scale_acc<D: Device>(
    device: &D,
    x: Slice<'_, f32>,
    y: Slice<'_, f32>,
    gate: Slice<'_, f32>,
) -> Result<u64> {
    let check = Check("sigmoid_scale_acc");
    let (launch, n) = one_lane_each(check, "x", x.len())?;
    operand(check, device, "x", x, x.len())?;
    operand(check, device, "y", y, x.len())?;
    device.check_owner(gate)?;
    if n == 0 {
        return Ok(0);
    }
    check.that("gate", !gate.is_empty() && x.len().is_multiple_of(gate.len()), "does not divide x into rows")?;
    check.apart("x", x, y)?;
    check.apart("x", x, gate)?;
    let cols = (x.len() / gate.len()) as u32;
    // SAFETY: `x` and `y` have `n` elements in `gate.len()` rows of `cols`, and are apart.
    unsafe { device.launch(elementwise::sigmoid_scale_acc, launch, (x.ptr_mut(), y.ptr(), gate.ptr(), cols, n))? };
    Ok(12 * u64::from(n))
}

/// Splits rows of per-head pairs `[n_head, 2, head_dim]` into `q` and `gate`.
///
/// # Errors
/// Where the lengths do not agree or the operands overlap.
#[expect(unsafe_code, reason = "a launch")]
pub fn split_gate<D: Device>(
    device: &D,
    qg: Slice<'_, f32>,
    q: Slice<'_, f32>,
    gate: Slice<'_, f32>,
    head_dim: u32,
) -> Result<u64> {
    let check = Check("split_gate");
    let (launch, n) = one_lane_each(check, "q", q.len())?;
    operand(check, device, "gate", gate, q.len())?;
    operand(check, device, "qg", qg, 2 * q.len())?;
    device.check_owner(q)?;
    check.that("q", head_dim > 0 && q.len().is_multiple_of(head_dim as usize), "is not whole heads")?;
    check.apart("q", q, qg)?;
    check.apart("gate", gate, qg)?;
    check.apart("gate", gate, q)?;
    if n > 0 {
        let args = (qg.ptr(), q.ptr_mut(), gate.ptr_mut(), head_dim, n);
        // SAFETY: `q` and `gate` have `n` elements in whole heads, `qg` has `2n`, and none overlap.
        unsafe { device.launch(elementwise::split_gate, launch, args)? };
    }
    Ok(16 * u64::from(n))
}

/// `out[m] = [a[m] | b[m]]` for rows of `cols` elements.
///
/// # Errors
/// Where the lengths do not agree or the operands overlap.
#[expect(unsafe_code, reason = "a launch")]
pub fn join_rows<D: Device>(
    device: &D,
    a: Slice<'_, f32>,
    b: Slice<'_, f32>,
    out: Slice<'_, f32>,
    cols: u32,
) -> Result<u64> {
    let check = Check("join_rows");
    let (launch, n) = one_lane_each(check, "a", a.len())?;
    device.check_owner(a)?;
    operand(check, device, "b", b, a.len())?;
    operand(check, device, "out", out, 2 * a.len())?;
    check.that("a", cols > 0 && a.len().is_multiple_of(cols as usize), "is not whole rows")?;
    check.apart("out", out, a)?;
    check.apart("out", out, b)?;
    if n > 0 {
        // SAFETY: `a` and `b` have `n` elements in whole rows, `out` has `2n` and overlaps neither.
        unsafe { device.launch(elementwise::join_rows, launch, (a.ptr(), b.ptr(), out.ptr_mut(), cols, n))? };
    }
    Ok(16 * u64::from(n))
}

/// `out[i] = x[rows[i]]` for rows of `cols` elements; `rows` were checked when the batch was made.
///
/// # Errors
/// Where the lengths do not agree or the operands overlap.
///
/// # Safety
/// Every element of `rows` is below `x.len() / cols`.
#[expect(unsafe_code, reason = "a launch, whose indices live on the device")]
pub unsafe fn gather_rows<D: Device>(
    device: &D,
    x: Slice<'_, f32>,
    rows: Slice<'_, u32>,
    out: Slice<'_, f32>,
    cols: u32,
) -> Result<u64> {
    let check = Check("gather_rows");
    let (launch, n) = one_lane_each(check, "out", out.len())?;
    device.check_owner(rows)?;
    device.check_owner(x)?;
    operand(check, device, "out", out, rows.len().saturating_mul(cols as usize))?;
    check.apart("out", out, x)?;
    check.apart("out", out, rows)?;
    if n > 0 {
        // SAFETY: `out` has `n = rows·cols` elements; the rows are the caller's promise; the kernel waits for the
        // grid ahead before it reads.
        unsafe {
            device.launch(
                elementwise::gather_rows,
                launch.dependent(),
                (x.ptr(), rows.ptr(), out.ptr_mut(), cols, n),
            )?
        };
    }
    Ok(8 * u64::from(n))
}

/// `out = act(gate, up)`; `out` may be `gate` or `up`.
///
/// # Errors
/// Where the lengths differ.
#[expect(unsafe_code, reason = "a launch")]
pub fn gated_act<D: Device>(
    device: &D,
    act: GatedAct,
    gate: Slice<'_, f32>,
    up: Slice<'_, f32>,
    out: Slice<'_, f32>,
) -> Result<u64> {
    let check = Check("gated_act");
    let (launch, n) = one_lane_each(check, "out", out.len())?;
    operand(check, device, "out", out, out.len())?;
    for (name, x) in [("gate", gate), ("up", up)] {
        operand(check, device, name, x, out.len())?;
        check.that("out", x.address() == out.address() || !out.overlaps(x), "overlaps an input in part")?;
    }
    if n > 0 {
        let args = (gate.ptr(), up.ptr(), out.ptr_mut(), n);
        // SAFETY: the three have `n` elements; `out` is apart from the inputs or equal to one.
        unsafe {
            match act {
                GatedAct::SwiGlu => device.launch(gated_act::swiglu, launch, args)?,
                GatedAct::SwiGluOai => device.launch(gated_act::swiglu_oai, launch, args)?,
            }
        }
    }
    Ok(12 * u64::from(n))
}

/// [`gated_act`] or, without `act`, `out = gate·σ(up)`; the result also goes to `q8` as
/// [`quantize_q8`](super::quantize_q8()) gives it. `out` is apart from the inputs, or `gate` without `act`.
///
/// # Errors
/// Where the lengths do not agree, or rows are no multiple of 32.
#[expect(unsafe_code, reason = "a launch")]
pub fn gated_act_q8<D: Device>(
    device: &D,
    act: Option<GatedAct>,
    gate: Slice<'_, f32>,
    up: Slice<'_, f32>,
    out: Slice<'_, f32>,
    q8: Q8<'_>,
) -> Result<u64> {
    let check = Check("gated_act_q8");
    let (_, n) = one_lane_each(check, "out", out.len())?;
    operand(check, device, "out", out, out.len())?;
    check.that("q8", q8.cols > 0 && n.is_multiple_of(q8.cols), "does not divide out into rows")?;
    // A lane steps past the end by at most a block.
    check.that("out", n <= u32::MAX - 4 * gated_act::THREADS, "has too many elements")?;
    for (name, x) in [("gate", gate), ("up", up)] {
        operand(check, device, name, x, out.len())?;
        check.aligned(name, x, 16)?;
        let in_place = act.is_none() && name == "gate" && x.address() == out.address();
        check.that("out", in_place || !out.overlaps(x), "overlaps an input")?;
    }
    check.aligned("out", out, 16)?;
    q8.check_output(check, device, u64::from(n / q8.cols), &[gate, up, out])?;
    if n > 0 {
        let launch = Launch::linear(n.div_ceil(4 * gated_act::THREADS), gated_act::THREADS).dependent();
        let (qs, d, s) = (q8.qs.ptr_mut(), q8.d.ptr_mut(), q8.s.ptr_mut());
        let args = (gate.ptr(), up.ptr(), out.ptr_mut(), qs, d, s, n);
        // SAFETY: the three have `n` elements, whole rows of a multiple of 32; alignment and overlap were checked
        // above; the kernels wait for the grid ahead before they read.
        unsafe {
            match act {
                Some(GatedAct::SwiGlu) => device.launch(gated_act::swiglu_q8, launch, args)?,
                Some(GatedAct::SwiGluOai) => device.launch(gated_act::swiglu_oai_q8, launch, args)?,
                None => device.launch(gated_act::sigmoid_mul_q8, launch, args)?,
            }
        }
    }
    Ok(12 * u64::from(n) + Q8::bytes(u64::from(n)))
}
