//! A model's shape, read from GGUF metadata and checked once.
//!
//! In field docs `{arch}` stands for the value of `general.architecture`. After [`Config::from_gguf`]
//! all sizes are positive, inside the limits below, and consistent with each other, so that later code
//! may multiply and divide them freely.
//!
//! Source: the key names of the GGUF specification, and of `llama-arch.cpp` in llama.cpp.

mod keys;
mod layers;
mod moe;
mod rope;
mod ssm;

use crate::backend::MAX_CONV_INPUTS;
use crate::gguf::{Gguf, GgufError};

use keys::Keys;
pub use moe::Moe;
pub use rope::{Pairing, Rope, RopeScaling, Yarn};
pub use ssm::Ssm;

/// Upper limits: several times the largest published model of any of the architectures. A file that
/// asks for more is damaged or hostile.
const MAX_LAYERS: u32 = 1024;
const MAX_HEADS: u32 = 4096;
const MAX_HEAD_DIM: u32 = 1024;
const MAX_WIDTH: u32 = 1 << 20;
const MAX_EXPERTS: u32 = 4096;
const MAX_CONV: u32 = 16;
const MAX_VOCAB: usize = 1 << 24;

/// The longest context that a position counter and a plan of memory are made for, in tokens. What a
/// file claims beyond this is cut to it.
pub const MAX_N_CTX: usize = 1 << 24;
/// Context length in tokens where the file gives none, or 0.
pub const DEFAULT_N_CTX: usize = 4096;

/// Why a file does not describe a model that zinc can run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A key or tensor is missing, or has the wrong type.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The network is not one of [`Arch`].
    #[error("{file}: architecture {found:?} is not supported (supported: {})", Arch::names())]
    Arch {
        /// The file.
        file: String,
        /// The value of `general.architecture`.
        found: String,
    },
    /// A value is out of range, or contradicts another one.
    #[error("{file}: metadata key {key:?}: {problem}")]
    Key {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// What is wrong with its value.
        problem: String,
    },
    /// A tensor contradicts the metadata.
    #[error("{file}: tensor {tensor:?}: {problem}")]
    Tensor {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        problem: String,
    },
}

macro_rules! archs {
    ($($(#[$doc:meta])* $name:ident = $text:literal;)+) => {
        /// The supported networks, by `general.architecture`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Arch { $($(#[$doc])* $name),+ }

        impl Arch {
            /// Every supported architecture.
            pub const ALL: &[Arch] = &[$(Arch::$name),+];

            /// The name in GGUF files.
            pub const fn name(self) -> &'static str {
                match self { $(Arch::$name => $text),+ }
            }
        }
    };
}

archs! {
    /// Llama 2 and 3, SmolLM2.
    Llama = "llama";
    /// Qwen 2 and 2.5: biases on q, k, v.
    Qwen2 = "qwen2";
    /// Qwen 3: RMS norm on each head's q and k.
    Qwen3 = "qwen3";
    /// Qwen 3 with a mixture of experts.
    Qwen3Moe = "qwen3moe";
    /// Qwen 3.5 and 3.6 with a mixture of experts: gated delta net and full attention in turn.
    Qwen35Moe = "qwen35moe";
    /// gpt-oss: attention sinks, sliding windows, clamped activation, biases everywhere.
    GptOss = "gpt-oss";
}

impl Arch {
    /// The architecture with this GGUF name.
    pub fn from_name(name: &str) -> Option<Arch> {
        Arch::ALL.iter().copied().find(|arch| arch.name() == name)
    }

    /// Whether the FFN is a mixture of experts.
    pub const fn is_moe(self) -> bool {
        matches!(self, Arch::Qwen3Moe | Arch::Qwen35Moe | Arch::GptOss)
    }

    fn names() -> String {
        let names: Vec<&str> = Arch::ALL.iter().map(|arch| arch.name()).collect();
        names.join(", ")
    }
}

/// How a layer mixes tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Attention over all earlier tokens.
    Full,
    /// Attention over the last [`Config::sliding_window`] tokens.
    Sliding,
    /// Gated delta net: a recurrent state instead of a KV cache.
    DeltaNet,
}

/// A model's shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// `general.architecture`.
    pub arch: Arch,
    /// Layers of the main network: `{arch}.block_count` less [`Config::n_nextn`].
    pub n_layer: usize,
    /// `{arch}.nextn_predict_layers`: multi-token-prediction blocks, which follow the layers.
    pub n_nextn: usize,
    /// `{arch}.embedding_length`.
    pub n_embd: usize,
    /// `{arch}.attention.head_count`.
    pub n_head: usize,
    /// `{arch}.attention.head_count_kv`; `n_head` where the key is missing. Divides `n_head`.
    pub n_head_kv: usize,
    /// `{arch}.attention.key_length` and `.value_length`; `n_embd / n_head` where they are missing.
    pub head_dim: usize,
    /// `{arch}.feed_forward_length`: hidden width of the FFN; 0 may stand here if it is all experts.
    pub n_ff: usize,
    /// Rows of `token_embd.weight`. The tokenizer may have fewer tokens, never more.
    pub n_vocab: usize,
    /// `{arch}.context_length`, cut to [`MAX_N_CTX`]; [`DEFAULT_N_CTX`] where it is missing or 0. This
    /// is what the model was made for and nothing to allocate by.
    pub n_ctx_train: usize,
    /// `{arch}.attention.layer_norm_rms_epsilon`.
    pub rms_eps: f32,
    /// Rotary position embedding.
    pub rope: Rope,
    /// `{arch}.attention.sliding_window`: in a [`LayerKind::Sliding`] layer the query at position `i`
    /// sees the keys `j` with `i − j < sliding_window`. 0 if no layer slides.
    pub sliding_window: usize,
    /// `{arch}.full_attention_interval`: of so many layers the last one has full attention and the
    /// others are delta nets; 1 if the network has no delta net.
    pub full_attention_interval: usize,
    /// The kind of each of the `n_layer` layers. Blocks after them (`n_nextn`) have full attention.
    pub layers: Vec<LayerKind>,
    /// The experts, if there are any.
    pub moe: Option<Moe>,
    /// The delta nets, if there are any.
    pub ssm: Option<Ssm>,
    /// Whether the output head is the token embedding: no shard has an `output.weight`.
    pub tied_embeddings: bool,
}

impl Config {
    /// Reads and checks a model's shape.
    ///
    /// # Errors
    /// If the architecture is not supported, or a key is missing, of the wrong type, out of range, or
    /// contradicts another key or tensor. The message names it.
    pub fn from_gguf(gguf: &Gguf) -> Result<Config, ConfigError> {
        let found = gguf.arch()?;
        let arch = Arch::from_name(found)
            .ok_or_else(|| ConfigError::Arch { file: gguf.path().display().to_string(), found: found.to_owned() })?;
        let keys = Keys::new(gguf, arch);

        let n_block = keys.size("block_count", 1..=MAX_LAYERS)?;
        let n_nextn = keys.size_or("nextn_predict_layers", 0..=MAX_LAYERS, 0)?;
        if n_nextn >= n_block {
            let problem = format!("{n_nextn} of {n_block} blocks leave no layer");
            return Err(keys.problem("nextn_predict_layers", problem));
        }
        let n_layer = n_block - n_nextn;
        let n_embd = keys.size("embedding_length", 1..=MAX_WIDTH)?;
        let (n_head, n_head_kv) = read_heads(&keys, n_block)?;
        let head_dim = read_head_dim(&keys, n_embd, n_head)?;
        let n_ctx_train = read_n_ctx(&keys)?;
        let (layers, sliding_window, full_attention_interval) = layers::read(&keys, n_layer)?;
        let min_ff = if arch.is_moe() { 0 } else { 1 };
        let ff_range = min_ff..=MAX_WIDTH;
        let n_ff = match arch.is_moe() {
            true => keys.uniform_size("feed_forward_length", n_block, ff_range)?.unwrap_or(0),
            false => keys.required_uniform("feed_forward_length", n_block, ff_range)?,
        };

        Ok(Config {
            arch,
            n_layer,
            n_nextn,
            n_embd,
            n_head,
            n_head_kv,
            head_dim,
            n_ff,
            n_vocab: read_n_vocab(&keys, n_embd)?,
            n_ctx_train,
            rms_eps: keys.float_in("attention.layer_norm_rms_epsilon", 1e-12..=1.0)?,
            rope: Rope::read(&keys, head_dim, n_ctx_train)?,
            sliding_window,
            full_attention_interval,
            layers,
            moe: Moe::read(&keys, n_block, n_ff)?,
            ssm: Ssm::read(&keys)?,
            tied_embeddings: gguf.find("output.weight").is_none(),
        })
    }

    /// Width of all keys, or all values, of one token in one layer.
    pub fn n_embd_kv(&self) -> usize {
        self.n_head_kv * self.head_dim
    }

    /// Layers with a KV cache.
    pub fn n_attention_layers(&self) -> usize {
        self.layers.iter().filter(|&&kind| kind != LayerKind::DeltaNet).count()
    }

    /// Elements of the KV cache that one token takes, over all layers.
    pub fn kv_elems_per_token(&self) -> usize {
        self.n_attention_layers() * 2 * self.n_embd_kv()
    }

    /// Elements of recurrent state that one sequence takes, over all layers: of each delta net the
    /// state `[dt_rank, d_state, d_state]` and as many inputs of the convolution as a backend may keep.
    pub fn state_elems_per_sequence(&self) -> usize {
        let n_delta = self.n_layer - self.n_attention_layers();
        self.ssm.as_ref().map_or(0, |ssm| {
            let n_inputs = (ssm.d_conv - 1).max(MAX_CONV_INPUTS as usize);
            n_delta * (ssm.d_inner * ssm.d_state + n_inputs * ssm.conv_dim())
        })
    }
}

fn read_heads(keys: &Keys<'_>, n_block: usize) -> Result<(usize, usize), ConfigError> {
    let n_head = keys.required_uniform("attention.head_count", n_block, 1..=MAX_HEADS)?;
    let kv_key = "attention.head_count_kv";
    let n_head_kv = keys.uniform_size(kv_key, n_block, 1..=MAX_HEADS)?.unwrap_or(n_head);
    if !n_head.is_multiple_of(n_head_kv) {
        let problem = format!("{n_head_kv} does not divide the {n_head} query heads");
        return Err(keys.problem(kv_key, problem));
    }
    Ok((n_head, n_head_kv))
}

fn read_head_dim(keys: &Keys<'_>, n_embd: usize, n_head: usize) -> Result<usize, ConfigError> {
    const KEY: &str = "attention.key_length";
    let head_dim = match keys.opt_size(KEY, 1..=MAX_HEAD_DIM)? {
        Some(head_dim) => head_dim,
        None if n_embd.is_multiple_of(n_head) && n_embd / n_head <= MAX_HEAD_DIM as usize => n_embd / n_head,
        None => {
            let problem = format!("missing, and {n_embd} / {n_head} heads is no head size");
            return Err(keys.problem(KEY, problem));
        }
    };
    let value_key = "attention.value_length";
    let value_dim = keys.size_or(value_key, 1..=MAX_HEAD_DIM, head_dim)?;
    if value_dim != head_dim {
        let problem = format!("{value_dim} differs from the key length {head_dim}");
        return Err(keys.problem(value_key, problem));
    }
    Ok(head_dim)
}

fn read_n_ctx(keys: &Keys<'_>) -> Result<usize, ConfigError> {
    let claimed = keys.opt_u64("context_length")?.unwrap_or(0);
    let n_ctx = match usize::try_from(claimed) {
        Ok(0) => DEFAULT_N_CTX,
        Ok(n_ctx) if n_ctx <= MAX_N_CTX => return Ok(n_ctx),
        _ => MAX_N_CTX,
    };
    tracing::warn!(claimed, n_ctx, "the file's context_length is not usable");
    Ok(n_ctx)
}

fn read_n_vocab(keys: &Keys<'_>, n_embd: usize) -> Result<usize, ConfigError> {
    const EMBD: &str = "token_embd.weight";
    const TOKENS: &str = "tokenizer.ggml.tokens";
    let embd = keys.gguf.tensor(EMBD)?;
    if embd.cols() != n_embd || embd.info.dims().len() > 2 {
        let problem = format!("{:?} is not [n_embd = {n_embd}, n_vocab]", embd.info.dims());
        return Err(keys.tensor_problem(EMBD, problem));
    }
    let n_vocab = embd.rows();
    if n_vocab > MAX_VOCAB {
        return Err(keys.tensor_problem(EMBD, format!("{n_vocab} rows exceed {MAX_VOCAB}")));
    }
    // Heads are often padded to a round number of rows; a token without a row cannot be embedded.
    if keys.gguf.get(TOKENS).is_some() {
        let n_tokens = keys.gguf.array(TOKENS)?.len();
        if n_tokens > n_vocab {
            let problem = format!("{n_vocab} rows for {n_tokens} tokens");
            return Err(keys.tensor_problem(EMBD, problem));
        }
    }
    Ok(n_vocab)
}
