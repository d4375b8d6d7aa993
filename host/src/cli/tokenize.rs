//! `host tokenize`: text to ids.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use super::error::CliError;
use super::{load, output};
use crate::tokenizer::Encode;

#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    /// The GGUF file; without it, the small model of the checkout.
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// As for a prompt: start with BOS if the model wants it, and take special tokens in the text for what they are.
    #[arg(long)]
    special: bool,
    /// Read the text from a file.
    #[arg(short, long, value_name = "FILE", conflicts_with = "text")]
    file: Option<PathBuf>,
    /// The text; without it and -f it is read from stdin.
    #[arg(allow_hyphen_values = true)]
    text: Option<String>,
}

pub(super) fn tokenize(args: Args) -> Result<(), CliError> {
    let text = match (args.text, &args.file) {
        (Some(text), _) => text,
        (None, Some(path)) => output::read_file(path)?,
        (None, None) => output::read_stdin()?,
    };
    let tokenizer = load::tokenizer(args.model.as_deref())?;
    output::write_json(&tokenizer.encode(&text, Encode { bos: args.special, special: args.special }))
}
