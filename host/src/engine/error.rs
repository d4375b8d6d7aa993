//! Why an engine could not be set up.

use std::path::PathBuf;

use crate::backend;

/// Why an engine could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The device could not take the model, or the context that was asked for.
    #[error("{path}: the model cannot be loaded", path = path.display())]
    Load {
        /// The model file.
        path: PathBuf,
        /// What the device said.
        source: backend::Error,
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
