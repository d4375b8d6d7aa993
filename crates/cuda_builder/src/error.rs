//! What can go wrong between a kernel crate and its PTX.

use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use crate::Arch;

const INSTALL: &str = "install one with `cargo xtask setup`, or by hand:
  rustup component add rust-src llvm-tools
  apt-get install rustc-web cargo-web rust-web-src llvm-22   (Debian 12)
or name one with ZINC_KERNEL_RUSTC and ZINC_LLVM_BIN";

/// An error of the builder; each variant says which step failed and on what.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A target was named that the builder does not know.
    #[error("`{0}` is no GPU target: write a compute capability such as 90, 9.0 or sm_90 (known: {known})",
        known = Arch::ALL.map(Arch::name).join(", "))]
    UnknownArch(String),

    /// No usable toolchain.
    #[error("no toolchain for kernels:\n  {}\n{INSTALL}", .0.join("\n  "))]
    NoToolchain(
        /// Each compiler looked at, and what it lacks.
        Vec<String>,
    ),

    /// The kernel crate's folder has no manifest.
    #[error("no Cargo.toml in {}", .0.display())]
    NoCrate(PathBuf),

    /// `[package.metadata.cuda_builder]` holds something the builder does not understand.
    #[error("[package.metadata.cuda_builder] of {krate}: {why}")]
    Metadata {
        /// The package's name.
        krate: String,
        /// Which key, and what was expected.
        why: String,
    },

    /// A tool could not be started.
    #[error("cannot run {}: {source}", tool.display())]
    Spawn {
        /// The program.
        tool: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },

    /// A tool ended with an error.
    #[error("{} failed ({status}){}{stderr}", tool.display(), if stderr.is_empty() { "" } else { ":\n" })]
    Tool {
        /// The program.
        tool: PathBuf,
        /// How it ended.
        status: ExitStatus,
        /// What it wrote to its standard error.
        stderr: String,
    },

    /// A tool's output was not what its manual promises.
    #[error("unexpected output of {tool}: {why}")]
    Output {
        /// The program.
        tool: &'static str,
        /// What was missing or malformed.
        why: String,
    },

    /// The finished PTX breaks one of the builder's rules.
    #[error("PTX for {arch}: {why}")]
    Ptx {
        /// The target.
        arch: Arch,
        /// The rule and the symbol.
        why: String,
    },

    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl Error {
    /// Adds the path to an I/O error.
    pub(crate) fn file(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.to_owned();
        move |source| Error::File { path, source }
    }
}
