//! How an engine is set up.

use std::path::PathBuf;
use std::str::FromStr;

use crate::cuda::KernelSource;
use crate::gpu::BackendOptions;

/// Which device runs the model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A GPU that can hold the model where there is one, the CPU otherwise.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// A CUDA device: the first usable one, or the one of this index or UUID.
    Cuda(Option<String>),
    /// The GPU kernels on the emulated device: for tests, very slow.
    Emulated,
}

impl std::fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(selector)) => write!(f, "cuda:{selector}"),
            Self::Emulated => f.write_str("emulated"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" | "gpu" => Ok(Self::Cuda(None)),
            "emulated" => Ok(Self::Emulated),
            _ => match s.strip_prefix("cuda:") {
                Some(selector) if !selector.is_empty() => Ok(Self::Cuda(Some(selector.to_owned()))),
                _ => Err(format!("`{s}` is no device; there are auto, cpu, cuda and cuda:N")),
            },
        }
    }
}

/// Most tokens in one step on the CPU. A GPU unpacks an expert's weights once for all of a step's tokens that go to it,
/// so larger steps cost less; on the CPU they only take longer.
pub const CPU_BATCH: u32 = 512;

/// How an engine is set up.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Which device runs the model.
    pub device: DeviceChoice,
    /// How a GPU computes and keeps keys and values.
    pub gpu: BackendOptions,
    /// Where a CUDA device's kernels come from.
    pub kernels: KernelSource,
    /// Tokens a sequence can hold, prompt and reply together; `None` takes the model's own, up to a cap.
    pub n_ctx: Option<u32>,
    /// Sequences that run at once.
    pub n_slots: u32,
    /// Most tokens in one step; the CPU takes no more than [`CPU_BATCH`]. A prompt goes through the model in steps of so
    /// many, and sequences that decode wait for no more than one of them.
    pub n_batch: u32,
    /// Requests that may wait.
    pub n_queue: usize,
    /// Recurrent-state checkpoints kept for prefix reuse (models with delta-net layers only).
    pub n_checkpoints: u32,
    /// Tokens to guess after each, with the model's own block for that; 0: none.
    pub n_draft: u32,
    /// Keep the KV pages of finished requests for later ones with the same beginning.
    pub prefix_reuse: bool,
    /// A chat template to use instead of the model's.
    pub chat_template: Option<PathBuf>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            device: DeviceChoice::Auto,
            gpu: BackendOptions::default(),
            kernels: KernelSource::Embedded,
            n_ctx: None,
            n_slots: 1,
            n_batch: 2048,
            n_queue: 64,
            n_checkpoints: 8,
            n_draft: 0,
            prefix_reuse: true,
            chat_template: None,
        }
    }
}
