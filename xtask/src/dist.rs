//! `cargo xtask dist`: everything that a machine with a GPU needs to run the tests without Rust, in one folder.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use lzma_rust2::{XzOptions, XzWriter};

use crate::workspace;

/// The folder is meant to be copied around.
const MAX_BYTES: u64 = 60 << 20;

const RUN_SH: &str = include_str!("dist.sh");

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Leave out models and test data, for a folder that is used inside a checkout.
    #[arg(long)]
    binaries_only: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let root = workspace::root();
    let dist = root.join("dist");
    if dist.exists() {
        fs::remove_dir_all(&dist).with_context(|| dist.display().to_string())?;
    }
    fs::create_dir_all(&dist)?;
    install(&executable(&["build", "--release", "--package", "host"], "host")?, &dist.join("host.xz"))?;
    let tests = ["test", "--release", "--package", "validation", "--test", "validation", "--no-run"];
    install(&executable(&tests, "validation")?, &dist.join("validation.xz"))?;
    if !args.binaries_only {
        for folder in ["models", "tests/data"] {
            copy_folder(&root.join(folder), &dist.join(folder))?;
        }
    }
    let script = dist.join("run.sh");
    fs::write(&script, RUN_SH)?;
    workspace::make_executable(&script)?;
    let bytes = folder_bytes(&dist)?;
    let mebibytes = bytes as f64 / f64::from(1 << 20);
    println!("{}: {mebibytes:.1} MiB; on the other machine: bash run.sh", dist.display());
    ensure!(bytes <= MAX_BYTES, "the folder is larger than {} MiB", MAX_BYTES >> 20);
    Ok(())
}

/// Builds with cargo and returns the path of the executable of target `name`.
pub(crate) fn executable(args: &[&str], name: &str) -> Result<PathBuf> {
    let output = Command::new(workspace::cargo_path())
        .current_dir(workspace::root())
        .args(args)
        .arg("--message-format=json-render-diagnostics")
        .stderr(Stdio::inherit())
        .output()?;
    if !output.status.success() {
        bail!("cargo {} failed ({})", args.join(" "), output.status);
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    let artifacts = messages.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    artifacts
        .filter(|message| message["target"]["name"] == name)
        .filter_map(|message| message["executable"].as_str().map(PathBuf::from))
        .next_back()
        .with_context(|| format!("cargo built no executable {name}"))
}

/// Packs an executable, without its debug information where `strip` is there to remove it. The PTX is in it.
fn install(from: &Path, to: &Path) -> Result<()> {
    let stripped = tempfile::NamedTempFile::new()?;
    let strip = Command::new("strip").arg("-o").arg(stripped.path()).arg(from).status();
    let from = if strip.is_ok_and(|status| status.success()) { stripped.path() } else { from };
    let mut packed = XzWriter::new(File::create(to)?, XzOptions::with_preset(6))?;
    io::copy(&mut File::open(from)?, &mut packed).with_context(|| to.display().to_string())?;
    packed.finish()?;
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("{} to {}", from.display(), to.display()))?;
    Ok(())
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() { copy_folder(&source, &target)? } else { copy(&source, &target)? }
    }
    Ok(())
}

fn folder_bytes(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        bytes += if metadata.is_dir() { folder_bytes(&entry.path())? } else { metadata.len() };
    }
    Ok(bytes)
}
