//! The tensors of each network: names, types and dimensions as llama.cpp's converter and the published
//! quant mixes have them.

use host::gguf::GgmlType;
use host::model::config::Arch;

use super::dims::Dims;

/// Taps of the delta net's convolution.
pub(super) const D_CONV: usize = 4;
/// Of so many layers the last one has full attention.
pub(super) const FULL_ATTENTION_INTERVAL: usize = 4;

/// What a tensor is filled with.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fill {
    /// Random blocks with mean 0 and about this standard deviation.
    Blocks { std: f32 },
    /// 1 and a little noise: norm weights.
    AroundOne,
    /// Negative numbers: the delta net's decay rates.
    Decay,
}

/// A tensor to write; dimensions are innermost first.
#[derive(Debug)]
pub(super) struct TensorPlan {
    pub(super) name: String,
    pub(super) ty: GgmlType,
    pub(super) dims: Vec<usize>,
    pub(super) fill: Fill,
}

/// All tensors of a network in file order.
pub(super) fn tensors(arch: Arch, dims: &Dims, mtp: bool) -> Vec<TensorPlan> {
    let mut plan = Plan { arch, d: *dims, block: String::new(), tensors: Vec::new() };
    let d = &plan.d;
    let (n_embd, n_vocab) = (d.n_embd, d.n_vocab);
    let (embd, head) = match arch {
        Arch::GptOss => (GgmlType::Q8_0, GgmlType::Q8_0),
        Arch::Qwen2 => (GgmlType::Q5_0, GgmlType::Q5_1),
        _ => (GgmlType::Q4K, GgmlType::Q6K),
    };
    // Llama's is also the output head, whose logits a standard deviation of 1 would blow up.
    let tied = arch == Arch::Llama;
    plan.random("token_embd.weight", embd, &[n_embd, n_vocab], if tied { 0.1 } else { 1.0 });
    for il in 0..dims.n_layer + usize::from(mtp) {
        plan.block = format!("blk.{il}.");
        plan.layer(il);
    }
    plan.block.clear();
    plan.norm("output_norm", n_embd);
    if !tied {
        plan.weight("output", head, n_embd, n_vocab);
    }
    plan.tensors
}

struct Plan {
    arch: Arch,
    d: Dims,
    /// Prefix of tensor names.
    block: String,
    tensors: Vec<TensorPlan>,
}

impl Plan {
    fn push(&mut self, name: &str, ty: GgmlType, dims: &[usize], fill: Fill) {
        let name = format!("{}{name}", self.block);
        self.tensors.push(TensorPlan { name, ty, dims: dims.to_vec(), fill });
    }

    fn random(&mut self, name: &str, ty: GgmlType, dims: &[usize], std: f32) {
        self.push(name, ty, dims, Fill::Blocks { std });
    }

    /// A matrix that keeps the size of what it multiplies.
    fn weight(&mut self, name: &str, ty: GgmlType, cols: usize, rows: usize) {
        let std = (cols as f32).powf(-0.5);
        self.random(&format!("{name}.weight"), ty, &[cols, rows], std);
    }

    /// One such matrix for each expert.
    fn expert_weight(&mut self, name: &str, ty: GgmlType, cols: usize, rows: usize) {
        let std = (cols as f32).powf(-0.5);
        let dims = [cols, rows, self.d.n_expert];
        self.random(&format!("{name}.weight"), ty, &dims, std);
    }

    fn bias(&mut self, name: &str, dims: &[usize]) {
        self.random(&format!("{name}.bias"), GgmlType::F32, dims, 0.1);
    }

    fn norm(&mut self, name: &str, len: usize) {
        self.push(&format!("{name}.weight"), GgmlType::F32, &[len], Fill::AroundOne);
    }

    fn layer(&mut self, il: usize) {
        let n_embd = self.d.n_embd;
        self.norm("attn_norm", n_embd);
        let ffn_norm = match self.arch {
            Arch::Qwen35Moe | Arch::GptOss => "post_attention_norm",
            _ => "ffn_norm",
        };
        self.norm(ffn_norm, n_embd);
        match self.arch {
            Arch::Llama => {
                self.attention(GgmlType::F16, 1);
                self.dense(GgmlType::Bf16, GgmlType::Q8_0);
            }
            Arch::Qwen2 => {
                self.attention(GgmlType::Q5_0, 1);
                self.dense(GgmlType::Q4_0, GgmlType::Q4_1);
            }
            Arch::Qwen3 => {
                self.attention(GgmlType::Q5K, 1);
                self.dense(GgmlType::Q4K, GgmlType::Q6K);
            }
            Arch::Qwen3Moe => {
                self.attention(GgmlType::Q4K, 1);
                self.experts(GgmlType::Q4K, GgmlType::Q6K);
            }
            Arch::GptOss => {
                self.attention(GgmlType::Q8_0, 1);
                self.random("attn_sinks.weight", GgmlType::F32, &[self.d.n_head], 1.0);
                self.experts(GgmlType::Mxfp4, GgmlType::Mxfp4);
            }
            Arch::Qwen35Moe => self.qwen35_layer(il),
        }
    }

    fn qwen35_layer(&mut self, il: usize) {
        let is_mtp = il == self.d.n_layer;
        if is_mtp || (il + 1).is_multiple_of(FULL_ATTENTION_INTERVAL) {
            // Queries and their gates, side by side in each head.
            self.attention(GgmlType::Q8_0, 2);
        } else {
            self.delta_net();
        }
        self.experts(GgmlType::Q4K, GgmlType::Q5K);
        self.shared_expert();
        if is_mtp {
            let n_embd = self.d.n_embd;
            self.weight("nextn.eh_proj", GgmlType::Q8_0, 2 * n_embd, n_embd);
            for name in ["enorm", "hnorm", "shared_head_norm"] {
                self.norm(&format!("nextn.{name}"), n_embd);
            }
        }
    }

    /// `q_parts` is how many rows `attn_q` has for each row of queries.
    fn attention(&mut self, ty: GgmlType, q_parts: usize) {
        let Dims { n_embd, n_head, n_head_kv, head_dim, .. } = self.d;
        let has_bias = matches!(self.arch, Arch::Qwen2 | Arch::GptOss);
        let rows = [n_head * head_dim * q_parts, n_head_kv * head_dim, n_head_kv * head_dim];
        for (name, rows) in ["attn_q", "attn_k", "attn_v"].into_iter().zip(rows) {
            self.weight(name, ty, n_embd, rows);
            if has_bias {
                self.bias(name, &[rows]);
            }
        }
        self.weight("attn_output", ty, n_head * head_dim, n_embd);
        if self.arch == Arch::GptOss {
            self.bias("attn_output", &[n_embd]);
        }
        if matches!(self.arch, Arch::Qwen3 | Arch::Qwen3Moe | Arch::Qwen35Moe) {
            self.norm("attn_q_norm", head_dim);
            self.norm("attn_k_norm", head_dim);
        }
    }

    fn delta_net(&mut self) {
        let Dims { n_embd, n_group, dt_rank, d_state, .. } = self.d;
        let d_inner = dt_rank * d_state;
        let conv_dim = 2 * n_group * d_state + d_inner;
        self.weight("attn_qkv", GgmlType::Q8_0, n_embd, conv_dim);
        self.weight("attn_gate", GgmlType::Q8_0, n_embd, d_inner);
        self.random("ssm_conv1d.weight", GgmlType::F32, &[D_CONV, conv_dim], 0.5);
        self.random("ssm_dt.bias", GgmlType::F32, &[dt_rank], 0.5);
        self.push("ssm_a", GgmlType::F32, &[dt_rank], Fill::Decay);
        self.weight("ssm_beta", GgmlType::F32, n_embd, dt_rank);
        self.weight("ssm_alpha", GgmlType::F32, n_embd, dt_rank);
        self.norm("ssm_norm", d_state);
        self.weight("ssm_out", GgmlType::Q8_0, d_inner, n_embd);
    }

    fn dense(&mut self, gate_up: GgmlType, down: GgmlType) {
        let Dims { n_embd, n_ff, .. } = self.d;
        self.weight("ffn_gate", gate_up, n_embd, n_ff);
        self.weight("ffn_up", gate_up, n_embd, n_ff);
        self.weight("ffn_down", down, n_ff, n_embd);
    }

    fn experts(&mut self, gate_up: GgmlType, down: GgmlType) {
        let Dims { n_embd, n_ff, n_expert, .. } = self.d;
        self.weight("ffn_gate_inp", GgmlType::F32, n_embd, n_expert);
        self.expert_weight("ffn_gate_exps", gate_up, n_embd, n_ff);
        self.expert_weight("ffn_up_exps", gate_up, n_embd, n_ff);
        self.expert_weight("ffn_down_exps", down, n_ff, n_embd);
        if self.arch == Arch::GptOss {
            self.bias("ffn_gate_inp", &[n_expert]);
            self.bias("ffn_gate_exps", &[n_ff, n_expert]);
            self.bias("ffn_up_exps", &[n_ff, n_expert]);
            self.bias("ffn_down_exps", &[n_embd, n_expert]);
        }
    }

    fn shared_expert(&mut self) {
        let Dims { n_embd, n_ff_shexp, .. } = self.d;
        let std = (n_embd as f32).powf(-0.5);
        self.random("ffn_gate_inp_shexp.weight", GgmlType::F32, &[n_embd], std);
        self.weight("ffn_gate_shexp", GgmlType::Q8_0, n_embd, n_ff_shexp);
        self.weight("ffn_up_shexp", GgmlType::Q8_0, n_embd, n_ff_shexp);
        self.weight("ffn_down_shexp", GgmlType::Q8_0, n_ff_shexp, n_embd);
    }
}
