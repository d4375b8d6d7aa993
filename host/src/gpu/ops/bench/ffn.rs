//! Feed-forward layers in few launches, at the shapes of the reference model: one token, other weights each launch,
//! so that they come from memory.

use gpu_kernels::blocks::GgmlType;

use super::{Bench, Result, fill_random};
use crate::backend::{GatedAct, RouterRule};
use crate::gpu::device::Device;
use crate::gpu::memory::{Buffer, Slice};
use crate::gpu::ops::{self, ExpertDown, GateUp, Matrix, Product, Q8, Routing, SharedAct, SharedDown};

/// Sizes of a layer, and how many are run in a chain.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) n_embd: u32,
    pub(super) n_ff: u32,
    pub(super) n_expert: u32,
    pub(super) n_used: u32,
    layers: u32,
}

const REFERENCE: Shape = Shape { n_embd: 2048, n_ff: 512, n_expert: 256, n_used: 8, layers: 32 };
/// Where the point is that all run.
const SMALL: Shape = Shape { n_embd: 256, n_ff: 256, n_expert: 4, n_used: 2, layers: 1 };

/// Weights of some layers: all have the same experts and choose other ones, and each has a shared expert.
pub(super) struct Weights<D: Device> {
    pub(super) shape: Shape,
    buffers: Vec<Buffer<D, u8>>,
}

impl<D: Device> Weights<D> {
    fn new(device: &D, shape: Shape) -> Result<Self> {
        let (n_expert, layers) = (shape.n_expert, shape.layers);
        let shapes = [
            (GgmlType::Q4K, n_expert, shape.n_ff, shape.n_embd),
            (GgmlType::Q4K, n_expert, shape.n_ff, shape.n_embd),
            (GgmlType::Q5K, n_expert, shape.n_embd, shape.n_ff),
            (GgmlType::F32, layers, n_expert, shape.n_embd),
            (GgmlType::F32, layers, 1, shape.n_embd),
            (GgmlType::Q8_0, layers, shape.n_ff, shape.n_embd),
            (GgmlType::Q8_0, layers, shape.n_ff, shape.n_embd),
            (GgmlType::Q8_0, layers, shape.n_embd, shape.n_ff),
        ];
        let mut buffers = Vec::new();
        for (ty, n, rows, cols) in shapes {
            // Matrices of layers lie one after the other, each with planes of its own.
            let (count, n) = if ty == GgmlType::Q4K || ty == GgmlType::Q5K { (1, n) } else { (n, 1) };
            let bytes = count as usize * Matrix::size_bytes(ty, n, rows, cols).unwrap_or(0) as usize;
            let buffer = device.alloc(bytes)?;
            fill_random(device, buffer.slice())?;
            buffers.push(buffer);
        }
        Ok(Weights { shape, buffers })
    }

    /// The experts' gate, up or down.
    pub(super) fn experts(&self, i: usize) -> Result<Matrix<'_>> {
        let Shape { n_embd, n_ff, n_expert, .. } = self.shape;
        let (ty, rows, cols) = if i == 2 { (GgmlType::Q5K, n_embd, n_ff) } else { (GgmlType::Q4K, n_ff, n_embd) };
        Matrix::new(self.buffers[i].slice(), ty, n_expert, rows, cols)
    }

    /// A layer's own matrix of buffer `i`.
    pub(super) fn own(&self, i: usize, ty: GgmlType, layer: u32, rows: u32, cols: u32) -> Result<Matrix<'_>> {
        let bytes = self.buffers[i].len() / self.shape.layers as usize;
        let data = self.buffers[i].part(layer as usize * bytes..(layer as usize + 1) * bytes)?;
        Matrix::new(data, ty, 1, rows, cols)
    }
}

/// Activations of one token.
struct Scratch<D: Device> {
    /// The residual stream, its norm's weights, and the normed.
    x: [Buffer<D, f32>; 3],
    logits: Buffer<D, f32>,
    /// What the router gives: a layer's choice is made already.
    unused: Buffer<D, f32>,
    /// Gate, up, and the logit of the shared expert.
    shared: [Buffer<D, f32>; 3],
    ids: Buffer<D, u32>,
    weights: Buffer<D, f32>,
    qs: Buffer<D, i8>,
    d: Buffer<D, f32>,
    s: Buffer<D, f32>,
}

impl<D: Device> Scratch<D> {
    /// Quantised activations from row `row` on, all rows as long as the longest.
    fn q8(&self, row: usize, rows: usize, cols: u32) -> Result<Q8<'_>> {
        let (from, n) = (row * REFERENCE.n_embd as usize, rows * cols as usize);
        let blocks = from / 16..(from + n) / 16;
        let (d, s) = (self.d.part(blocks.clone())?, self.s.part(blocks)?);
        Ok(Q8 { qs: self.qs.part(from..from + n)?, d, s, cols })
    }
}

/// A launch for some layer.
type Launch<'a> = &'a dyn Fn(u32) -> Result<u64>;

impl<D: Device> Bench<'_, D> {
    /// The launches of a mixture of experts, one by one and all of them.
    pub(super) fn feed_forward(&mut self) -> Result<()> {
        let shape = if self.weights.len() < 1 << 24 { SMALL } else { REFERENCE };
        let w = Weights::new(self.device, shape)?;
        let s = self.scratch(shape)?;
        let experts = format!("{} of {} and one, {} x {}", shape.n_used, shape.n_expert, shape.n_ff, shape.n_embd);
        let device = self.device;
        let parts: [(&str, &str, Launch<'_>); 4] = [
            ("rms_norm_q8", "F32", &|_| normed(device, &s, shape)),
            ("matvecs", "Q8_0", &|layer| routed_and_shared(device, &w, &s, layer)),
            ("gate_up", "Q4_K", &|layer| hidden(device, &w, &s, layer)),
            ("expert_down", "Q5_K", &|layer| down(device, &w, &s, layer)),
        ];
        for (op, ty, run) in parts {
            self.layer_chain(op, ty, &experts, shape.layers, run)?;
        }
        self.layer_chain("mixture of experts", "", &experts, shape.layers, &|layer| {
            parts.iter().map(|(_, _, run)| run(layer)).sum()
        })?;
        let batches: &[u32] = if self.is_small() { &[9] } else { &[8, 16, 32, 64] };
        batches.iter().try_for_each(|tokens| self.grouped(&w, *tokens))
    }

    fn layer_chain(
        &mut self,
        op: &'static str,
        ty: &'static str,
        shape: &str,
        layers: u32,
        run: &dyn Fn(u32) -> Result<u64>,
    ) -> Result<()> {
        let mut bytes = 0;
        let us = self.time_graph(&mut || {
            for layer in 0..layers {
                bytes = run(layer)?;
            }
            Ok(())
        })?;
        self.push(op, ty, shape.to_owned(), bytes, us / f64::from(layers));
        Ok(())
    }

    fn scratch(&self, shape: Shape) -> Result<Scratch<D>> {
        let (n_embd, n_ff) = (shape.n_embd as usize, shape.n_ff as usize);
        // Each layer's own experts, far apart: the first have the largest logits.
        let mut logits = vec![0.0f32; (shape.layers * shape.n_expert) as usize];
        for layer in 0..shape.layers {
            for j in 0..shape.n_used {
                let expert = (j * shape.layers + layer) % shape.n_expert;
                logits[(layer * shape.n_expert + expert) as usize] = 2.0 + j as f32;
            }
        }
        let zeroed = |n: usize| self.device.alloc_zeroed::<f32>(n);
        let rows = 2 + shape.n_used as usize;
        let n = rows * REFERENCE.n_embd as usize;
        Ok(Scratch {
            x: [zeroed(n_embd)?, zeroed(n_embd)?, zeroed(n_embd)?],
            logits: self.device.alloc_from(&logits)?,
            unused: zeroed(shape.n_expert as usize)?,
            shared: [zeroed(n_ff)?, zeroed(n_ff)?, zeroed(1)?],
            ids: self.device.alloc_zeroed((shape.layers * shape.n_used) as usize)?,
            weights: zeroed((shape.layers * shape.n_used) as usize)?,
            qs: self.device.alloc_zeroed(n)?,
            d: zeroed(n / 16)?,
            s: zeroed(n / 16)?,
        })
    }
}

fn normed<D: Device>(device: &D, s: &Scratch<D>, shape: Shape) -> Result<u64> {
    let [x, w, y] = &s.x;
    ops::rms_norm_q8(device, x.slice(), w.slice(), y.slice(), s.q8(0, 1, shape.n_embd)?, 1e-6)
}

/// The router and the shared expert's first half.
fn routed_and_shared<D: Device>(device: &D, w: &Weights<D>, s: &Scratch<D>, layer: u32) -> Result<u64> {
    let Shape { n_embd, n_ff, n_expert, .. } = w.shape;
    let [gate, up, scale] = &s.shared;
    let products = [
        product(w.own(3, GgmlType::F32, layer, n_expert, n_embd)?, s.unused.slice()),
        product(w.own(4, GgmlType::F32, layer, 1, n_embd)?, scale.slice()),
        product(w.own(5, GgmlType::Q8_0, layer, n_ff, n_embd)?, gate.slice()),
        product(w.own(6, GgmlType::Q8_0, layer, n_ff, n_embd)?, up.slice()),
    ];
    ops::matvecs(device, &products, s.x[2].slice(), s.q8(0, 1, n_embd)?, 1, true)
}

/// A product whose rows of results lie next to each other.
fn product<'a>(w: Matrix<'a>, y: Slice<'a, f32>) -> Product<'a> {
    Product { w, y, y_stride: w.rows() }
}

fn hidden<D: Device>(device: &D, w: &Weights<D>, s: &Scratch<D>, layer: u32) -> Result<u64> {
    let Shape { n_embd, n_ff, n_expert, n_used, .. } = w.shape;
    let of = |n: u32| (layer * n) as usize..((layer + 1) * n) as usize;
    let shared = SharedAct { gate: s.shared[0].slice(), up: s.shared[1].slice(), h: s.q8(1, 1, n_ff)? };
    let op = GateUp {
        gate: w.experts(0)?,
        up: w.experts(1)?,
        gate_bias: None,
        up_bias: None,
        act: GatedAct::SwiGlu,
        routing: Some(Routing {
            logits: s.logits.part(of(n_expert))?,
            bias: None,
            rule: RouterRule::SoftmaxChosen,
            ids: s.ids.part(of(n_used))?,
            weights: s.weights.part(of(n_used))?,
            n_used,
            shared: Some(shared),
            next: Some(w.experts(2)?),
        }),
        dependent: true,
        tokens: 1,
    };
    ops::gate_up(device, &op, s.q8(0, 1, n_embd)?, s.q8(2, n_used as usize, n_ff)?)
}

fn down<D: Device>(device: &D, w: &Weights<D>, s: &Scratch<D>, layer: u32) -> Result<u64> {
    let Shape { n_embd, n_ff, n_used, .. } = w.shape;
    let routes = (layer * n_used) as usize..((layer + 1) * n_used) as usize;
    let own = w.own(7, GgmlType::Q8_0, layer, n_embd, n_ff)?;
    let op = ExpertDown {
        w: w.experts(2)?,
        bias: None,
        ids: s.ids.part(routes.clone())?,
        weights: s.weights.part(routes)?,
        n_used,
        shared: Some(SharedDown { w: own, h: s.q8(1, 1, n_ff)?, gate: Some(s.shared[2].slice()) }),
        dependent: true,
        tokens: 1,
    };
    ops::expert_down(device, &op, s.q8(2, n_used as usize, n_ff)?, s.x[0].slice())
}
