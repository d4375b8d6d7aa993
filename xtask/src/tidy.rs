//! `cargo xtask tidy`: formatting, clippy, and the text rules of `tests/validation/tidy.rs`.

use anyhow::Result;

use crate::workspace;

pub(crate) fn run() -> Result<()> {
    workspace::cargo(&["fmt", "--all", "--check"])?;
    workspace::cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])?;
    workspace::cargo(&["test", "--package", "validation", "tidy"])
}
