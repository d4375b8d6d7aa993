//! Weights: tensor names and shapes of every architecture.

use std::sync::Arc;

use super::config::{self, Arch, Config, ConfigError, LayerKind};
use super::layers::{Attention, DeltaNet, DenseFfn, Ffn, Layer, Mixer, Moe, SharedExpert};
use super::rope;
use crate::backend::{self, AttentionShape, Backend, DeltaNetShape, GatedAct, Rope, RouterRule};
use crate::gguf::{Gguf, GgufError, Tensor};

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file is damaged or lacks a tensor.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The metadata do not describe a model that zinc runs.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A tensor does not fit the metadata.
    #[error("tensor {tensor:?} is {found:?}, the model needs {wanted:?}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its dimensions, innermost first.
        found: Vec<usize>,
        /// The dimensions it should have.
        wanted: Vec<usize>,
    },
    /// The model asks for something that zinc does not do.
    #[error("{0}")]
    Unsupported(String),
    /// The backend failed to take a tensor or to allocate.
    #[error("{what}: {source}")]
    Backend {
        /// What was being loaded.
        what: String,
        /// The backend's reason.
        source: backend::Error,
    },
}

/// A loaded model.
pub struct Model<B: Backend> {
    /// `token_embd`, `[n_vocab, n_embd]`.
    pub token_embd: B::Matrix,
    /// All layers.
    pub layers: Vec<Layer<B>>,
    /// `output_norm`, `[n_embd]`.
    pub output_norm: B::Vector,
    /// `output`, `[n_vocab, n_embd]`; `None` if the head is `token_embd`.
    pub output: Option<B::Matrix>,
    /// `{arch}.attention.layer_norm_rms_epsilon`.
    pub rms_eps: f32,
}

impl<B: Backend> Model<B> {
    /// Hands all weights to the backend.
    ///
    /// # Errors
    /// If a tensor is missing or has another shape than the metadata imply, or the backend has no room.
    pub fn load(backend: &mut B, gguf: &Gguf, config: &Config) -> Result<Model<B>, LoadError> {
        let (n_embd, n_vocab) = (config.n_embd, config.n_vocab);
        let mut loader = Loader { backend, gguf, config };
        let rope = Arc::new(loader.rope()?);
        let token_embd = loader.matrix("token_embd.weight", &[n_embd, n_vocab])?;
        let layers = (0..config.n_layer).map(|il| loader.layer(il, &rope)).collect::<Result<_, _>>()?;
        let output_norm = loader.vector("output_norm.weight", &[n_embd])?;
        let output = match config.tied_embeddings {
            true => None,
            false => Some(loader.matrix("output.weight", &[n_embd, n_vocab])?),
        };
        Ok(Model { token_embd, layers, output_norm, output, rms_eps: config.rms_eps })
    }

    /// The output head's matrix.
    pub fn head(&self) -> &B::Matrix {
        self.output.as_ref().unwrap_or(&self.token_embd)
    }
}

/// The block that predicts further tokens; see [`draft`](super::draft).
pub struct Nextn<B: Backend> {
    /// `nextn.enorm`, `[n_embd]`.
    pub token_norm: B::Vector,
    /// `nextn.hnorm`, `[n_embd]`.
    pub hidden_norm: B::Vector,
    /// `nextn.eh_proj`, `[n_embd, 2·n_embd]`.
    pub proj: B::Matrix,
    /// Full attention and a feed-forward network like those of the layers.
    pub layer: Layer<B>,
    /// `nextn.shared_head_norm`, `[n_embd]`.
    pub head_norm: B::Vector,
    /// `nextn.embed_tokens`, `[n_vocab, n_embd]`; `None` where it is the network's.
    pub token_embd: Option<B::Matrix>,
    /// `nextn.shared_head_head`, `[n_vocab, n_embd]`; `None` where it is the network's.
    pub head: Option<B::Matrix>,
    /// Of the norms.
    pub eps: f32,
}

impl<B: Backend> Nextn<B> {
    /// Hands the first such block's weights to the backend; `None` if the model has none.
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn load(backend: &mut B, gguf: &Gguf, config: &Config) -> Result<Option<Nextn<B>>, LoadError> {
        if config.n_nextn == 0 {
            return Ok(None);
        }
        let (il, n_embd, n_vocab) = (config.n_layer, config.n_embd, config.n_vocab);
        let name = |tensor: &str| format!("blk.{il}.nextn.{tensor}.weight");
        let mut loader = Loader { backend, gguf, config };
        let rope = Arc::new(loader.rope()?);
        let mixer = Mixer::Attention(loader.attention(il, &rope, None)?);
        let ffn = match &config.moe {
            Some(moe) => Ffn::Moe(loader.moe(il, moe)?),
            None => Ffn::Dense(loader.dense_ffn(il)?),
        };
        Ok(Some(Nextn {
            token_norm: loader.vector(&name("enorm"), &[n_embd])?,
            hidden_norm: loader.vector(&name("hnorm"), &[n_embd])?,
            proj: loader.matrix(&name("eh_proj"), &[2 * n_embd, n_embd])?,
            layer: Layer { mixer, ffn },
            head_norm: loader.vector(&name("shared_head_norm"), &[n_embd])?,
            token_embd: loader.opt_matrix(&name("embed_tokens"), &[n_embd, n_vocab])?,
            head: loader.opt_matrix(&name("shared_head_head"), &[n_embd, n_vocab])?,
            eps: config.rms_eps,
        }))
    }
}

struct Loader<'a, B> {
    backend: &'a mut B,
    gguf: &'a Gguf,
    config: &'a Config,
}

/// A tensor with the shape `dims`, innermost first; trailing dimensions of 1 may be left out.
fn shaped<'a>(tensor: Tensor<'a>, dims: &[usize]) -> Result<Tensor<'a>, LoadError> {
    let significant = |dims: &[usize]| dims.iter().rposition(|dim| *dim != 1).map_or(0, |last| last + 1);
    let found = tensor.info.dims();
    if found[..significant(found)] == dims[..significant(dims)] {
        return Ok(tensor);
    }
    Err(LoadError::Shape { tensor: tensor.info.name.clone(), found: found.to_vec(), wanted: dims.to_vec() })
}

fn taken<T>(name: &str, result: backend::Result<T>) -> Result<T, LoadError> {
    result.map_err(|source| LoadError::Backend { what: format!("tensor {name:?}"), source })
}

impl<B: Backend> Loader<'_, B> {
    fn matrix(&mut self, name: &str, dims: &[usize]) -> Result<B::Matrix, LoadError> {
        let tensor = shaped(self.gguf.tensor(name)?, dims)?;
        taken(name, self.backend.matrix(&tensor))
    }

    fn vector(&mut self, name: &str, dims: &[usize]) -> Result<B::Vector, LoadError> {
        let tensor = shaped(self.gguf.tensor(name)?, dims)?;
        taken(name, self.backend.vector(&tensor))
    }

    fn opt_matrix(&mut self, name: &str, dims: &[usize]) -> Result<Option<B::Matrix>, LoadError> {
        self.gguf.find(name).map(|_| self.matrix(name, dims)).transpose()
    }

    fn opt_vector(&mut self, name: &str, dims: &[usize]) -> Result<Option<B::Vector>, LoadError> {
        self.gguf.find(name).map(|_| self.vector(name, dims)).transpose()
    }

    fn rope(&mut self) -> Result<Rope, LoadError> {
        let config = &self.config.rope;
        let Some(tensor) = self.gguf.find("rope_freqs.weight") else { return Ok(rope::resolve(config, None)) };
        let tensor = shaped(tensor, &[config.n_rot / 2])?;
        let mut divisors = vec![0.0; config.n_rot / 2];
        crate::cpu::dequant::dequantize_row(tensor.info.ty, tensor.data(), &mut divisors);
        if let Some(bad) = divisors.iter().find(|divisor| !(**divisor > 0.0 && divisor.is_finite())) {
            return Err(LoadError::Unsupported(format!("tensor \"rope_freqs.weight\" divides a frequency by {bad}")));
        }
        Ok(rope::resolve(config, Some(&divisors)))
    }

    fn layer(&mut self, il: usize, rope: &Arc<Rope>) -> Result<Layer<B>, LoadError> {
        let mixer = match self.config.layers[il] {
            LayerKind::Full => Mixer::Attention(self.attention(il, rope, None)?),
            LayerKind::Sliding => {
                Mixer::Attention(self.attention(il, rope, Some(self.config.sliding_window as u32))?)
            }
            LayerKind::DeltaNet => Mixer::DeltaNet(self.delta_net(il)?),
        };
        let ffn = match &self.config.moe {
            Some(moe) => Ffn::Moe(self.moe(il, moe)?),
            None => Ffn::Dense(self.dense_ffn(il)?),
        };
        Ok(Layer { mixer, ffn })
    }

    fn attention(&mut self, il: usize, rope: &Arc<Rope>, window: Option<u32>) -> Result<Attention<B>, LoadError> {
        let name = |tensor: &str| format!("blk.{il}.{tensor}");
        let &Config { arch, n_embd, n_head, n_head_kv, head_dim, rms_eps, .. } = self.config;
        let (q_dim, kv_dim) = (n_head * head_dim, n_head_kv * head_dim);
        let gated = arch == Arch::Qwen35Moe;
        let q_rows = if gated { 2 * q_dim } else { q_dim };
        let has_head_norms = matches!(arch, Arch::Qwen3 | Arch::Qwen3Moe | Arch::Qwen35Moe);
        let mut head_norm = |tensor: &str| match has_head_norms {
            true => self.vector(&name(tensor), &[head_dim]).map(Some),
            false => Ok(None),
        };
        let (q_norm, k_norm) = (head_norm("attn_q_norm.weight")?, head_norm("attn_k_norm.weight")?);
        Ok(Attention {
            norm: self.vector(&name("attn_norm.weight"), &[n_embd])?,
            q: self.matrix(&name("attn_q.weight"), &[n_embd, q_rows])?,
            k: self.matrix(&name("attn_k.weight"), &[n_embd, kv_dim])?,
            v: self.matrix(&name("attn_v.weight"), &[n_embd, kv_dim])?,
            output: self.matrix(&name("attn_output.weight"), &[q_dim, n_embd])?,
            q_bias: self.opt_vector(&name("attn_q.bias"), &[q_rows])?,
            k_bias: self.opt_vector(&name("attn_k.bias"), &[kv_dim])?,
            v_bias: self.opt_vector(&name("attn_v.bias"), &[kv_dim])?,
            output_bias: self.opt_vector(&name("attn_output.bias"), &[n_embd])?,
            q_norm,
            k_norm,
            sinks: match arch {
                Arch::GptOss => Some(self.vector(&name("attn_sinks.weight"), &[n_head])?),
                _ => None,
            },
            gated,
            shape: AttentionShape {
                n_head: n_head as u32,
                n_head_kv: n_head_kv as u32,
                head_dim: head_dim as u32,
                scale: 1.0 / (head_dim as f32).sqrt(),
                window,
            },
            rope: Arc::clone(rope),
            eps: rms_eps,
        })
    }

    fn delta_net(&mut self, il: usize) -> Result<DeltaNet<B>, LoadError> {
        let name = |tensor: &str| format!("blk.{il}.{tensor}");
        let &Config { n_embd, rms_eps, .. } = self.config;
        let ssm = self.config.ssm.as_ref().expect("a config with delta nets has their sizes");
        let (n_head_v, d_inner, conv_dim) = (ssm.dt_rank, ssm.d_inner, ssm.conv_dim());
        Ok(DeltaNet {
            norm: self.vector(&name("attn_norm.weight"), &[n_embd])?,
            qkv: self.matrix(&name("attn_qkv.weight"), &[n_embd, conv_dim])?,
            z: self.matrix(&name("attn_gate.weight"), &[n_embd, d_inner])?,
            alpha: self.matrix(&name("ssm_alpha.weight"), &[n_embd, n_head_v])?,
            beta: self.matrix(&name("ssm_beta.weight"), &[n_embd, n_head_v])?,
            conv1d: self.vector(&name("ssm_conv1d.weight"), &[ssm.d_conv, conv_dim])?,
            dt_bias: self.opt_vector(&name("ssm_dt.bias"), &[n_head_v])?,
            a: self.opt_vector(&name("ssm_a"), &[n_head_v])?,
            out_norm: self.vector(&name("ssm_norm.weight"), &[ssm.d_state])?,
            output: self.matrix(&name("ssm_out.weight"), &[d_inner, n_embd])?,
            shape: DeltaNetShape {
                n_head_k: ssm.n_group as u32,
                n_head_v: n_head_v as u32,
                d_state: ssm.d_state as u32,
                d_conv: ssm.d_conv as u32,
            },
            eps: rms_eps,
        })
    }

    /// The norm before the FFN has two names.
    fn ffn_norm(&mut self, il: usize) -> Result<B::Vector, LoadError> {
        let tensor = match self.config.arch {
            Arch::Qwen35Moe | Arch::GptOss => "post_attention_norm",
            _ => "ffn_norm",
        };
        self.vector(&format!("blk.{il}.{tensor}.weight"), &[self.config.n_embd])
    }

    fn dense_ffn(&mut self, il: usize) -> Result<DenseFfn<B>, LoadError> {
        let name = |tensor: &str| format!("blk.{il}.{tensor}.weight");
        let &Config { n_embd, n_ff, rms_eps, .. } = self.config;
        Ok(DenseFfn {
            norm: self.ffn_norm(il)?,
            gate: self.matrix(&name("ffn_gate"), &[n_embd, n_ff])?,
            up: self.matrix(&name("ffn_up"), &[n_embd, n_ff])?,
            down: self.matrix(&name("ffn_down"), &[n_ff, n_embd])?,
            act: GatedAct::SwiGlu,
            eps: rms_eps,
        })
    }

    fn moe(&mut self, il: usize, moe: &config::Moe) -> Result<Moe<B>, LoadError> {
        let weight = |tensor: &str| format!("blk.{il}.{tensor}.weight");
        let bias = |tensor: &str| format!("blk.{il}.{tensor}.bias");
        let &Config { arch, n_embd, rms_eps, .. } = self.config;
        let &config::Moe { n_expert, n_ff_exp, n_ff_shexp, norm_weights, weights_scale, .. } = moe;
        if weights_scale != 1.0 {
            return Err(LoadError::Unsupported(format!("expert weights scaled by {weights_scale}")));
        }
        let shared = (n_ff_shexp > 0).then(|| self.shared_expert(il, n_ff_shexp)).transpose()?;
        Ok(Moe {
            norm: self.ffn_norm(il)?,
            router: self.matrix(&weight("ffn_gate_inp"), &[n_embd, n_expert])?,
            router_bias: self.opt_vector(&bias("ffn_gate_inp"), &[n_expert])?,
            rule: if norm_weights { RouterRule::SoftmaxChosen } else { RouterRule::SoftmaxAll },
            gate: self.matrix(&weight("ffn_gate_exps"), &[n_embd, n_ff_exp, n_expert])?,
            up: self.matrix(&weight("ffn_up_exps"), &[n_embd, n_ff_exp, n_expert])?,
            down: self.matrix(&weight("ffn_down_exps"), &[n_ff_exp, n_embd, n_expert])?,
            gate_bias: self.opt_vector(&bias("ffn_gate_exps"), &[n_ff_exp, n_expert])?,
            up_bias: self.opt_vector(&bias("ffn_up_exps"), &[n_ff_exp, n_expert])?,
            down_bias: self.opt_vector(&bias("ffn_down_exps"), &[n_embd, n_expert])?,
            act: if arch == Arch::GptOss { GatedAct::SwiGluOai } else { GatedAct::SwiGlu },
            shared,
            eps: rms_eps,
        })
    }

    fn shared_expert(&mut self, il: usize, n_ff: usize) -> Result<SharedExpert<B>, LoadError> {
        let name = |tensor: &str| format!("blk.{il}.{tensor}.weight");
        let n_embd = self.config.n_embd;
        Ok(SharedExpert {
            router: self.opt_matrix(&name("ffn_gate_inp_shexp"), &[n_embd])?,
            gate: self.matrix(&name("ffn_gate_shexp"), &[n_embd, n_ff])?,
            up: self.matrix(&name("ffn_up_shexp"), &[n_embd, n_ff])?,
            down: self.matrix(&name("ffn_down_shexp"), &[n_ff, n_embd])?,
        })
    }
}
