//! Loading a model, with a sign of life on a terminal.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;

use super::args::ModelArgs;
use super::error::CliError;
use super::model_path::default_model;
use crate::engine::Engine;
use crate::gguf::Gguf;
use crate::tokenizer::Tokenizer;

/// A loaded engine.
pub(super) struct Loaded {
    pub(super) engine: Engine,
    /// Seconds it took.
    pub(super) load_s: f64,
}

/// Loads the engine that the options ask for.
pub(super) fn engine(args: &ModelArgs) -> Result<Loaded, CliError> {
    let path = default_model(args.model.as_deref())?;
    let spinner = spinner(&path);
    let start = Instant::now();
    let engine = Engine::open(&path, &args.options());
    spinner.finish_and_clear();
    Ok(Loaded { engine: engine?, load_s: start.elapsed().as_secs_f64() })
}

/// Only the tokenizer of a model.
pub(super) fn tokenizer(model: Option<&Path>) -> Result<Tokenizer, CliError> {
    let path = default_model(model)?;
    Ok(Tokenizer::from_gguf(&Gguf::open(&path)?)?)
}

/// The tokenizer of a loaded model, where text is wanted.
pub(super) fn need_tokenizer(engine: &Engine) -> Result<Arc<Tokenizer>, CliError> {
    let missing = || CliError::Usage("the model file has no vocabulary: give the prompt with --ids".to_owned());
    engine.tokenizer().cloned().ok_or_else(missing)
}

fn spinner(path: &Path) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let spinner = ProgressBar::new_spinner().with_message(format!("loading {}", path.display()));
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}
