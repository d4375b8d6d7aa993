//! The kernel crate's manifest: name, folder, and its own build options.
//!
//! ```toml
//! [package.metadata.cuda_builder]
//! archs = ["sm_80", "sm_90"]        # targets built where the caller names none
//! opt-args = ["-unroll-threshold=2000"]
//! llc-args = []
//! ```

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::{Arch, Error, Toolchain, process};

/// What the builder needs to know of a kernel crate.
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) root: PathBuf,
    pub(crate) manifest: PathBuf,
    pub(crate) archs: Vec<Arch>,
    pub(crate) opt_args: Vec<String>,
    pub(crate) llc_args: Vec<String>,
    /// The target folder of the crate's workspace.
    pub(crate) target_dir: PathBuf,
}

impl Package {
    /// Asks `cargo metadata` about the crate in `root`.
    pub(crate) fn read(toolchain: &Toolchain, root: &Path) -> Result<Package, Error> {
        let no_crate = |_| Error::NoCrate(root.to_owned());
        let manifest = root.join("Cargo.toml").canonicalize().map_err(no_crate)?;
        let mut cargo = Command::new(&toolchain.cargo);
        cargo
            .env_remove("RUSTUP_TOOLCHAIN")
            .env("RUSTC", &toolchain.rustc)
            .args(["metadata", "--no-deps", "--format-version", "1", "--manifest-path"])
            .arg(&manifest);
        let output = process::run(&mut cargo)?;
        let parsed: Value = serde_json::from_slice(&output.stdout)
            .map_err(|error| Error::Output { tool: "cargo metadata", why: error.to_string() })?;
        from_json(&parsed, &manifest)
    }
}

fn from_json(metadata: &Value, manifest: &Path) -> Result<Package, Error> {
    let missing = |what: &str| Error::Output { tool: "cargo metadata", why: format!("no {what}") };
    let package = metadata["packages"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|package| package["manifest_path"].as_str().is_some_and(|path| Path::new(path) == manifest))
        .ok_or_else(|| missing("package with the manifest's path"))?;
    let name = package["name"].as_str().ok_or_else(|| missing("package name"))?.to_owned();
    let target_dir = metadata["target_directory"].as_str().ok_or_else(|| missing("target_directory"))?;
    let options = &package["metadata"]["cuda_builder"];
    let list = |key: &str| strings(&options[key], key, &name);
    let archs = list("archs")?.iter().map(|arch| arch.parse()).collect::<Result<_, _>>()?;
    Ok(Package {
        archs,
        opt_args: list("opt-args")?,
        llc_args: list("llc-args")?,
        root: manifest.parent().unwrap_or(Path::new("/")).to_owned(),
        manifest: manifest.to_owned(),
        target_dir: target_dir.into(),
        name,
    })
}

fn strings(value: &Value, key: &str, krate: &str) -> Result<Vec<String>, Error> {
    let bad = || Error::Metadata { krate: krate.to_owned(), why: format!("`{key}` is not a list of strings") };
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Array(items) => items.iter().map(|item| item.as_str().map(str::to_owned).ok_or_else(bad)).collect(),
        _ => Err(bad()),
    }
}
