//! The examples run, and print what their comments promise.

use std::path::Path;
use std::process::Command;

/// What an example prints; `None` where only this test was built.
fn run(name: &str) -> Option<String> {
    let host = Path::new(env!("CARGO_BIN_EXE_host"));
    let program = host.with_file_name("examples").join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    if !program.is_file() {
        assert!(std::env::var_os("ZINC_REQUIRE").is_none(), "{} is not built", program.display());
        println!("skipped: {} is not built (`cargo test -p host` builds it)", program.display());
        return None;
    }
    let output = Command::new(program).output().expect("the example starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {stderr}");
    Some(String::from_utf8(output.stdout).expect("UTF-8"))
}

#[test]
fn generate_completes_the_prompt() {
    let Some(out) = run("generate") else { return };
    assert!(out.starts_with("Ge1:1 In the beginning God created the heaven and the earth."), "{out}");
}

#[test]
fn stream_runs_three_and_cancels_one() {
    let Some(out) = run("stream") else { return };
    assert!(out.contains("1 ends: Length after 16 tokens"), "{out}");
    assert!(out.contains("2 ends: Length after 16 tokens"), "{out}");
    assert!(out.contains("3 ends: Cancelled after 5 tokens"), "{out}");
}

#[test]
fn inspect_names_the_architecture() {
    let Some(out) = run("inspect") else { return };
    assert!(out.starts_with("qwen35moe: 8 layers"), "{out}");
    assert!(out.contains("token_embd.weight"), "{out}");
}
