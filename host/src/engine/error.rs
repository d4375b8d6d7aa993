//! Why an engine could not be set up.

use std::path::PathBuf;

use crate::chat::TemplateError;
use crate::gguf::GgufError;
use crate::model::LoadError;
use crate::model::config::ConfigError;
use crate::tokenizer::TokenizerError;

/// Why an engine could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The file is damaged.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The metadata describe no model that zinc runs.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The weights could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The file's vocabulary cannot be used.
    #[error("{path}: the tokenizer cannot be built", path = path.display())]
    Tokenizer {
        /// The model file.
        path: PathBuf,
        /// What is wrong.
        source: TokenizerError,
    },
    /// The chat template cannot be used.
    #[error("the chat template cannot be used")]
    Template(#[from] TemplateError),
    /// The memory cannot hold what was asked for.
    #[error("a context of {n_ctx} tokens for {n_slots} at once needs {:.1} GiB, {:.1} GiB are free", gib(*needed), gib(*free))]
    Memory {
        /// Tokens a sequence.
        n_ctx: u32,
        /// Sequences.
        n_slots: u32,
        /// Bytes the caches and activations take.
        needed: u64,
        /// Bytes there are.
        free: u64,
    },
    /// There is no such device, or it cannot run models.
    #[error("device {device}: {why}")]
    Device {
        /// The device asked for.
        device: String,
        /// Why it cannot be used.
        why: String,
    },
    /// An option has a value that cannot work.
    #[error("{option} = {value}: {why}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// Its value.
        value: u64,
        /// What is wrong.
        why: String,
    },
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}
