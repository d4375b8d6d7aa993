//! Options that several commands share.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::cuda::KernelSource;
use crate::engine::{DeviceChoice, EngineOptions, Sampling};
use crate::gpu::{Activations, BackendOptions, KvType};

/// Which model, on what.
#[derive(Debug, Args)]
pub(super) struct ModelArgs {
    /// The GGUF file (of a split model, its first part), or a name that `host model pull` takes; without it, the
    /// small model of the checkout.
    #[arg(short, long, value_name = "FILE|NAME")]
    pub(super) model: Option<PathBuf>,
    /// auto, cpu, cuda, cuda:N, or emulated (slow: for tests).
    #[arg(long, default_value = "auto", value_name = "DEVICE", env = "ZINC_DEVICE")]
    pub(super) device: DeviceChoice,
    #[command(flatten)]
    pub(super) gpu: GpuArgs,
    /// Tokens the context holds, prompt and reply together; without it, the model's own up to a cap.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) ctx: Option<u32>,
    /// Most tokens in one step; the CPU takes no more than 512.
    #[arg(long, default_value_t = 2048, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(super) batch: u32,
    /// Guess this many tokens after each with the model's own block for that (MTP), where it has one, and check them
    /// beside the next token: the same reply in fewer steps; 0 is off.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=16))]
    pub(super) draft: u32,
    /// A Jinja file to use instead of the model's chat template.
    #[arg(long, value_name = "FILE")]
    pub(super) chat_template: Option<PathBuf>,
}

impl ModelArgs {
    /// An engine for one request at a time.
    pub(super) fn options(&self) -> EngineOptions {
        EngineOptions {
            device: self.device.clone(),
            gpu: self.gpu.options(),
            kernels: self.gpu.kernels(),
            n_ctx: self.ctx,
            n_batch: self.batch,
            n_draft: self.draft,
            chat_template: self.chat_template.clone(),
            ..EngineOptions::default()
        }
    }
}

const GPU: &str = "GPU";
const SAMPLING: &str = "Sampling";

/// How a GPU computes.
#[derive(Clone, Debug, Args)]
pub(super) struct GpuArgs {
    /// What the matrix products take: int8 blocks, or f32 for comparisons.
    #[arg(help_heading = GPU, long, value_enum, default_value_t = ActivationsArg::Int8, value_name = "TYPE")]
    activations: ActivationsArg,
    /// How keys and values are kept: f16, or f32 for comparisons.
    #[arg(help_heading = GPU, long, value_enum, default_value_t = KvArg::F16, value_name = "TYPE")]
    kv: KvArg,
    /// Launch the kernels of a step one by one instead of as a captured graph.
    #[arg(help_heading = GPU, long)]
    no_graphs: bool,
    /// Start no kernel before the one ahead of it has ended.
    #[arg(help_heading = GPU, long)]
    no_overlap: bool,
    /// One kernel for each operation: the reference that fused kernels are held against.
    #[arg(help_heading = GPU, long)]
    no_fuse: bool,
    /// Load the kernels from this folder's *.ptx files instead of the built-in ones.
    #[arg(help_heading = GPU, long, value_name = "DIR")]
    ptx: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ActivationsArg {
    F32,
    Int8,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum KvArg {
    F32,
    F16,
}

impl GpuArgs {
    /// Where a CUDA device's kernels come from.
    pub(super) fn kernels(&self) -> KernelSource {
        self.ptx.clone().into()
    }

    pub(super) fn options(&self) -> BackendOptions {
        BackendOptions {
            activations: match self.activations {
                ActivationsArg::F32 => Activations::F32,
                ActivationsArg::Int8 => Activations::Int8,
            },
            kv: match self.kv {
                KvArg::F32 => KvType::F32,
                KvArg::F16 => KvType::F16,
            },
            graphs: !self.no_graphs,
            overlap: !self.no_overlap,
            fuse: !self.no_fuse,
            ..BackendOptions::default()
        }
    }
}

/// How tokens are chosen and when to end.
#[derive(Debug, Args)]
pub(super) struct SamplingArgs {
    /// Divides the logits; 0 always takes the most probable token.
    #[arg(help_heading = SAMPLING, short, long, alias = "temp", default_value_t = 0.0, value_name = "T", allow_negative_numbers = true)]
    temperature: f32,
    /// Choose among this many most probable tokens; 0 or -1 is off.
    #[arg(help_heading = SAMPLING, long, default_value_t = 0, value_name = "K", allow_negative_numbers = true)]
    top_k: i32,
    /// Choose among the most probable tokens that together reach this probability; 1 is off.
    #[arg(help_heading = SAMPLING, long, default_value_t = 1.0, value_name = "P", allow_negative_numbers = true)]
    top_p: f32,
    /// Leave out tokens less probable than this fraction of the most probable one; 0 is off.
    #[arg(help_heading = SAMPLING, long, default_value_t = 0.0, value_name = "P", allow_negative_numbers = true)]
    min_p: f32,
    /// Divides the logits of tokens that were used already; 1 is off.
    #[arg(help_heading = SAMPLING, long, default_value_t = 1.0, value_name = "X", allow_negative_numbers = true)]
    repeat_penalty: f32,
    /// Taken off the logit of a token for every time the reply has it.
    #[arg(help_heading = SAMPLING, long, default_value_t = 0.0, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// Taken off the logit of a token that the reply has.
    #[arg(help_heading = SAMPLING, long, default_value_t = 0.0, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Makes the choices repeatable.
    #[arg(help_heading = SAMPLING, long, value_name = "N")]
    seed: Option<u64>,
    /// Added to a token's logit; may be given several times. `-inf` forbids the token.
    #[arg(help_heading = SAMPLING, long, value_name = "ID=X", value_parser = parse_bias, allow_hyphen_values = true)]
    logit_bias: Vec<(u32, f32)>,
    /// End the reply before this text; may be given several times.
    #[arg(help_heading = SAMPLING, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(super) stop: Vec<String>,
    /// Go on past end-of-generation tokens.
    #[arg(help_heading = SAMPLING, long)]
    pub(super) ignore_eos: bool,
}

impl SamplingArgs {
    pub(super) fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            seed: self.seed,
            logit_bias: self.logit_bias.clone(),
        }
    }
}

/// The form of a command's result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    /// The text, as it comes.
    #[default]
    Text,
    /// One JSON object at the end.
    Json,
}

/// A token limit: `None` where it is -1.
pub(super) fn token_limit(n: i64) -> Option<u32> {
    u32::try_from(n).ok()
}

fn parse_bias(s: &str) -> Result<(u32, f32), String> {
    let (id, bias) = s.split_once('=').ok_or("expected ID=X")?;
    let id = id.trim().parse().map_err(|_| format!("`{id}` is no token id"))?;
    let bias = bias.trim().parse().map_err(|_| format!("`{bias}` is no number"))?;
    Ok((id, bias))
}
