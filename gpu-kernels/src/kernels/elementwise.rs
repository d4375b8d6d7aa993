//! Element-wise operations on activations, one lane an element.
//!
//! Rows are `[rows, cols]`, contiguous. Launch: `Launch::linear(ceil(n / THREADS), THREADS)`.

use cuda_std::{pdl, prelude::*};

/// Lanes a block.
pub const THREADS: u32 = 256;

/// `x[i] += y[i]`.
///
/// # Safety
/// Grid covers `n` lanes; `x` and `y` have `n` elements and do not overlap.
#[kernel(max_threads = 256)]
pub unsafe fn add(x: *mut f32, y: *const f32, n: u32) {
    let i = thread::index_1d();
    if i < n {
        // SAFETY: `i < n`, and this lane alone touches element `i`.
        unsafe { st(x.add(i as usize), ld(x.add(i as usize)) + ld(y.add(i as usize))) }
    }
}

/// `x[i] += scale·y[i]`.
///
/// # Safety
/// As [`add`].
#[kernel(max_threads = 256)]
pub unsafe fn scale_accumulate(x: *mut f32, y: *const f32, scale: f32, n: u32) {
    let i = thread::index_1d();
    if i < n {
        // SAFETY: `i < n`, and this lane alone touches element `i`.
        unsafe { st(x.add(i as usize), math::fma(scale, ld(y.add(i as usize)), ld(x.add(i as usize)))) }
    }
}

/// `x[m, i] += bias[i]`.
///
/// # Safety
/// Grid covers `n = rows·cols` lanes; `x` has `n` elements, `bias` has `cols`, `cols > 0`.
#[kernel(max_threads = 256)]
pub unsafe fn add_bias(x: *mut f32, bias: *const f32, cols: u32, n: u32) {
    let i = thread::index_1d();
    if i < n {
        // SAFETY: `i < n` and `i % cols < cols`; this lane alone touches element `i`.
        unsafe {
            let (_, col) = math::div_rem(i, cols);
            st(x.add(i as usize), ld(x.add(i as usize)) + ld(bias.add(col as usize)));
        }
    }
}

/// `x[i] *= σ(gate[i])`: the output gate of an attention layer.
///
/// # Safety
/// As [`add`].
#[kernel(max_threads = 256)]
pub unsafe fn sigmoid_mul(x: *mut f32, gate: *const f32, n: u32) {
    let i = thread::index_1d();
    if i < n {
        // SAFETY: `i < n`, and this lane alone touches element `i`.
        unsafe { st(x.add(i as usize), ld(x.add(i as usize)) * math::sigmoid(ld(gate.add(i as usize)))) }
    }
}

/// `x[m, i] += σ(gate[m])·y[m, i]`: the shared expert's gate is one logit a row.
///
/// # Safety
/// Grid covers `n = rows·cols` lanes; `x` and `y` have `n` elements, `gate` has `rows`, `cols > 0`.
#[kernel(max_threads = 256)]
pub unsafe fn sigmoid_scale_acc(x: *mut f32, y: *const f32, gate: *const f32, cols: u32, n: u32) {
    let i = thread::index_1d();
    if i < n {
        // SAFETY: `i < n`, so the row is below `rows`; this lane alone touches element `i`.
        unsafe {
            let (row, _) = math::div_rem(i, cols);
            let scale = math::sigmoid(ld(gate.add(row as usize)));
            st(x.add(i as usize), math::fma(scale, ld(y.add(i as usize)), ld(x.add(i as usize))));
        }
    }
}

/// Splits rows of per-head pairs `[n_head, 2, head_dim]` into `q` and `gate`, `[n_head, head_dim]` each.
///
/// qwen35moe's `attn_q` makes query and gate of a head side by side.
///
/// # Safety
/// Grid covers `n = rows·n_head·head_dim` lanes; `q` and `gate` have `n` elements, `qg` has `2n`.
#[kernel(max_threads = 256)]
pub unsafe fn split_gate(qg: *const f32, q: *mut f32, gate: *mut f32, head_dim: u32, n: u32) {
    let i = thread::index_1d();
    if i < n {
        // SAFETY: `i < n`, so neither is `head_dim` zero; `from + head_dim < 2n`; this lane alone writes element `i`.
        unsafe {
            let (head, _) = math::div_rem(i, head_dim);
            let from = i as usize + head as usize * head_dim as usize;
            st(q.add(i as usize), ld(qg.add(from)));
            st(gate.add(i as usize), ld(qg.add(from + head_dim as usize)));
        }
    }
}

/// `out[m] = [a[m] | b[m]]`: rows side by side.
///
/// # Safety
/// Grid covers `n = rows·cols` lanes; `a` and `b` have `n` elements, `out` has `2n` and overlaps neither.
#[kernel(max_threads = 256)]
pub unsafe fn join_rows(a: *const f32, b: *const f32, out: *mut f32, cols: u32, n: u32) {
    let i = thread::index_1d();
    if i < n {
        // SAFETY: `i < n`, so neither is `cols` zero; `to + cols < 2n`; this lane alone writes both elements.
        unsafe {
            let (row, _) = math::div_rem(i, cols);
            let to = i as usize + row as usize * cols as usize;
            st(out.add(to), ld(a.add(i as usize)));
            st(out.add(to + cols as usize), ld(b.add(i as usize)));
        }
    }
}

/// `out[i] = x[rows[i]]`: the rows whose logits are wanted.
///
/// # Safety
/// Grid covers `n = n_out·cols` lanes; `out` has `n` elements, `rows` has `n_out`, each a row of `x`.
#[kernel(max_threads = 256)]
pub unsafe fn gather_rows(x: *const f32, rows: *const u32, out: *mut f32, cols: u32, n: u32) {
    pdl::grid_dependency_wait();
    pdl::launch_dependents();
    let i = thread::index_1d();
    if i < n {
        // SAFETY: `i < n`, and `rows` names rows of `x`; this lane alone writes element `i`.
        unsafe {
            let (to, col) = math::div_rem(i, cols);
            let row = ld(rows.add(to as usize)) as usize;
            st(out.add(i as usize), ld(x.add(row * cols as usize + col as usize)));
        }
    }
}
