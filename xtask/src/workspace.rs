//! Where things are in the checkout, and running cargo in it.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The model in the checkout.
pub(crate) const TINY_MODEL: &str = "models/zinc-tiny-qwen35moe.gguf";

/// The checkout's root.
pub(crate) fn root() -> PathBuf {
    // Cargo sets the variable when it runs the binary; one started by hand is from this checkout too.
    let xtask = env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    xtask.parent().map(Path::to_owned).unwrap_or(xtask)
}

/// The folder of fetched files: `.cache`, or what `ZINC_CACHE` names.
pub(crate) fn cache() -> PathBuf {
    env::var_os("ZINC_CACHE").map_or_else(|| root().join(".cache"), PathBuf::from)
}

/// Where `setup` puts NVIDIA's assembler.
pub(crate) fn ptxas_bin() -> PathBuf {
    cache().join("nvcc/bin")
}

/// The cargo that runs this program.
pub(crate) fn cargo_path() -> PathBuf {
    env::var_os("CARGO").map_or_else(|| "cargo".into(), PathBuf::from)
}

/// Runs cargo in the root, with its output shown.
pub(crate) fn cargo(args: &[&str]) -> Result<()> {
    let path = cargo_path();
    let status = Command::new(&path)
        .current_dir(root())
        .args(args)
        .status()
        .with_context(|| format!("cannot run {}", path.display()))?;
    if status.success() { Ok(()) } else { bail!("cargo {} failed ({status})", args.join(" ")) }
}

/// Sets the permissions of a program; on other systems than Unix there is nothing to set.
#[cfg(unix)]
pub(crate) fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).with_context(|| path.display().to_string())
}

#[cfg(not(unix))]
pub(crate) fn make_executable(_: &Path) -> Result<()> {
    Ok(())
}
