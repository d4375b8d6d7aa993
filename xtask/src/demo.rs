//! `cargo xtask demo`: text from two real models, with the release binary.

use std::io::{Write, stdout};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::{dist, setup, workspace};

/// Model, prompt: zinc-tiny is in the checkout and was trained on these two kinds of text.
const PROMPTS: [(&str, &str); 3] = [
    ("models/zinc-tiny-qwen35moe.gguf", "Ge1:1 In the beginning"),
    ("models/zinc-tiny-qwen35moe.gguf", "/// Returns the number of elements in the"),
    (host::models::SMOLLM2_FILE, "The capital of France is"),
];

pub(crate) fn run() -> Result<()> {
    println!("demo: fetching the model, where it is not there yet");
    setup::smollm2()?;
    println!("demo: building the release binary (minutes, the first time)");
    let host = dist::executable(&["build", "--release", "--package", "host"], "host")?;
    let device = if has_gpu(&host) { "cuda" } else { "cpu" };
    for (model, prompt) in PROMPTS {
        let inside = workspace::root().join(model);
        let path = if inside.exists() { inside } else { workspace::cache().join(model) };
        print!("\n--- {model}, on the {}\n{prompt}", if device == "cuda" { "GPU" } else { "CPU" });
        stdout().flush()?;
        let mut run = Command::new(&host);
        run.arg("run").arg("-m").arg(path).args(["-p", prompt, "-n", "48", "--device", device]);
        let status = run.status().with_context(|| format!("cannot run {}", host.display()))?;
        if !status.success() {
            bail!("host run failed ({status})");
        }
    }
    println!("\ndemo: now your own model: {} run -m MODEL.gguf -p \"Once upon a time\"", host.display());
    Ok(())
}

/// Whether the kernels run here; where not, says why.
fn has_gpu(host: &Path) -> bool {
    let Ok(check) = Command::new(host).arg("check").stdin(Stdio::null()).output() else { return false };
    let said = String::from_utf8_lossy(&check.stdout);
    if let Some(why) = said.lines().find_map(|line| line.strip_prefix("NOT READY: ")) {
        println!("demo: no GPU, so the CPU runs the models: {why}");
    }
    check.status.success()
}
