//! A compiler for kernels: found, or installed by rustup, or by Debian's package manager.

use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Result, bail};
use cuda_builder::Toolchain;

use crate::workspace;

const COMPONENTS: [&str; 2] = ["rust-src", "llvm-tools"];
/// In Debian 12 these are kept current by its security updates.
const DEBIAN_PACKAGES: [&str; 5] = ["rustc-web", "cargo-web", "rust-web-src", "rust-web-llvm", "llvm-22"];

/// Finds a toolchain, or tries to install one; the error says what to do by hand.
pub(super) fn ensure() -> Result<String> {
    let describe = |found: &Toolchain| format!("{} ({})", found.version, found.rustc.display());
    if let Ok(found) = Toolchain::find() {
        return Ok(describe(&found));
    }
    for install in [with_rustup, with_apt] {
        if let Err(why) = install() {
            println!("  {why:#}");
        } else if let Ok(found) = Toolchain::find() {
            return Ok(describe(&found));
        }
    }
    Ok(describe(&Toolchain::find()?))
}

fn with_rustup() -> Result<()> {
    let mut rustup = Command::new("rustup");
    rustup.args(["component", "add"]).args(COMPONENTS);
    run("rustup", rustup)
}

fn with_apt() -> Result<()> {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    if !release.lines().any(|line| line == "VERSION_CODENAME=bookworm") {
        bail!("apt-get: not Debian 12, so the packages' names may differ");
    }
    let user = Command::new("id").arg("-u").output()?;
    if user.stdout.trim_ascii() != b"0" {
        bail!("apt-get: needs root; run `apt-get install {}` with it", DEBIAN_PACKAGES.join(" "));
    }
    let mut update = Command::new("apt-get");
    update.args(["-qq", "update"]);
    run("apt-get update", update)?;
    let mut install = Command::new("apt-get");
    install.args(["-qq", "-y", "--no-install-recommends", "install"]).args(DEBIAN_PACKAGES);
    install.env("DEBIAN_FRONTEND", "noninteractive");
    run("apt-get install", install)
}

fn run(name: &str, mut command: Command) -> Result<()> {
    let words = command.get_args().map(|word| word.to_string_lossy().into_owned());
    println!("  running {} {}", command.get_program().to_string_lossy(), words.collect::<Vec<_>>().join(" "));
    match command.current_dir(workspace::root()).stdin(Stdio::null()).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => bail!("{name} failed ({status})"),
        Err(error) => bail!("{name}: {error}"),
    }
}
