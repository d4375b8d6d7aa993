//! The gated delta net, at the shape of the reference model: a token, a prompt, and steps of several sequences.

use super::{Bench, Result};
use crate::backend::DeltaNetShape;
use crate::gpu::device::Device;
use crate::gpu::memory::Buffer;
use crate::gpu::ops::{self, Decay, DeltaStep, Q8, Spans};

const SHAPE: DeltaNetShape = DeltaNetShape { n_head_k: 16, n_head_v: 32, d_state: 128, d_conv: 4 };
/// Rows of the ring of a convolution's inputs.
const RING: usize = 8;

/// Spans of one slot each, all of as many rows, 100 tokens in.
struct SpanArrays<D: Device>([Buffer<D, u32>; 4]);

impl<D: Device> SpanArrays<D> {
    fn new(device: &D, n: u32, rows: u32) -> Result<Self> {
        let array = |value: &dyn Fn(u32) -> u32| device.alloc_from(&(0..n).map(value).collect::<Vec<u32>>());
        Ok(SpanArrays([array(&|i| i)?, array(&|i| i * rows)?, array(&|_| rows)?, array(&|_| 100)?]))
    }

    fn view(&self) -> Spans<'_> {
        let [slot, first, rows, start] = &self.0;
        Spans { slot: slot.slice(), first: first.slice(), rows: rows.slice(), start: start.slice() }
    }
}

impl<D: Device> Bench<'_, D> {
    /// Its operations one by one, over one span of so many rows.
    #[expect(unsafe_code, reason = "the spans are made here")]
    pub(super) fn delta_net(&mut self, rows: u32) -> Result<()> {
        let arrays = SpanArrays::new(self.device, 1, rows)?;
        let (n, conv, inner) = (rows as usize, SHAPE.conv_dim() as usize, SHAPE.d_inner() as usize);
        let (x, w, y) = (self.floats(n * conv)?, self.floats(4 * conv)?, self.device.alloc_zeroed(n * conv)?);
        let (ring, state) = (self.floats(RING * conv)?, self.floats(inner * 128)?);
        let (alpha, beta, a, bias) = (self.floats(n * 32)?, self.floats(n * 32)?, self.floats(32)?, self.floats(32)?);
        let chunks = self.device.alloc_zeroed(ops::chunk_elems(&SHAPE, rows, 1))?;
        let (out, z, norm) = (self.device.alloc_zeroed(n * inner)?, self.floats(n * inner)?, self.floats(128)?);
        self.chain("ssm_conv1d", &format!("{rows} x 8192"), |d| {
            // SAFETY: one span of all rows, and one slot.
            unsafe { ops::ssm_conv1d(d, x.slice(), w.slice(), ring.slice(), arrays.view(), y.slice(), &SHAPE) }
        })?;
        let decay = Decay { dt_bias: Some(bias.slice()), a: Some(a.slice()) };
        self.chain("ssm_delta_net", &format!("{rows} x 32 heads of 128"), |d| {
            let (gates, state, chunks) = ((alpha.slice(), beta.slice()), state.slice(), chunks.slice());
            // SAFETY: as above.
            unsafe { ops::ssm_delta_net(d, x.slice(), gates, decay, state, chunks, arrays.view(), out.slice(), &SHAPE) }
        })?;
        self.chain("ssm_gated_norm", &format!("{rows} x 32 heads of 128"), |d| {
            ops::ssm_gated_norm(d, out.slice(), z.slice(), norm.slice(), 1e-6)
        })
    }

    /// All of it in one launch, one token each of so many sequences. Launches of a chain take the states of other layers
    /// in turn, so that they come from memory, and may overlap.
    #[expect(unsafe_code, reason = "the spans are made here")]
    pub(super) fn delta_step(&mut self, n_seq: u32) -> Result<()> {
        let arrays = SpanArrays::new(self.device, n_seq, 1)?;
        let layers = if self.is_small() { 2 } else { (64 / n_seq as usize).clamp(3, 30) };
        let (n, conv, inner) = (n_seq as usize, SHAPE.conv_dim() as usize, SHAPE.d_inner() as usize);
        let (x, w, z) = (self.floats(n * conv)?, self.floats(4 * conv)?, self.floats(n * inner)?);
        let (rings, states) = (
            self.device.alloc_zeroed::<f32>(layers * n * RING * conv)?,
            self.device.alloc_zeroed::<f32>(layers * n * inner * 128)?,
        );
        let (alpha, beta, a, bias) = (self.floats(n * 32)?, self.floats(n * 32)?, self.floats(32)?, self.floats(32)?);
        let (out, norm) = (self.device.alloc_zeroed::<f32>(n * inner)?, self.floats(128)?);
        let (qs, scales, sums) = (
            self.device.alloc_zeroed::<i8>(n * inner)?,
            self.device.alloc_zeroed::<f32>(n * inner / 16)?,
            self.device.alloc_zeroed::<f32>(n * inner / 16)?,
        );
        let q8 = Q8 { qs: qs.slice(), d: scales.slice(), s: sums.slice(), cols: SHAPE.d_inner() };
        let mut layer = 0;
        self.chain("ssm_delta_step", &format!("{n_seq} x 32 heads of 128"), |d| {
            layer = (layer + 1) % layers;
            let of_layer = |all: &Buffer<D, f32>| {
                let each = all.len() / layers;
                layer * each..(layer + 1) * each
            };
            let op = DeltaStep {
                qkv: x.slice(),
                z: z.slice(),
                alpha: alpha.slice(),
                beta: beta.slice(),
                conv1d: w.slice(),
                decay: Decay { dt_bias: Some(bias.slice()), a: Some(a.slice()) },
                norm: norm.slice(),
                eps: 1e-6,
                ring: rings.part(of_layer(&rings))?,
                state: states.part(of_layer(&states))?,
                spans: arrays.view(),
                out: out.slice(),
                q8: Some(q8),
                dependent: true,
            };
            // SAFETY: one row a span and slot; the grid ahead writes another layer's ring and state.
            unsafe { ops::ssm_delta_step(d, &op, &SHAPE) }
        })
    }
}
