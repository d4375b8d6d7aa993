//! Running the tools.

use std::env;
use std::ffi::OsString;
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
    if let Some(paths) = library_path() {
        command.env(LIBRARY_PATH, paths);
    }
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

const LIBRARY_PATH: &str = "LD_LIBRARY_PATH";

/// The library path without the folders that rustup and cargo add for the compiler in use: another
/// release's rustc would load that one's driver, and call its folder the sysroot.
fn library_path() -> Option<OsString> {
    let paths = env::var_os(LIBRARY_PATH)?;
    let of_rustc = |path: &PathBuf| path.join("rustlib").exists() || path.iter().any(|part| part == "rustlib");
    env::join_paths(env::split_paths(&paths).filter(|path| !of_rustc(path))).ok()
}
