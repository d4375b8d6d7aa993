//! llama.cpp's `llama-bench`: built where it is not given, and run.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::{Args, Rates};
use crate::{setup, workspace};

/// A `llama-bench` of the pinned sources for this machine's CPU, in the cache; built when it is first asked for.
pub(super) fn build() -> Result<PathBuf> {
    let folder = workspace::cache().join("peer/build");
    let program = folder.join("bin/llama-bench");
    if program.exists() {
        return Ok(program);
    }
    let source = setup::llama_cpp()?;
    println!("bench: building llama-bench in {} (minutes, once)", folder.display());
    let environment = build_environment()?;
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let mut configure = Command::new("cmake");
    configure.args(["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF"]);
    configure.args(["-DGGML_NATIVE=ON", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_UI=OFF"]);
    configure.args(["-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_MTMD=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"]);
    configure.arg("-S").arg(&source).arg("-B").arg(&folder);
    let mut compile = Command::new("cmake");
    compile.arg("--build").arg(&folder).args(["--target", "llama-bench"]);
    for mut step in [configure, compile] {
        // Its log is long, and of interest only where it fails.
        let output = step.envs(environment.clone()).stdin(Stdio::null()).output().context("cannot run cmake")?;
        if !output.status.success() {
            let log = [output.stdout, output.stderr].concat();
            bail!("llama.cpp does not build ({}):\n{}", output.status, String::from_utf8_lossy(&log));
        }
    }
    if program.exists() { Ok(program) } else { bail!("cmake left no {}", program.display()) }
}

/// The machine's cmake and ninja, or pip's.
fn build_environment() -> Result<Vec<(&'static str, OsString)>> {
    let runs = |name: &str| {
        let version = Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        version.is_ok_and(|status| status.success())
    };
    if runs("cmake") && runs("ninja") {
        return Ok(Vec::new());
    }
    let tools = setup::python_tools(&["cmake", "ninja"])?;
    let path = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths(std::iter::once(tools.join("bin")).chain(env::split_paths(&path)))?;
    // pip's programs are scripts that import their package.
    Ok(vec![("PATH", path), ("PYTHONPATH", tools.into())])
}

/// One result of `llama-bench`, of many fields.
#[derive(Deserialize)]
struct Test {
    n_prompt: u32,
    n_gen: u32,
    samples_ts: Vec<f64>,
}

/// Runs the peer once, after its own warm-up.
pub(super) fn run(program: &Path, model: &Path, args: &Args) -> Result<Rates> {
    let prefill = ["-p".to_owned(), args.n_prompt.to_string(), "-n".to_owned(), "0".to_owned()];
    // Ours decodes after the prompt, so the peer does.
    let decode = ["-p", "0", "-n", &args.n_gen.to_string(), "-d", &args.n_prompt.to_string()].map(str::to_owned);
    Ok(Rates {
        prefill_tok_s: rate(program, model, args, &prefill)?,
        decode_tok_s: rate(program, model, args, &decode)?,
    })
}

fn rate(program: &Path, model: &Path, args: &Args, test: &[String]) -> Result<f64> {
    let mut peer = Command::new(program);
    peer.arg("-m").arg(model).args(["-r", "1", "-o", "json"]).args(test);
    if args.cpu {
        peer.args(["-ngl", "0", "-t", &args.threads.to_string()]);
    } else {
        peer.args(["-ngl", "99", "-fa", "1"]);
    }
    let output = peer.stdin(Stdio::null()).output().with_context(|| format!("cannot run {}", program.display()))?;
    if !output.status.success() {
        bail!("{} failed ({}):\n{}", program.display(), output.status, String::from_utf8_lossy(&output.stderr));
    }
    let tests: Vec<Test> = serde_json::from_slice(&output.stdout).context("llama-bench's output")?;
    let done = tests.iter().find(|test| test.n_prompt + test.n_gen > 0).context("llama-bench reports no test")?;
    done.samples_ts.last().copied().context("llama-bench reports no sample")
}
