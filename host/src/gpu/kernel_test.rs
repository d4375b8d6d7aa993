//! Do the kernels compute what the CPU computes? One script of a model's operations runs on the CPU, which is the
//! oracle, and on the device, and every result is compared. It needs no model, and takes seconds.

use std::sync::Arc;

use gpu_kernels::blocks::GgmlType;

use super::backend::{BackendOptions, GpuBackend};
use super::device::Device;
use super::self_test::{Failure, SelfTestError};
use crate::backend::{
    AttentionShape, Backend, Batch, CacheShape, DeltaNetShape, GatedAct, LayerCache, PAGE_TOKENS, Pairing, Result,
    Rope, RouterRule, Span,
};
use crate::cpu::CpuBackend;
use crate::gguf::{Gguf, Writer};
use crate::model::distance::{argmax, relative_l2};

/// Numbers of rows that a step may have: one token, a few, and prompts that fill no tile.
pub const ROWS_GPU: &[u32] = &[1, 5, 33, 130];
/// The same for the emulator, which is slow.
pub const ROWS_EMULATED: &[u32] = &[1, 3];

/// Relative L2 of a result, with f32 activations and keys: sums in another order.
const EXACT: f64 = 1e-5;
/// The same with int8 activations, each off by up to 1/254 of the largest of its 16, and f16 keys.
const INT8: f64 = 2e-2;

/// Columns of most operands; a block of any type divides it.
const N_EMBD: usize = 512;
/// Rows of the product's matrices: no multiple of anything.
const N_ROWS: usize = 37;
const N_EXPERT: usize = 8;
const N_USED: u32 = 2;
/// Rows of an input, which repeat in longer batches.
const N_INPUT: usize = 16;
const EPS: f32 = 1e-6;
/// Why every name is found.
const MADE: &str = "the operands of the script are made up for it";

/// Runs the script with exact and with quantised activations, and tells `report` of each what was found.
///
/// # Errors
/// The first operation whose result is too far from the CPU's.
pub fn run<D: Device>(
    device: &Arc<D>,
    rows: &[u32],
    report: &mut dyn FnMut(&str, &str),
) -> std::result::Result<(), SelfTestError> {
    let small = BackendOptions { staging_bytes: 1 << 20, ..BackendOptions::default() };
    let exact =
        BackendOptions { activations: BackendOptions::exact().activations, kv: BackendOptions::exact().kv, ..small };
    let failed = |step: &'static str| move |source| SelfTestError { step, source };
    let file = Arc::new(file().map_err(|e| failed("compute")(Failure::Wrong(e)))?);
    let wanted = script(CpuBackend::new(Arc::clone(&file)), &file, rows).map_err(|e| failed("compute")(e.into()))?;
    for (step, options, bound) in [("exact", exact, EXACT), ("int8", small, INT8)] {
        let backend = GpuBackend::new(Arc::clone(device), options);
        let found = script(backend, &file, rows).map_err(|e| failed(step)(e.into()))?;
        let finding = compare(&found, &wanted, bound).map_err(failed(step))?;
        report(step, &finding);
    }
    Ok(())
}

/// What an operation gave.
struct Output {
    operation: String,
    values: Vec<f32>,
}

fn compare(found: &[Output], wanted: &[Output], bound: f64) -> std::result::Result<String, Failure> {
    let mut worst = (0.0, "");
    for (found, wanted) in found.iter().zip(wanted) {
        let operation = &wanted.operation;
        if found.values.len() != wanted.values.len() || found.operation != *operation {
            return Err(Failure::Wrong(format!("{operation} gives {} values", found.values.len())));
        }
        let error = relative_l2(&found.values, &wanted.values);
        if error.is_nan() || error > bound {
            return Err(Failure::Wrong(format!(
                "{operation} is {error:.1e} off the CPU's result, allowed is {bound:.0e}"
            )));
        }
        if error >= worst.0 {
            worst = (error, operation);
        }
    }
    if found.len() != wanted.len() {
        return Err(Failure::Wrong(format!("{} of {} operations ran", found.len(), wanted.len())));
    }
    Ok(format!("{} operations as on the CPU, at worst {:.1e} off ({})", wanted.len(), worst.0, worst.1))
}

/// The made-up operands: inputs `x.COLS`, vectors `v.LEN`, a matrix and a stack of experts of every type.
fn file() -> std::result::Result<Gguf, String> {
    let mut tensors: Vec<(String, GgmlType, Vec<usize>)> = Vec::new();
    for cols in [4, N_EXPERT, 128, 256, N_EMBD, 2 * N_EMBD] {
        tensors.push((format!("x.{cols}"), GgmlType::F32, vec![cols, N_INPUT]));
        tensors.push((format!("v.{cols}"), GgmlType::F32, vec![cols]));
    }
    for len in [N_ROWS, 64, N_EXPERT * N_ROWS, 4 * N_EMBD, 4 * 2 * N_EMBD] {
        tensors.push((format!("v.{len}"), GgmlType::F32, vec![len]));
    }
    for &ty in GgmlType::ALL {
        tensors.push((format!("w.{ty}"), ty, vec![N_EMBD, N_ROWS]));
        tensors.push((format!("exps.{ty}"), ty, vec![N_EMBD, N_ROWS, N_EXPERT]));
    }
    let mut writer = Writer::new();
    let mut data = Vec::new();
    for (i, (name, ty, dims)) in tensors.iter().enumerate() {
        writer.tensor(name, *ty, dims).map_err(|e| e.to_string())?;
        let n_elems: usize = dims.iter().product();
        data.push(bytes(i as u32, *ty, n_elems));
    }
    Gguf::parse(&writer.to_bytes(data.iter().map(Vec::as_slice))).map_err(|e| e.to_string())
}

/// Random elements: floats in (−1, 1), blocks with every scale a small positive number.
fn bytes(seed: u32, ty: GgmlType, n_elems: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    if ty == GgmlType::F32 {
        return (0..n_elems).flat_map(|_| ((next() >> 8) as f32 / 8_388_608.0 - 1.0).to_le_bytes()).collect();
    }
    // Whatever a byte is part of: without these bits no half is negative, 1 or more, or infinite.
    (0..n_elems / ty.block_elems() * ty.block_bytes()).map(|_| next().to_le_bytes()[3] & 0x3b).collect()
}

/// A backend at work on the made-up operands.
struct Script<'f, B: Backend> {
    b: B,
    file: &'f Gguf,
    /// Rows of the batch.
    rows: u32,
    outputs: Vec<Output>,
}

fn script<B: Backend>(b: B, file: &Gguf, rows: &[u32]) -> Result<Vec<Output>> {
    let mut script = Script { b, file, rows: 0, outputs: Vec::new() };
    for &rows in rows {
        script.rows = rows;
        script.dense()?;
        script.products()?;
        script.experts()?;
        for head_dim in [64, 128, 256] {
            script.attention(head_dim)?;
        }
        for d_state in [64, 128] {
            script.delta_net(d_state)?;
        }
    }
    Ok(script.outputs)
}

impl<B: Backend> Script<'_, B> {
    fn matrix(&mut self, name: &str) -> Result<B::Matrix> {
        self.b.matrix(&self.file.find(name).expect(MADE))
    }

    fn vector(&mut self, len: usize) -> Result<B::Vector> {
        self.b.vector(&self.file.find(&format!("v.{len}")).expect(MADE))
    }

    /// One sequence, of which the first and the last row are wanted.
    fn batch(&mut self, rows: u32, shift: u32) -> Result<B::Batch> {
        let tokens = (0..rows).map(|i| (i + shift) % N_INPUT as u32).collect();
        let spans = vec![Span { slot: 0, start: 0, rows, pages: (0..rows.div_ceil(PAGE_TOKENS)).collect() }];
        let mut outputs = vec![0, rows - 1];
        outputs.dedup();
        self.b.batch(&Batch { tokens, spans, outputs })
    }

    /// `rows` rows of the input with `cols` columns, from its row `shift` on.
    fn input(&mut self, cols: usize, rows: u32, shift: u32) -> Result<B::Tensor> {
        let (table, batch) = (self.matrix(&format!("x.{cols}"))?, self.batch(rows, shift)?);
        let mut out = self.b.tensor(rows, cols as u32)?;
        self.b.embed(&mut out, &table, &batch)?;
        Ok(out)
    }

    fn note(&mut self, operation: impl Into<String>, x: &B::Tensor, rows: u32) -> Result {
        let mut values = Vec::new();
        self.b.read(x, rows, &mut values)?;
        let operation = format!("{} of {} rows", operation.into(), self.rows);
        self.outputs.push(Output { operation, values });
        Ok(())
    }

    fn dense(&mut self) -> Result {
        let rows = self.rows;
        let batch = self.batch(rows, 0)?;
        let (x, y) = (self.input(N_EMBD, rows, 0)?, self.input(N_EMBD, rows, 5)?);
        let (norm, head_norm) = (self.vector(N_EMBD)?, self.vector(64)?);
        let mut out = self.b.tensor(rows, N_EMBD as u32)?;
        self.b.rms_norm(&mut out, &x, &norm, EPS, &batch)?;
        self.note("rms_norm", &out, rows)?;
        self.b.rms_norm_heads(&mut out, &head_norm, EPS, &batch)?;
        self.note("rms_norm_heads", &out, rows)?;
        self.b.add_bias(&mut out, &norm, &batch)?;
        self.note("add_bias", &out, rows)?;
        for act in [GatedAct::SwiGlu, GatedAct::SwiGluOai] {
            self.b.gated_act(&mut out, &x, &y, act, &batch)?;
            self.note(format!("{act:?}"), &out, rows)?;
        }
        self.b.sigmoid_mul(&mut out, &y, &batch)?;
        self.note("sigmoid_mul", &out, rows)?;
        self.b.sigmoid_scale_acc(&mut out, &x, None, &batch)?;
        self.note("add", &out, rows)?;
        let n_out = if rows > 1 { 2 } else { 1 };
        // Room for both in any case, as in a session, whose outputs never grow.
        let mut gathered = self.b.tensor(2, N_EMBD as u32)?;
        self.b.gather_outputs(&mut gathered, &x, &batch)?;
        self.note("gather_outputs", &gathered, n_out)?;
        let mut ids = Vec::new();
        if B::CHOOSES {
            self.b.choose(&gathered, N_EMBD as u32, &batch)?;
            self.b.queue_chosen(n_out)?;
            self.b.read_chosen(&mut ids)?;
        } else {
            let mut logits = Vec::new();
            self.b.read(&gathered, n_out, &mut logits)?;
            ids.extend(logits.chunks(N_EMBD).filter_map(argmax).map(|id| id as u32));
        }
        // Ones where they are, so that a neighbour is as wrong as any other.
        let mut values = vec![0.0; N_EMBD * n_out as usize];
        ids.iter().enumerate().for_each(|(i, id)| values[i * N_EMBD + *id as usize % N_EMBD] = 1.0);
        self.outputs.push(Output { operation: format!("argmax of {n_out} rows"), values });
        Ok(())
    }

    fn products(&mut self) -> Result {
        let rows = self.rows;
        let batch = self.batch(rows, 0)?;
        let x = self.input(N_EMBD, rows, 0)?;
        for &ty in GgmlType::ALL {
            let w = self.matrix(&format!("w.{ty}"))?;
            let mut out = self.b.tensor(rows, N_ROWS as u32)?;
            self.b.matmul(&mut out, &w, &x, &batch)?;
            self.note(format!("matmul {ty}"), &out, rows)?;
            self.b.matmul_add(&mut out, &w, &x, &batch)?;
            self.note(format!("matmul_add {ty}"), &out, rows)?;
            let mut out = self.b.tensor(rows, N_EMBD as u32)?;
            self.b.embed(&mut out, &w, &batch)?;
            self.note(format!("embed {ty}"), &out, rows)?;
        }
        Ok(())
    }

    fn experts(&mut self) -> Result {
        let rows = self.rows;
        let batch = self.batch(rows, 0)?;
        let n_routes = rows * N_USED;
        let (x, routed) = (self.input(N_EMBD, rows, 0)?, self.input(N_EMBD, n_routes, 3)?);
        let (logits, router_bias) = (self.input(N_EXPERT, rows, 0)?, self.vector(N_EXPERT)?);
        let bias = self.vector(N_EXPERT * N_ROWS)?;
        let mut routes = self.b.routes(rows, N_USED)?;
        for (rule, router_bias) in [(RouterRule::SoftmaxAll, None), (RouterRule::SoftmaxChosen, Some(&router_bias))] {
            self.b.route(&mut routes, &logits, router_bias, rule, &batch)?;
            let mut sum = self.input(N_EMBD, rows, 7)?;
            self.b.moe_weighted_acc(&mut sum, &routed, &routes, &batch)?;
            self.note(format!("route {rule:?} and moe_weighted_acc"), &sum, rows)?;
        }
        for &ty in GgmlType::ALL {
            let w = self.matrix(&format!("exps.{ty}"))?;
            let mut out = self.b.tensor(n_routes, N_ROWS as u32)?;
            for (x, x_routed, bias) in [(&x, false, None), (&routed, true, Some(&bias))] {
                self.b.expert_matmul(&mut out, &w, bias, x, x_routed, &routes, &batch)?;
                self.note(format!("expert_matmul {ty}"), &out, n_routes)?;
            }
        }
        Ok(())
    }

    /// Two heads of keys for as many heads of queries as fill a row.
    fn attention(&mut self, head_dim: u32) -> Result {
        let rows = self.rows;
        let (q_dim, kv_dim) = (N_EMBD.max(4 * head_dim as usize), 2 * head_dim);
        let (batch, qg) = (self.batch(rows, 0)?, self.input(2 * N_EMBD, rows, 0)?);
        let n_head = q_dim as u32 / head_dim;
        let (mut q, mut gate) = if q_dim == N_EMBD {
            let (mut q, mut gate) = (self.b.tensor(rows, q_dim as u32)?, self.b.tensor(rows, q_dim as u32)?);
            self.b.split_gate(&mut q, &mut gate, &qg, head_dim, &batch)?;
            self.note(format!("split_gate, heads of {head_dim}"), &gate, rows)?;
            (q, gate)
        } else {
            (self.input(q_dim, rows, 0)?, self.input(q_dim, rows, 1)?)
        };
        for (x, pairing) in [(&mut q, Pairing::SplitHalf), (&mut gate, Pairing::Adjacent)] {
            let inv_freq = (0..head_dim / 4).map(|i| 1e4_f64.powf(-f64::from(i) / f64::from(head_dim))).collect();
            let rope = Rope { n_rot: head_dim / 2, pairing, inv_freq, magnitude: 1.1 };
            self.b.rope(x, head_dim, &rope, &batch)?;
            self.note(format!("rope {pairing:?}, heads of {head_dim}"), x, rows)?;
        }
        let (k, v) = (self.input(kv_dim as usize, rows, 2)?, self.input(kv_dim as usize, rows, 9)?);
        let n_pages = rows.div_ceil(PAGE_TOKENS);
        let mut cache = self.b.cache(&CacheShape { layers: vec![LayerCache::Kv { kv_dim }], n_pages, n_slots: 1 })?;
        self.b.kv_write(&mut cache, 0, &k, &v, &batch)?;
        let sinks = if n_head as usize == N_EXPERT { Some(self.vector(N_EXPERT)?) } else { None };
        let mut out = self.b.tensor(rows, q_dim as u32)?;
        for window in [None, Some(20)] {
            let shape =
                AttentionShape { n_head, n_head_kv: 2, head_dim, scale: 1.0 / (head_dim as f32).sqrt(), window };
            self.b.attention(&mut out, &q, &cache, 0, &shape, sinks.as_ref(), &batch)?;
            self.note(format!("attention, heads of {head_dim}, window {window:?}"), &out, rows)?;
        }
        Ok(())
    }

    fn delta_net(&mut self, d_state: u32) -> Result {
        let rows = self.rows;
        // Two key heads for four value heads.
        let shape = DeltaNetShape { n_head_k: 2, n_head_v: 4, d_state, d_conv: 4 };
        let (conv_dim, d_inner) = (shape.conv_dim(), shape.d_inner());
        let batch = self.batch(rows, 0)?;
        let qkv = self.input(conv_dim as usize, rows, 0)?;
        let (alpha, beta) = (self.input(4, rows, 1)?, self.input(4, rows, 2)?);
        let (taps, dt_bias, norm) =
            (self.vector(4 * conv_dim as usize)?, self.vector(4)?, self.vector(d_state as usize)?);
        let state = LayerCache::Recurrent { conv_dim, d_conv: 4, state: d_inner * d_state };
        let mut cache = self.b.cache(&CacheShape { layers: vec![state], n_pages: 1, n_slots: 1 })?;
        let mut conv = self.b.tensor(rows, conv_dim)?;
        self.b.ssm_conv1d(&mut conv, &qkv, &taps, &mut cache, 0, &shape, &batch)?;
        self.note(format!("ssm_conv1d, states of {d_state}"), &conv, rows)?;
        let mut out = self.b.tensor(rows, d_inner)?;
        // No decay: its logarithm has to be negative, and the vectors have both signs.
        self.b.ssm_delta_net(&mut out, &qkv, &alpha, &beta, Some(&dt_bias), None, &mut cache, 0, &shape, &batch)?;
        self.note(format!("ssm_delta_net, states of {d_state}"), &out, rows)?;
        let z = self.input(d_inner as usize, rows, 4)?;
        self.b.ssm_gated_norm(&mut out, &z, &norm, EPS, &batch)?;
        self.note(format!("ssm_gated_norm, states of {d_state}"), &out, rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(operation: &str, values: &[f32]) -> Output {
        Output { operation: operation.to_owned(), values: values.to_vec() }
    }

    #[test]
    fn a_wrong_a_missing_and_a_broken_result_are_named() {
        let wanted = [output("add", &[1.0, 2.0]), output("mul", &[3.0])];
        let fails = |found: &[Output]| compare(found, &wanted, 1e-3).expect_err("they differ").to_string();
        assert!(compare(&wanted, &wanted, 0.0).is_ok_and(|finding| finding.starts_with("2 operations")));
        assert!(fails(&[output("add", &[1.0, 2.0]), output("mul", &[3.1])]).contains("mul is 3.3e-2"));
        assert!(fails(&[output("add", &[1.0, f32::NAN]), output("mul", &[3.0])]).contains("add is NaN"));
        assert!(fails(&wanted[..1]).contains("1 of 2"));
        assert!(fails(&[output("add", &[1.0]), output("mul", &[3.0])]).contains("add gives 1 values"));
    }

    /// The script looks at every kind of operation that the trait has.
    #[test]
    fn the_script_covers_the_operations() {
        let file = Arc::new(file().expect("well-formed"));
        let outputs = script(CpuBackend::new(Arc::clone(&file)), &file, &[2]).expect("it runs");
        for operation in [
            "rms_norm of",
            "rms_norm_heads",
            "add_bias",
            "SwiGlu of",
            "SwiGluOai",
            "sigmoid_mul",
            "add of",
            "gather_outputs",
            "argmax",
            "matmul Q4_K",
            "matmul_add MXFP4",
            "embed Q6_K",
            "route",
            "expert_matmul Q8_0",
            "split_gate",
            "rope",
            "attention",
            "ssm_conv1d",
            "ssm_delta_net",
            "ssm_gated_norm",
        ] {
            let found: Vec<&Output> = outputs.iter().filter(|output| output.operation.starts_with(operation)).collect();
            assert!(!found.is_empty(), "{operation}");
            let is_something = |output: &&Output| output.values.iter().any(|x| *x != 0.0);
            assert!(found.iter().all(is_something), "{operation} gives zeros");
            assert!(found.iter().all(|output| output.values.iter().all(|x| x.is_finite())), "{operation}");
        }
    }
}
