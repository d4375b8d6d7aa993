//! Where the model comes from.

use std::path::{Path, PathBuf};

use super::error::CliError;

/// The model in the checkout, small enough to be kept there.
const DEFAULT: &str = "models/zinc-tiny-qwen35moe.gguf";

/// `given`, or the checkout's own model, sought from the current directory and the executable upwards.
///
/// # Errors
/// No model was given and the program does not run from a checkout.
pub fn default_model(given: Option<&Path>) -> Result<PathBuf, CliError> {
    if let Some(path) = given {
        return Ok(path.to_owned());
    }
    let executable = std::env::current_exe().ok();
    let starts = [std::env::current_dir().ok(), executable];
    let folders = starts.iter().flatten().flat_map(|start| start.ancestors());
    let found = folders.map(|folder| folder.join(DEFAULT)).find(|path| path.is_file());
    found.ok_or_else(|| {
        CliError::Usage(format!("no model: give one with -m FILE ({DEFAULT} was not found next to the program either)"))
    })
}
