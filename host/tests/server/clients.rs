//! What others use, against the real server: the `openai` package, and a browser. Where one of them is not there, its
//! test says so and is skipped; `cargo xtask setup` fetches the package.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::client::Server;

/// A template that shows tools, and whose model would write calls as JSON.
const TEMPLATE: &str = "{# <tool_call> #}{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}\
    {% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Python, with the packages that setup fetched on its path.
fn python() -> Command {
    let cache = std::env::var_os("ZINC_CACHE").map_or_else(|| root().join(".cache"), PathBuf::from);
    let mut paths = vec![cache.join("clients")];
    paths.extend(std::env::var_os("PYTHONPATH").iter().flat_map(std::env::split_paths));
    let mut python = Command::new("python3");
    python.env("PYTHONPATH", std::env::join_paths(paths).expect("no path has a colon"));
    for proxy in ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"] {
        python.env_remove(proxy);
    }
    python
}

fn has(package: &str) -> bool {
    let output = python().args(["-c", &format!("import {package}")]).output();
    output.is_ok_and(|output| output.status.success())
}

fn run(script: &str, args: &[&str]) {
    let output = python().arg(root().join("tests/clients").join(script)).args(args).output().expect("python3 runs");
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("ok"), "{said}");
}

#[test]
fn the_openai_package_gets_what_it_expects() {
    if !has("openai") {
        assert!(std::env::var_os("ZINC_REQUIRE").is_none(), "python3 has no `openai`; `cargo xtask setup` fetches it");
        println!("skipped: python3 has no `openai`; `cargo xtask setup` fetches it");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let template = folder.path().join("template.jinja");
    std::fs::write(&template, TEMPLATE).expect("the file is written");
    let server = Server::start(&["--chat-template", template.to_str().expect("UTF-8"), "--api-key", "k"]);
    run("openai_client.py", &[&server.url(), "k"]);
}

#[test]
fn the_page_works_in_a_browser() {
    let chromium = Command::new("chromium").arg("--version").output().is_ok_and(|output| output.status.success());
    if !chromium || !has("playwright") {
        println!("skipped: it takes a `chromium` on the path, and `pip install playwright`");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let server = Server::start(&[]);
    run("chat_page.py", &[&server.url(), folder.path().join("page.png").to_str().expect("UTF-8")]);
}
