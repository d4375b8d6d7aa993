//! The other kernels of a decode step, at the shapes of the reference model: one token.
//!
//! Most are over in a few microseconds, so what their times show is what a launch costs. Each is timed in a
//! chain of launches, as one graph where there are graphs.

use gpu_kernels::kernels::rope::RopeParams;

use super::{Bench, Result};
use crate::backend::{Draw, GatedAct, RouterRule};
use crate::gpu::device::Device;
use crate::gpu::memory::Buffer;
use crate::gpu::ops;

/// Launches in a chain; one where there are no graphs, or they are emulated.
const CHAIN: usize = 20;

const N_EMBD: usize = 2048;
const N_FF: usize = 512;
const N_USED: usize = 8;
const N_EXPERT: usize = 256;
const N_VOCAB: u32 = 248_320;

impl<D: Device> Bench<'_, D> {
    /// All of them.
    pub(super) fn layers(&mut self) -> Result<()> {
        let n_vocab = if self.is_small() { 1000 } else { N_VOCAB };
        self.elementwise()?;
        self.norms()?;
        self.attention()?;
        self.delta_net(1)?;
        self.delta_net(if self.is_small() { 20 } else { 2048 })?;
        let n_seqs: &[u32] = if self.is_small() { &[1, 2] } else { &[1, 8, 32] };
        for &n_seq in n_seqs {
            self.delta_step(n_seq)?;
        }
        self.experts()?;
        self.choice(n_vocab)
    }

    /// Whether this is a trial with little memory, as on the emulated device: there the point is that all run.
    pub(super) fn is_small(&self) -> bool {
        self.weights.len() < 1 << 24
    }

    /// Numbers in (−1, 1), the same ones each time.
    pub(super) fn floats(&self, n: usize) -> Result<Buffer<D, f32>> {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        let values: Vec<f32> = (0..n).map(|_| next()).collect();
        Ok(self.device.alloc_from(&values)?)
    }

    /// Times one launch of a chain and notes it.
    pub(super) fn chain(
        &mut self,
        op: &'static str,
        shape: &str,
        mut run: impl FnMut(&D) -> Result<u64>,
    ) -> Result<()> {
        let mut bytes = 0;
        let device = self.device;
        let launches = if self.is_small() { 1 } else { CHAIN };
        let us = self.time_graph(&mut || {
            for _ in 0..launches {
                bytes = run(device)?;
            }
            Ok(())
        })? / launches as f64;
        self.push(op, "", shape.to_owned(), bytes, us);
        Ok(())
    }

    fn elementwise(&mut self) -> Result<()> {
        let (x, y) = (self.floats(N_EMBD)?, self.floats(N_EMBD)?);
        let (qg, q, gate) = (self.floats(8192)?, self.floats(4096)?, self.floats(4096)?);
        let one = self.floats(1)?;
        let row = self.device.alloc_from(&[0u32])?;
        self.chain("add", "1 x 2048", |d| ops::add(d, x.slice(), y.slice()))?;
        self.chain("scale_accumulate", "1 x 2048", |d| ops::scale_accumulate(d, x.slice(), y.slice(), 0.5))?;
        self.chain("add_bias", "1 x 2048", |d| ops::add_bias(d, x.slice(), y.slice()))?;
        self.chain("sigmoid_scale_acc", "1 x 2048", |d| ops::sigmoid_scale_acc(d, x.slice(), y.slice(), one.slice()))?;
        self.chain("sigmoid_mul", "1 x 4096", |d| ops::sigmoid_mul(d, q.slice(), gate.slice()))?;
        self.chain("split_gate", "16 heads of 256", |d| ops::split_gate(d, qg.slice(), q.slice(), gate.slice(), 256))?;
        #[expect(unsafe_code, reason = "the one index is 0")]
        self.chain("gather_rows", "1 x 2048", |d| {
            // SAFETY: row 0 is there.
            unsafe { ops::gather_rows(d, x.slice(), row.slice(), y.slice(), N_EMBD as u32) }
        })
    }

    fn norms(&mut self) -> Result<()> {
        let (x, r, w, y) = (self.floats(N_EMBD)?, self.floats(N_EMBD)?, self.floats(N_EMBD)?, self.floats(N_EMBD)?);
        self.chain("rms_norm", "1 x 2048", |d| ops::rms_norm(d, x.slice(), w.slice(), y.slice(), 1e-6))?;
        self.chain("rms_norm_add", "1 x 2048", |d| {
            ops::rms_norm_add(d, x.slice(), r.slice(), w.slice(), y.slice(), 1e-6)
        })?;
        let (q, pos) = (self.floats(4096)?, self.device.alloc_from(&[8191u32])?);
        let turns = self.device.alloc_from(&ops::turns((0..32).map(|i| 1e7_f64.powf(-f64::from(i) / 32.0))))?;
        let p = RopeParams { n_head: 16, head_dim: 256, n_rot: 64, adjacent: 0, magnitude: 1.0 };
        self.chain("rope", "16 heads of 256, 64 turn", |d| ops::rope(d, q.slice(), pos.slice(), turns.slice(), p))
    }

    fn experts(&mut self) -> Result<()> {
        let logits = self.floats(N_EXPERT)?;
        let (ids, weights) = (self.device.alloc_zeroed::<u32>(N_USED)?, self.floats(N_USED)?);
        let rule = RouterRule::SoftmaxChosen;
        self.chain("softmax_topk", "8 of 256", |d| {
            ops::softmax_topk(d, logits.slice(), None, ids.slice(), weights.slice(), 256, 8, rule)
        })?;
        let (gate, up, act) = (self.floats(N_USED * N_FF)?, self.floats(N_USED * N_FF)?, self.floats(N_USED * N_FF)?);
        for (name, kind) in [("swiglu", GatedAct::SwiGlu), ("swiglu_oai", GatedAct::SwiGluOai)] {
            self.chain(name, "8 x 512", |d| ops::gated_act(d, kind, gate.slice(), up.slice(), act.slice()))?;
        }
        let (x, y) = (self.floats(N_EMBD)?, self.floats(N_USED * N_EMBD)?);
        self.chain("moe_weighted_acc", "8 x 2048", |d| {
            ops::moe_weighted_acc(d, x.slice(), y.slice(), weights.slice(), None, N_USED as u32, N_EMBD as u32)
        })
    }

    fn choice(&mut self, n_vocab: u32) -> Result<()> {
        let logits = self.floats(n_vocab as usize)?;
        let parts = ops::n_part(n_vocab) as usize;
        let (value, index) = (self.floats(parts)?, self.device.alloc_zeroed::<u32>(parts)?);
        let token = self.device.alloc_zeroed::<u32>(1)?;
        let shape = format!("1 x {n_vocab}");
        self.chain("argmax", &shape, |d| {
            let parts = ops::Parts { value: value.slice(), index: index.slice() };
            ops::argmax(d, logits.slice(), parts, token.slice(), n_vocab)
        })?;
        let room = ops::SampleRoom::new(self.device, 1, n_vocab)?;
        for (name, top_k, top_p) in [
            ("sample", 0, 1.0),
            ("sample, top-k 40", 40, 1.0),
            ("sample, top-p 0.9", 0, 0.9),
            ("sample, top-k 40, top-p 0.9", 40, 0.9),
        ] {
            let draw = Draw { temperature: 0.8, top_k, top_p, min_p: 0.05, uniform: 1 << 63 };
            let p = self.device.alloc_from(&[ops::sample_params(&draw)])?;
            self.chain(name, &shape, |d| ops::sample(d, logits.slice(), p.slice(), &room, token.slice(), n_vocab))?;
        }
        Ok(())
    }
}
