//! Why an engine could not be set up.

use std::path::PathBuf;

use crate::backend;
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
    /// The chat template that was given cannot be used.
    #[error("{path}: the chat template cannot be used", path = path.display())]
    Template {
        /// The template's file.
        path: PathBuf,
        /// What is wrong.
        source: TemplateError,
    },
    /// A file could not be read.
    #[error("{path}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The device cannot hold what was asked for.
    #[error("a context of {n_ctx} tokens, {n_slots} times, does not fit")]
    Memory {
        /// Tokens a sequence.
        n_ctx: u32,
        /// Sequences.
        n_slots: u32,
        /// The numbers.
        source: backend::Error,
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
