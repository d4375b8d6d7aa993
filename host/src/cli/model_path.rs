//! Where the model comes from.

use std::path::{Path, PathBuf};

use super::error::CliError;
use crate::models::{ModelError, Store};

/// The model in the checkout, small enough to be kept there.
const DEFAULT: &str = "models/zinc-tiny-qwen35moe.gguf";

/// `given`, a file or the name of one that was fetched, or the checkout's own model, sought from the current directory
/// and the executable upwards.
///
/// # Errors
/// No model was given and the program does not run from a checkout, or the model of this name is not here.
pub fn default_model(given: Option<&Path>) -> Result<PathBuf, CliError> {
    if let Some(path) = given {
        return by_name(path);
    }
    let executable = std::env::current_exe().ok();
    let starts = [std::env::current_dir().ok(), executable];
    let folders = starts.iter().flatten().flat_map(|start| start.ancestors());
    let found = folders.map(|folder| folder.join(DEFAULT)).find(|path| path.is_file());
    found.ok_or_else(|| {
        CliError::Usage(format!("no model: give one with -m FILE ({DEFAULT} was not found next to the program either)"))
    })
}

/// The file that a path or a name means. A path is a path if there is something; otherwise it may be a name.
///
/// # Errors
/// The model of this name is not here.
pub(super) fn by_name(given: &Path) -> Result<PathBuf, CliError> {
    let name = given.to_string_lossy();
    if given.exists() {
        return Ok(given.to_owned());
    }
    match Store::of_user().and_then(|store| store.path(&name)) {
        // No name either: opening it says what is wrong with it as a path.
        Err(ModelError::Unknown(_) | ModelError::NoFolder) => Ok(given.to_owned()),
        found => Ok(found?),
    }
}
