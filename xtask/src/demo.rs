//! `cargo xtask demo`: text from two real models, with the release binary.

use std::io::{Write, stdout};

use anyhow::Result;

use crate::{setup, workspace};

/// Model, prompt: zinc-tiny is in the checkout and was trained on these two kinds of text.
const PROMPTS: [(&str, &str); 3] = [
    ("models/zinc-tiny-qwen35moe.gguf", "Ge1:1 In the beginning"),
    ("models/zinc-tiny-qwen35moe.gguf", "/// Returns the number of elements in the"),
    (host::models::SMOLLM2_FILE, "The capital of France is"),
];

pub(crate) fn run() -> Result<()> {
    println!("demo: fetching the model, where it is not there yet");
    setup::smollm2()?;
    println!("demo: building the release binary");
    workspace::cargo(&["build", "--release", "--package", "host"])?;
    for (model, prompt) in PROMPTS {
        let inside = workspace::root().join(model);
        let path = if inside.exists() { inside } else { workspace::cache().join(model) };
        print!("\n--- {model}\n{prompt}");
        stdout().flush()?;
        let path = path.to_string_lossy();
        workspace::cargo(&[
            "run",
            "--quiet",
            "--release",
            "--package",
            "host",
            "--",
            "run",
            "-m",
            &path,
            "-p",
            prompt,
            "-n",
            "48",
        ])?;
    }
    Ok(())
}
