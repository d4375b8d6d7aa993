//! Why a command failed.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::engine::{EngineError, SubmitError};
use crate::{backend, chat, tokenizer};

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The file is damaged.
    #[error(transparent)]
    Gguf(#[from] crate::gguf::GgufError),
    /// The model could not be loaded.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The prompt could not be taken.
    #[error("the request was not taken")]
    Submit(#[from] SubmitError),
    /// The model stopped with an error.
    #[error("generation failed: {0}")]
    Generation(String),
    /// The device failed.
    #[error("the model could not be run")]
    Device(#[from] backend::Error),
    /// The text could not be tokenised.
    #[error("the text could not be tokenised")]
    Tokenizer(#[from] tokenizer::TokenizerError),
    /// The chat template failed.
    #[error("the chat template could not be applied")]
    Template(#[from] chat::TemplateError),
    /// The server could not start, or failed.
    #[error(transparent)]
    Server(#[from] crate::server::ServerError),
    /// A model could not be found or fetched.
    #[error(transparent)]
    Model(#[from] crate::models::ModelError),
    /// A file could not be read or written.
    #[error("{path}", path = path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Standard input or output failed.
    #[error("{stream}")]
    Stream {
        /// Which one.
        stream: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// The command line asks for something that cannot be.
    #[error("{0}")]
    Usage(String),
    /// The check found something missing, and said what.
    #[error("this machine is not ready")]
    NotReady,
    /// The user pressed Ctrl-C.
    #[error("interrupted")]
    Interrupted,
}

impl CliError {
    /// Nothing is wrong: whoever read stdout has seen enough.
    pub fn is_closed_pipe(&self) -> bool {
        matches!(self, Self::Stream { source, .. } if source.kind() == std::io::ErrorKind::BrokenPipe)
    }

    /// What the process ends with.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Interrupted => ExitCode::from(130),
            Self::Usage(_) => ExitCode::from(2),
            _ => ExitCode::FAILURE,
        }
    }
}
