//! From a file and options to an engine.

use std::path::Path;

use super::{Engine, EngineError, EngineOptions};

pub(super) fn open(path: &Path, _options: &EngineOptions) -> Result<Engine, EngineError> {
    Err(EngineError::Load {
        path: path.to_owned(),
        source: crate::backend::Error::Unsupported("not merged yet".into()),
    })
}
