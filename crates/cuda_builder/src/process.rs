//! Running the tools.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use crate::Error;

/// Runs `command` and returns what it wrote; a failure carries its standard error.
pub(crate) fn run(command: &mut Command) -> Result<Output, Error> {
    finish(command, Stdio::piped())
}

/// Like [`run`], with the standard error shown as it comes: for steps that take long.
pub(crate) fn run_visible(command: &mut Command) -> Result<Output, Error> {
    finish(command, Stdio::inherit())
}

fn finish(command: &mut Command, stderr: Stdio) -> Result<Output, Error> {
    let tool = PathBuf::from(command.get_program());
    let output = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(stderr)
        .spawn()
        .and_then(std::process::Child::wait_with_output)
        .map_err(|source| Error::Spawn { tool: tool.clone(), source })?;
    if output.status.success() {
        return Ok(output);
    }
    Err(Error::Tool {
        tool,
        status: output.status,
        stderr: String::from_utf8_lossy(&output.stderr).trim_end().to_owned(),
    })
}
