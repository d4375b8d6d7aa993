//! Kernel crate to LLVM bitcode, by cargo.
//!
//! For nvptx64 the objects in an rlib are bitcode, so an ordinary library build is all that is asked
//! of cargo: rustc never links, and neither a linker nor a `cdylib` is needed. rustc is told to leave
//! its IR unoptimised (`no-prepopulate-passes`): `opt` optimises it later once per target, which is
//! also where `__nvvm_reflect("__CUDA_ARCH")` becomes a constant. So one build serves all targets.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::metadata::Package;
use crate::{Error, Toolchain, process};

const TARGET: &str = "nvptx64-nvidia-cuda";

/// Variables of an outer cargo (this may run in a build script) that would change the inner build:
/// its flags, its profile, clippy's wrapper, and a build that stops at metadata.
const OUTER_CARGO: [&str; 15] = [
    "CARGO",
    "CARGO_BUILD_",
    "CARGO_CFG_",
    "CARGO_ENCODED_RUSTFLAGS",
    "CARGO_FEATURE_",
    "CARGO_INCREMENTAL",
    "CARGO_MAKEFLAGS",
    "CARGO_MANIFEST_",
    "CARGO_PKG_",
    "CARGO_PRIMARY_PACKAGE",
    "CARGO_PROFILE_",
    "CARGO_TARGET_",
    "RUSTC",
    "RUSTFLAGS",
    "RUSTUP_TOOLCHAIN",
];

/// What cargo built.
pub(crate) struct Bitcode {
    /// The kernel crate and its dependencies, without `core`.
    pub(crate) own: Vec<PathBuf>,
    /// `core` and `compiler_builtins`.
    pub(crate) std: Vec<PathBuf>,
    /// Every source file of the kernel crate and its path dependencies: what a rebuild depends on.
    pub(crate) sources: Vec<PathBuf>,
}

/// LLVM's passes are left to `opt`, which knows the target. Of rustc's own, jump threading copies what stands between
/// two branches on one condition into both of them: a barrier there becomes two, of which a block's lanes reach
/// different ones, and a shuffle loses half of its warp. LLVM is told of such operations (`link::convergent`), rustc
/// cannot be.
const RUSTFLAGS: &str = "-Cno-prepopulate-passes\x1f-Zmir-enable-passes=-JumpThreading";

pub(crate) fn compile(toolchain: &Toolchain, package: &Package, target_dir: &Path) -> Result<Bitcode, Error> {
    let mut cargo = Command::new(&toolchain.cargo);
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(is_outer_cargo) {
            cargo.env_remove(name);
        }
    }
    cargo
        .current_dir(&package.root)
        .env("RUSTC", &toolchain.rustc)
        // Nightly features on a stable compiler: asm for nvptx64, `extern "ptx-kernel"`, -Zbuild-std.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", RUSTFLAGS)
        .envs([
            ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3"),
            ("CARGO_PROFILE_RELEASE_PANIC", "abort"),
            ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1"),
            ("CARGO_PROFILE_RELEASE_LTO", "off"),
            ("CARGO_PROFILE_RELEASE_DEBUG", "0"),
            ("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "false"),
            ("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "false"),
        ])
        .args(["build", "--quiet", "--lib", "--release", "--target", TARGET, "-Zbuild-std=core"])
        .args(["--message-format", "json-render-diagnostics"])
        .arg("--package")
        .arg(&package.name)
        .arg("--manifest-path")
        .arg(&package.manifest)
        .arg("--target-dir")
        .arg(target_dir);
    let output = process::run_visible(&mut cargo)?;
    let messages = String::from_utf8_lossy(&output.stdout);
    collect(messages.lines(), package)
}

fn is_outer_cargo(name: &str) -> bool {
    OUTER_CARGO.iter().any(|outer| match outer.strip_suffix('_') {
        Some(_) => name.starts_with(outer),
        None => name == *outer || (*outer == "RUSTC" && name.starts_with("RUSTC_")),
    })
}

/// Reads cargo's JSON messages: one `compiler-artifact` line a crate.
fn collect<'a>(messages: impl Iterator<Item = &'a str>, package: &Package) -> Result<Bitcode, Error> {
    let mut bitcode = Bitcode { own: Vec::new(), std: Vec::new(), sources: Vec::new() };
    for line in messages {
        let Ok(message) = serde_json::from_str::<Value>(line) else { continue };
        if message["reason"] != "compiler-artifact" {
            continue;
        }
        let files = message["filenames"].as_array().into_iter().flatten().filter_map(Value::as_str);
        for file in files.map(PathBuf::from) {
            // Proc macros and build scripts are host artifacts; theirs are not rlibs under TARGET.
            let for_target = file.components().any(|part| part.as_os_str() == TARGET);
            if file.extension().is_none_or(|extension| extension != "rlib") || !for_target {
                continue;
            }
            let is_std = message["manifest_path"].as_str().is_some_and(|path| path.contains("/library/"))
                && ["core", "compiler_builtins"].iter().any(|name| message["target"]["name"] == *name);
            if is_std {
                bitcode.std.push(file);
            } else {
                if message["manifest_path"].as_str().is_some_and(|path| Path::new(path) == package.manifest) {
                    bitcode.sources.extend(dep_info(&file)?);
                }
                bitcode.own.push(file);
            }
        }
    }
    if bitcode.own.is_empty() || bitcode.std.is_empty() {
        let why = format!("it built no library for package {}, or no `core`", package.name);
        return Err(Error::Output { tool: "cargo", why });
    }
    bitcode.sources.sort_unstable();
    bitcode.sources.dedup();
    Ok(bitcode)
}

/// The sources in the file `libNAME.d` that cargo puts beside the library asked for: a make rule,
/// `output: source source…`, with absolute paths of this crate's and its path dependencies' files.
fn dep_info(rlib: &Path) -> Result<Vec<PathBuf>, Error> {
    let path = rlib.with_extension("d");
    let text = std::fs::read_to_string(&path).map_err(Error::file(&path))?;
    Ok(text.lines().filter_map(|line| line.split_once(": ")).flat_map(|(_, list)| split_rule(list)).collect())
}

/// Splits at spaces that no backslash precedes.
fn split_rule(list: &str) -> Vec<PathBuf> {
    list.replace("\\ ", "\0").split_whitespace().map(|path| PathBuf::from(path.replace('\0', " "))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_an_outer_cargo_are_recognised() {
        for name in ["RUSTC_WORKSPACE_WRAPPER", "CARGO_PKG_NAME", "RUSTFLAGS", "CARGO_TARGET_DIR", "CARGO"] {
            assert!(is_outer_cargo(name), "{name}");
        }
        for name in ["CARGO_HOME", "CARGO_HTTP_TIMEOUT", "CARGO_NET_OFFLINE", "PATH", "RUSTUP_HOME"] {
            assert!(!is_outer_cargo(name), "{name}");
        }
    }

    #[test]
    fn escaped_spaces_in_dep_info_stay_in_the_path() {
        assert_eq!(split_rule("a.rs dir\\ b/c.rs"), [PathBuf::from("a.rs"), PathBuf::from("dir b/c.rs")]);
    }
}
