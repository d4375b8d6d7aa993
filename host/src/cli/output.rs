//! Standard output and input, with errors that say which it was.

use std::io::{self, Read, Write};
use std::path::Path;

use super::error::CliError;

/// Writes to stdout and hands it on at once, so that a reader sees tokens as they come.
pub(super) fn write(text: &str) -> Result<(), CliError> {
    let mut stdout = io::stdout().lock();
    let done = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    done.map_err(|source| CliError::Stream { stream: "stdout", source })
}

/// Writes a value as one line of JSON.
pub(super) fn write_json(value: &impl serde::Serialize) -> Result<(), CliError> {
    let mut line = serde_json::to_string(value).map_err(|e| CliError::Usage(e.to_string()))?;
    line.push('\n');
    write(&line)
}

/// All of stdin, which has to be UTF-8.
pub(super) fn read_stdin() -> Result<String, CliError> {
    let mut text = String::new();
    let read = io::stdin().lock().read_to_string(&mut text);
    read.map_err(|source| CliError::Stream { stream: "stdin", source })?;
    Ok(text)
}

/// A text file, which has to be UTF-8.
pub(super) fn read_file(path: &Path) -> Result<String, CliError> {
    std::fs::read_to_string(path).map_err(|source| CliError::File { path: path.to_owned(), source })
}
