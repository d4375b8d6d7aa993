//! Launcher of what lies between an attention layer's projections and attention.

use cuda_std::launch::Launch;
use gpu_kernels::kernels::attention::heads as kernels;
use gpu_kernels::kernels::attention::heads::{HEADS_PER_BLOCK, HeadsParams, MAX_HEAD_DIM, THREADS};
use gpu_kernels::kernels::rope::RopeParams;

use super::kv_cache::{KvSlice, Placement};
use super::{Check, Result};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// The projections of a batch's rows, and what becomes of them: `rope(norm(x + bias))`.
#[derive(Clone, Copy, Debug)]
pub struct Heads<'a> {
    /// Queries, `[rows, n_head, head_dim]`, or if `gated` `[rows, n_head, 2, head_dim]`: pairs of query and gate.
    pub q: Slice<'a, f32>,
    /// Whether a gate follows each query head.
    pub gated: bool,
    /// Keys, `[rows, n_head_kv, head_dim]`.
    pub k: Slice<'a, f32>,
    /// Values, the same.
    pub v: Slice<'a, f32>,
    /// Of a row's queries, keys and values.
    pub biases: [Option<Slice<'a, f32>>; 3],
    /// Of each query head and each key head, `[head_dim]`.
    pub norms: [Option<Slice<'a, f32>>; 2],
    /// Of the norms.
    pub eps: f32,
    /// The rotation of query heads; that of keys differs in the number of heads alone.
    pub rope: RopeParams,
    /// Its frequencies, `[n_rot/2]`.
    pub turns: Slice<'a, u64>,
    /// Key and value heads.
    pub n_head_kv: u32,
    /// Where the rows live.
    pub at: Placement<'a>,
    /// Launch before the kernel ahead has ended.
    pub dependent: bool,
}

impl Heads<'_> {
    /// Checks everything but where queries go, and returns the number of rows.
    pub(super) fn check<D: Device>(
        &self,
        check: Check,
        device: &D,
        (k_cache, v_cache): (KvSlice<'_>, KvSlice<'_>),
    ) -> Result<u32> {
        let RopeParams { n_head, head_dim, n_rot, .. } = self.rope;
        let rows = self.at.check(check, device)?;
        check.grid_yz("pos", rows)?;
        let takes = head_dim > 0 && head_dim.is_multiple_of(4) && head_dim <= MAX_HEAD_DIM;
        check.that("head_dim", takes, "is no multiple of 4 up to 256")?;
        check.that("n_rot", n_rot.is_multiple_of(2) && n_rot <= head_dim, "is odd or larger than a head")?;
        device.check_owner(self.turns)?;
        check.that("turns", self.turns.len() == n_rot as usize / 2, "has not one frequency a pair")?;
        let (q_dim, kv_dim) = (n_head as usize * head_dim as usize, self.n_head_kv as usize * head_dim as usize);
        let n_rows = rows as usize;
        for (name, slice, len) in [
            ("q", self.q, n_rows * n_head as usize * self.q_stride() as usize),
            ("k", self.k, n_rows * kv_dim),
            ("v", self.v, n_rows * kv_dim),
        ] {
            device.check_owner(slice)?;
            check.aligned(name, slice, 16)?;
            check.that(name, slice.len() == len, "has not one element for each of its heads'")?;
        }
        let of_row = self.biases.into_iter().zip([q_dim, kv_dim, kv_dim]);
        let of_head = self.norms.into_iter().zip([head_dim as usize; 2]);
        for (slice, len) in of_row.chain(of_head).filter_map(|(slice, len)| Some((slice?, len))) {
            device.check_owner(slice)?;
            check.aligned("biases and norms", slice, 16)?;
            check.that("biases and norms", slice.len() == len, "have not an element each")?;
        }
        k_cache.check(check, device, "k_cache", kv_dim as u32)?;
        v_cache.check(check, device, "v_cache", kv_dim as u32)?;
        Ok(rows)
    }

    /// Elements from a query head to the next.
    fn q_stride(&self) -> u32 {
        if self.gated { 2 * self.rope.head_dim } else { self.rope.head_dim }
    }

    pub(super) fn params(&self) -> HeadsParams {
        let RopeParams { n_head, head_dim, n_rot, adjacent, magnitude } = self.rope;
        HeadsParams {
            n_head,
            n_head_kv: self.n_head_kv,
            head_dim,
            q_stride: self.q_stride(),
            n_rot,
            adjacent,
            magnitude,
            eps: self.eps,
            max_pages: self.at.max_pages,
        }
    }

    /// The addresses of biases and of norms, null where there are none.
    pub(super) fn optional(&self) -> ([*const f32; 3], [*const f32; 2]) {
        let address = |slice: Option<Slice<'_, f32>>| slice.map_or(std::ptr::null(), Slice::ptr);
        (self.biases.map(address), self.norms.map(address))
    }
}

/// Writes the queries to `q_out`, `[rows, n_head, head_dim]`, and keys and values to their pages.
///
/// # Errors
/// Where a shape, an alignment or an overlap is not as [`gpu_kernels::kernels::attention::heads`] asks.
///
/// # Safety
/// As [`kv_cache_write`](super::kv_cache_write).
#[expect(unsafe_code, reason = "a launch, whose indices live on the device")]
pub unsafe fn attention_heads<D: Device>(
    device: &D,
    op: &Heads<'_>,
    q_out: Slice<'_, f32>,
    (k_cache, v_cache): (KvSlice<'_>, KvSlice<'_>),
) -> Result<u64> {
    let check = Check("attention_heads");
    let rows = op.check(check, device, (k_cache, v_cache))?;
    let p = op.params();
    let HeadsParams { n_head, n_head_kv, head_dim, .. } = p;
    let (q_dim, kv_dim) = (n_head as usize * head_dim as usize, n_head_kv as usize * head_dim as usize);
    let n_rows = rows as usize;
    device.check_owner(q_out)?;
    check.aligned("q_out", q_out, 16)?;
    check.that("q_out", q_out.len() == n_rows * q_dim, "has not one element for each of its heads'")?;
    for slice in op.biases.into_iter().chain(op.norms).flatten() {
        check.apart("q_out", q_out, slice)?;
    }
    let in_place = !op.gated && q_out.address() == op.q.address();
    check.that("q_out", in_place || !q_out.overlaps(op.q), "overlaps q")?;
    check.apart("q_out", q_out, op.k)?;
    check.apart("q_out", q_out, op.v)?;
    if rows == 0 {
        return Ok(0);
    }
    let heads = n_head + 2 * n_head_kv;
    let launch = Launch::grid([heads.div_ceil(HEADS_PER_BLOCK), rows, 1], THREADS);
    let launch = Launch { pdl: op.dependent, ..launch.shared(kernels::shared_bytes(head_dim)) };
    let ([q_bias, k_bias, v_bias], [q_norm, k_norm]) = op.optional();
    let (q, k, v, turns) = (op.q.ptr(), op.k.ptr(), op.v.ptr(), op.turns.ptr());
    let (pos, span, pages, q_out) = (op.at.pos.ptr(), op.at.span.ptr(), op.at.page_table.ptr(), q_out.ptr_mut());
    macro_rules! launch {
        ($kernel:ident, $kc:ident, $vc:ident) => {{
            let (kc, vc) = ($kc.ptr_mut(), $vc.ptr_mut());
            let args = (q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm, turns, pos, span, pages, q_out, kc, vc, p);
            // SAFETY: lengths, alignment and overlap were checked above; the pages are the caller's promise; the
            // kernel waits for the grid ahead before it reads.
            unsafe { device.launch(kernels::$kernel, launch, args)? }
        }};
    }
    let kv_bytes = match (k_cache, v_cache) {
        (KvSlice::F32(kc), KvSlice::F32(vc)) => {
            launch!(attention_heads_f32, kc, vc);
            4
        }
        (KvSlice::F16(kc), KvSlice::F16(vc)) => {
            launch!(attention_heads_f16, kc, vc);
            2
        }
        _ => return check.fail("v_cache", "has another type than k_cache"),
    };
    Ok((8 * n_rows * q_dim + 2 * (4 + kv_bytes) * n_rows * kv_dim) as u64)
}
