//! Launcher of `gate_up_*`.

use cuda_std::launch::Launch;
use gpu_kernels::blocks::GgmlType;
use gpu_kernels::kernels::gate_up::{
    self as kernels, GateUpParams, MAX_EXPERTS, ROWS, SHARED_BYTES, THREADS, THREADS_CROWDED,
};
use gpu_kernels::kernels::softmax_topk::MAX_USED;
use gpu_kernels::layout;
use gpu_kernels::params::{Activations, MatvecShape};

use super::{Check, Matrix, OpError, Q8, Result, takes_q8};
use crate::backend::{GatedAct, RouterRule};
use crate::gpu::device::Device;
use crate::gpu::memory::Slice;

/// Tokens whose experts' next matrices are brought to the second-level cache: of more they do not fit.
const MAX_PREFETCH_TOKENS: u32 = 2;

/// `h = act(gate·x, up·x)` for every token, quantised; with routing for every expert that a token is sent to.
#[derive(Clone, Copy, Debug)]
pub struct GateUp<'a> {
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
    /// Who is sent where; without, there is one expert.
    pub routing: Option<Routing<'a>>,
    /// Launch while the grid ahead still runs, and load a dense network's weights before it has ended.
    pub dependent: bool,
    /// Tokens.
    pub tokens: u32,
}

/// From a router's logits to experts, which the launch also writes down as `softmax_topk` does.
#[derive(Clone, Copy, Debug)]
pub struct Routing<'a> {
    /// `[tokens, n_expert]`.
    pub logits: Slice<'a, f32>,
    /// `[n_expert]`.
    pub bias: Option<Slice<'a, f32>>,
    /// From logits to weights.
    pub rule: RouterRule,
    /// `[tokens, n_used]`.
    pub ids: Slice<'a, u32>,
    /// `[tokens, n_used]`.
    pub weights: Slice<'a, f32>,
    /// Experts of a token.
    pub n_used: u32,
    /// A shared expert to activate on the way.
    pub shared: Option<SharedAct<'a>>,
    /// What the chosen experts are multiplied with next: a hint.
    pub next: Option<Matrix<'a>>,
}

/// A shared expert whose gate and up are there.
#[derive(Clone, Copy, Debug)]
pub struct SharedAct<'a> {
    /// `[tokens, h.cols]`.
    pub gate: Slice<'a, f32>,
    /// `[tokens, h.cols]`.
    pub up: Slice<'a, f32>,
    /// The result.
    pub h: Q8<'a>,
}

/// Whether [`gate_up`] takes such weights: both of one quantised type and shape, in whole blocks of rows.
pub fn takes_gate_up(gate: &Matrix<'_>, up: &Matrix<'_>) -> bool {
    let shape = |w: &Matrix<'_>| (w.ty(), w.n_expert(), w.rows(), w.cols());
    shape(gate) == shape(up) && takes_q8(gate.ty()) && gate.rows().is_multiple_of(ROWS)
}

/// Whether [`gate_up`] routes among so many experts.
pub fn takes_routing(n_expert: u32, n_used: u32) -> bool {
    n_expert <= MAX_EXPERTS && (1..=MAX_USED.min(n_expert)).contains(&n_used)
}

impl Routing<'_> {
    fn check<D: Device>(&self, check: Check, device: &D, n_expert: u32, tokens: u64) -> Result<()> {
        let n_used = self.n_used;
        check.that("ids", takes_routing(n_expert, n_used), "more experts than the kernel takes, or none")?;
        let rows = |name, slice: Slice<'_, f32>, cols: u32| {
            device.check_owner(slice)?;
            check.rows(name, slice, tokens, u64::from(cols), u64::from(cols))
        };
        rows("logits", self.logits, n_expert)?;
        rows("weights", self.weights, n_used)?;
        device.check_owner(self.ids)?;
        check.rows("ids", self.ids, tokens, u64::from(n_used), u64::from(n_used))?;
        if let Some(bias) = self.bias {
            device.check_owner(bias)?;
            check.that("router bias", bias.len() == n_expert as usize, "has not one element an expert")?;
        }
        if let Some(next) = self.next {
            device.check_owner(next.data())?;
            check.that("next", next.n_expert() == n_expert, "has another number of experts")?;
        }
        let Some(shared) = self.shared else { return Ok(()) };
        check.that("shared", shared.h.cols > 0, "has no columns")?;
        for slice in [shared.gate, shared.up] {
            rows("shared", slice, shared.h.cols)?;
            check.aligned("shared", slice, 16)?;
        }
        Ok(())
    }

    /// Addresses of the planes of expert 0's next matrix, and bytes of one expert in each.
    fn prefetch(&self, tokens: u32) -> ([u64; layout::MAX_PLANES], [u32; layout::MAX_PLANES]) {
        let mut found = ([0; layout::MAX_PLANES], [0; layout::MAX_PLANES]);
        let Some(next) = self.next.filter(|_| tokens <= MAX_PREFETCH_TOKENS) else { return found };
        let bytes = layout::plane_bytes(next.ty());
        let n_blocks = next.n_blocks() / u64::from(next.n_expert());
        for (i, offset) in next.planes().into_iter().enumerate() {
            // An expert beyond 2 GB is no hint worth giving.
            let Some(bytes) = n_blocks.checked_mul(bytes[i]).and_then(|bytes| i32::try_from(bytes).ok()) else {
                continue;
            };
            (found.0[i], found.1[i]) = (next.data().address() + offset, bytes.cast_unsigned());
        }
        found
    }
}

impl GateUp<'_> {
    fn n_used(&self) -> u32 {
        self.routing.map_or(1, |routing| routing.n_used)
    }

    fn shared(&self) -> Option<SharedAct<'_>> {
        self.routing.and_then(|routing| routing.shared)
    }

    fn check<D: Device>(&self, check: Check, device: &D, x: Q8<'_>, h: Q8<'_>) -> Result<()> {
        let (gate, up, tokens) = (self.gate, self.up, u64::from(self.tokens));
        let n_expert = gate.n_expert();
        check.that("up", takes_gate_up(&gate, &up), "has not the gate's type and shape, or the rows are not in 32s")?;
        check.grid_yz("tokens", self.tokens)?;
        check.that("x", x.cols == gate.cols(), "columns differ from the weights'")?;
        check.that("h", h.cols == gate.rows(), "columns differ from the weights' rows")?;
        x.check(check, device, tokens)?;
        device.check_owner(gate.data())?;
        device.check_owner(up.data())?;
        for bias in [self.gate_bias, self.up_bias].into_iter().flatten() {
            device.check_owner(bias)?;
            let n = u64::from(n_expert) * u64::from(gate.rows());
            check.that("bias", bias.len() as u64 == n, "has not one element for each expert's row")?;
        }
        match &self.routing {
            Some(routing) => routing.check(check, device, n_expert, tokens)?,
            None => check.that("logits", n_expert == 1, "missing: the weights are those of several experts")?,
        }
        self.check_results(check, device, x, h)
    }

    /// Nothing that is written overlaps anything else.
    fn check_results<D: Device>(&self, check: Check, device: &D, x: Q8<'_>, h: Q8<'_>) -> Result<()> {
        let tokens = u64::from(self.tokens);
        let mut inputs = vec![self.gate.data(), self.up.data(), x.qs.as_bytes(), x.d.as_bytes(), x.s.as_bytes()];
        inputs.extend([self.gate_bias, self.up_bias].into_iter().flatten().map(Slice::as_bytes));
        h.check_output(check, device, tokens * u64::from(self.n_used()), &[])?;
        let mut results: Vec<_> = [h.qs.as_bytes(), h.d.as_bytes(), h.s.as_bytes()].map(|part| ("h", part)).into();
        if let Some(routing) = self.routing {
            inputs.push(routing.logits.as_bytes());
            inputs.extend(routing.bias.map(Slice::as_bytes));
            results.extend([("ids", routing.ids.as_bytes()), ("weights", routing.weights.as_bytes())]);
        }
        if let Some(shared) = self.shared() {
            inputs.extend([shared.gate.as_bytes(), shared.up.as_bytes()]);
            shared.h.check_output(check, device, tokens, &[])?;
            let parts = [shared.h.qs.as_bytes(), shared.h.d.as_bytes(), shared.h.s.as_bytes()];
            results.extend(parts.map(|part| ("shared h", part)));
        }
        for (i, (name, result)) in results.iter().enumerate() {
            for other in inputs.iter().chain(results[..i].iter().map(|(_, other)| other)) {
                check.apart(name, *result, *other)?;
            }
        }
        Ok(())
    }

    /// Grid and parameters.
    fn launch<D: Device>(&self, device: &D) -> (Launch, GateUpParams) {
        let (gate, n_used, tokens) = (self.gate, self.n_used(), self.tokens);
        let row_blocks = gate.rows() / ROWS;
        let blocks = u64::from(row_blocks) * u64::from(n_used) * u64::from(tokens);
        let threads = if blocks > u64::from(device.properties().n_sm) { THREADS_CROWDED } else { THREADS };
        let shared_rows = self.shared().map_or(0, |shared| shared.h.cols);
        let grid = [row_blocks.max(shared_rows.div_ceil(4 * threads)), n_used + u32::from(shared_rows > 0), tokens];
        let (next, next_bytes) = self.routing.map_or(Default::default(), |routing| routing.prefetch(tokens));
        let params = GateUpParams {
            planes: gate.planes(),
            next,
            next_bytes,
            rows: gate.rows(),
            chunks: gate.chunks(),
            lanes_log2: MatvecShape::lanes_log2(gate.ty(), gate.chunks()),
            cols: gate.cols(),
            n_expert: gate.n_expert(),
            n_used,
            over_all: u32::from(self.routing.is_some_and(|routing| routing.rule == RouterRule::SoftmaxAll)),
            shared_rows,
            oai: u32::from(self.act == GatedAct::SwiGluOai),
            reserved: 0,
        };
        let launch = Launch::grid(grid, threads).shared(SHARED_BYTES);
        (Launch { pdl: self.dependent && device.properties().capability >= (9, 0), ..launch }, params)
    }
}

/// The first half of a feed-forward network: `h` has a row of `gate.rows()` elements for every token, or every route.
///
/// # Errors
/// Where a type, a shape, an alignment or an overlap is not as [`gpu_kernels::kernels::gate_up`] asks.
#[expect(unsafe_code, reason = "a launch")]
pub fn gate_up<D: Device>(device: &D, op: &GateUp<'_>, x: Q8<'_>, h: Q8<'_>) -> Result<u64> {
    if op.tokens == 0 {
        return Ok(0);
    }
    op.check(Check("gate_up"), device, x, h)?;
    let (launch, params) = op.launch(device);
    let float = |slice: Option<Slice<'_, f32>>| slice.map_or(std::ptr::null(), Slice::ptr);
    let (routing, shared, shared_h) = (op.routing, op.shared(), op.shared().map(|shared| shared.h));
    // What is not there has no results, and no block writes them.
    let null = std::ptr::null_mut();
    let args = (
        op.gate.data().ptr(),
        op.up.data().ptr(),
        x.qs.ptr(),
        x.d.ptr(),
        x.s.ptr(),
        float(routing.map(|routing| routing.logits)),
        float(routing.and_then(|routing| routing.bias)),
        float(op.gate_bias),
        float(op.up_bias),
        routing.map_or(std::ptr::null_mut(), |routing| routing.ids.ptr_mut()),
        routing.map_or(null, |routing| routing.weights.ptr_mut()),
        h.qs.ptr_mut(),
        h.d.ptr_mut(),
        h.s.ptr_mut(),
        float(shared.map(|shared| shared.gate)),
        float(shared.map(|shared| shared.up)),
        shared_h.map_or(std::ptr::null_mut(), |h| h.qs.ptr_mut()),
        shared_h.map_or(null, |h| h.d.ptr_mut()),
        shared_h.map_or(null, |h| h.s.ptr_mut()),
        params,
    );
    macro_rules! launch {
        ($($ty:ident: $name:ident),+) => {
            match op.gate.ty() {
                // SAFETY: `Matrix` has checked the weights; `check` the shapes, alignment and overlap; geometry and
                // parameters come from the functions that the kernel uses. What is null is not read.
                $(GgmlType::$ty => unsafe { device.launch(kernels::$name, launch, args)? },)+
                ty @ (GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16) => return Err(OpError::Type { op: "gate_up", ty }),
            }
        };
    }
    launch!(
        Q4K: gate_up_q4_k, Q5K: gate_up_q5_k, Q6K: gate_up_q6_k, Q8_0: gate_up_q8_0, Q4_0: gate_up_q4_0,
        Q4_1: gate_up_q4_1, Q5_0: gate_up_q5_0, Q5_1: gate_up_q5_1, Mxfp4: gate_up_mxfp4
    );
    let routes = u64::from(op.tokens) * u64::from(op.n_used());
    let rows = u64::from(op.gate.rows());
    Ok(routes * rows * 2 * op.gate.row_bytes()
        + Q8::bytes(u64::from(op.tokens) * u64::from(x.cols))
        + Q8::bytes(routes * rows))
}
