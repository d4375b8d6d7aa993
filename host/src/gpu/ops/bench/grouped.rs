//! The launches of a mixture of experts for a batch of decoding, whose routes are grouped by expert.

use cuda_std::U32x4;
use gpu_kernels::blocks::GgmlType;
use gpu_kernels::kernels::grouped::TILE_SIZE;

use super::ffn::{Shape, Weights};
use super::{Bench, Result};
use crate::backend::{GatedAct, RouterRule};
use crate::gpu::device::Device;
use crate::gpu::memory::Buffer;
use crate::gpu::ops::{
    self, ExpertDownGrouped, GateUpGrouped, Q8, RouteGroups, SharedDownGrouped, SharedGateUp, SharedOut, max_tiles,
};

/// Quantised activations `[rows, cols]`.
struct Act<D: Device> {
    qs: Buffer<D, i8>,
    d: Buffer<D, f32>,
    s: Buffer<D, f32>,
    cols: u32,
}

impl<D: Device> Act<D> {
    fn new(device: &D, rows: u32, cols: u32) -> Result<Self> {
        let n = rows as usize * cols as usize;
        let (d, s) = (device.alloc_zeroed(n / 16)?, device.alloc_zeroed(n / 16)?);
        Ok(Act { qs: device.alloc_zeroed(n)?, d, s, cols })
    }

    fn q8(&self) -> Q8<'_> {
        Q8 { qs: self.qs.slice(), d: self.d.slice(), s: self.s.slice(), cols: self.cols }
    }
}

impl<D: Device> Bench<'_, D> {
    /// Each launch for so many tokens, whose experts a random router chooses.
    pub(super) fn grouped(&mut self, w: &Weights<D>, tokens: u32) -> Result<()> {
        let Shape { n_embd, n_ff, n_expert, n_used, .. } = w.shape;
        let (device, routes) = (self.device, tokens * n_used);
        let (x, h) = (Act::new(device, tokens, n_embd)?, Act::new(device, routes, n_ff)?);
        let shared_h = Act::new(device, tokens, n_ff)?;
        let (logits, scale) = (self.floats((tokens * n_expert) as usize)?, self.floats(tokens as usize)?);
        let [y, shared_y, stream] =
            [routes, tokens, tokens].map(|rows| device.alloc_zeroed::<f32>((rows * n_embd) as usize));
        let (y, shared_y, stream) = (y?, shared_y?, stream?);
        let ids = device.alloc_zeroed::<u32>(routes as usize)?;
        let weights = device.alloc_zeroed::<f32>(routes as usize)?;
        let order = device.alloc_zeroed::<u32>(routes as usize)?;
        let tiles = device.alloc::<U32x4>(max_tiles(routes, n_expert) as usize)?;
        let groups = RouteGroups { order: order.slice(), tiles: tiles.slice(), tile: TILE_SIZE };
        let shape = format!("{tokens} x {n_used} of {n_expert}");
        self.chain("topk_groups", &shape, |device| {
            let (logits, rule) = (logits.slice(), RouterRule::SoftmaxChosen);
            ops::topk_groups(device, logits, None, ids.slice(), weights.slice(), n_expert, n_used, rule, groups)
        })?;

        let own = |i, rows, cols| w.own(i, GgmlType::Q8_0, 0, rows, cols);
        let (shared_gate, shared_up) = (own(5, n_ff, n_embd)?, own(6, n_ff, n_embd)?);
        let hidden = GateUpGrouped {
            gate: w.experts(0)?,
            up: w.experts(1)?,
            gate_bias: None,
            up_bias: None,
            act: GatedAct::SwiGlu,
            groups,
            n_used,
            shared: Some(SharedGateUp { gate: shared_gate, up: shared_up, h: shared_h.q8() }),
            dependent: true,
            tokens,
        };
        let products = format!("{shape} and one, {n_ff} x {n_embd}");
        self.chain("gate_up_grouped", &products, |d| ops::gate_up_grouped(d, &hidden, x.q8(), h.q8()))?;
        let down = ExpertDownGrouped {
            w: w.experts(2)?,
            bias: None,
            groups,
            n_used,
            shared: Some(SharedDownGrouped { w: own(7, n_embd, n_ff)?, h: shared_h.q8(), y: shared_y.slice() }),
            dependent: true,
            tokens,
        };
        self.chain("expert_down_grouped", &products, |d| ops::expert_down_grouped(d, &down, h.q8(), y.slice()))?;
        self.chain("moe_weighted_acc", &format!("{tokens} x {n_used} and one x {n_embd}"), |d| {
            let shared = Some(SharedOut { y: shared_y.slice(), gate: Some(scale.slice()) });
            ops::moe_weighted_acc(d, stream.slice(), y.slice(), weights.slice(), shared, n_used, n_embd)
        })
    }
}
