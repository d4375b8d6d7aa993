//! `cargo xtask test`: setup, formatting, then every test of the workspace.

use std::process::Command;

use anyhow::{Result, bail};

use crate::{setup, workspace};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Fail where a GPU test would be skipped because there is no GPU.
    #[arg(long)]
    gpu: bool,
    /// Only tests whose name contains this.
    filter: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    // What could not be fetched, and formatting, fail the command too, but only after the tests have said what
    // they have to say.
    let fetched = setup::run();
    let formatted = workspace::cargo(&["fmt", "--all", "--check"]);
    let mut cargo = Command::new(workspace::cargo_path());
    cargo.current_dir(workspace::root()).args(["test", "--workspace"]).args(&args.filter);
    // A test that lacks a file fails instead of reporting itself skipped.
    cargo.env("ZINC_REQUIRE", "1");
    if args.gpu {
        cargo.env("ZINC_GPU", "1");
    }
    let status = cargo.status()?;
    if !status.success() {
        bail!("tests failed ({status})");
    }
    fetched.and(formatted)
}
