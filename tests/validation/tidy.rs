//! The repository's text rules, as tests: each failure names file and line.

use std::fs;
use std::path::{Path, PathBuf};

use crate::checkout;

/// Longest line of a source file, unless it holds a string or a table's row, which cannot be broken.
const MAX_COLUMNS: usize = 130;
/// A file past this wants splitting.
const MAX_LINES: usize = 600;

pub(crate) fn workspace_root() -> PathBuf {
    checkout::path("")
}

/// The project's own files under `folder` with one of these extensions, in a fixed order.
fn files(folder: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut entries: Vec<PathBuf> = fs::read_dir(folder)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
        .expect("the checkout's folders are readable");
    entries.sort();
    for path in entries {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let hidden = name.starts_with('.') && name != ".ci" && name != ".cargo";
        if hidden || name.starts_with("target") || name == "dist" || path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            found.extend(files(&path, extensions));
        } else if extensions.contains(&path.extension().and_then(|e| e.to_str()).unwrap_or_default()) {
            found.push(path);
        }
    }
    found
}

pub(crate) fn rust_files(folder: &Path) -> Vec<PathBuf> {
    files(folder, &["rs"])
}

/// Fails with every line that `offends`, across `files`.
fn check_lines(files: &[PathBuf], rule: &str, offends: impl Fn(&str) -> bool) {
    assert!(!files.is_empty(), "no files to check");
    let root = workspace_root();
    let mut offences = Vec::new();
    for path in files {
        let text = fs::read_to_string(path).expect("a source file is UTF-8");
        let name = path.strip_prefix(&root).unwrap_or(path).display();
        for (number, line) in text.lines().enumerate().filter(|(_, line)| offends(line)) {
            offences.push(format!("{name}:{}: {}", number + 1, line.trim()));
        }
    }
    assert!(offences.is_empty(), "{rule}:\n{}", offences.join("\n"));
}

fn without_comment(line: &str) -> &str {
    line.split("//").next().unwrap_or(line)
}

fn outside_this_file(mut files: Vec<PathBuf>) -> Vec<PathBuf> {
    files.retain(|path| !path.ends_with("validation/tidy.rs"));
    files
}

#[test]
fn lines_are_not_too_long() {
    let files = files(&workspace_root(), &["rs", "toml", "sh"]);
    check_lines(&files, &format!("longer than {MAX_COLUMNS} columns"), |line| {
        let unbreakable =
            line.contains('"') || line.trim_start().starts_with("//! |") || line.trim_start().starts_with("/// |");
        !unbreakable && line.chars().count() > MAX_COLUMNS
    });
}

#[test]
fn files_are_not_too_long() {
    for path in rust_files(&workspace_root()) {
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines <= MAX_LINES, "{} has {lines} lines", path.display());
    }
}

#[test]
fn nothing_is_left_open() {
    let files = outside_this_file(rust_files(&workspace_root()));
    let open = ["todo!(", "unimplemented!(", "#[ignore", "dbg!("];
    check_lines(&files, "left open", |line| open.iter().any(|word| without_comment(line).contains(word)));
}

#[test]
fn modules_say_what_they_hold() {
    for path in rust_files(&workspace_root()) {
        let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
        assert!(!["utils", "util", "common", "helpers", "misc"].contains(&name), "{}", path.display());
    }
}

#[test]
fn only_the_cuda_module_names_cust() {
    let root = workspace_root();
    let mut files = outside_this_file(rust_files(&root));
    files.retain(|path| !path.starts_with(root.join("host/src/cuda")));
    check_lines(&files, "names cust", |line| {
        let code = without_comment(line);
        code.contains("cust::") || code.contains("cust_raw") || code.contains("use cust;")
    });
}

#[test]
fn kernels_touch_memory_only_through_cuda_std() {
    let files = rust_files(&workspace_root().join("gpu-kernels/src/kernels"));
    let raw =
        ["*(", ".read()", ".write(", ".read_unaligned", ".read_volatile", "from_raw_parts", "ptr::read", "ptr::write"];
    check_lines(&files, "a raw access that the emulator cannot see", |line| {
        let code = without_comment(line);
        raw.iter().any(|access| code.contains(access)) || follows_a_pointer(code)
    });
}

/// Whether a line has `*p.add(i)` or `(*p).field`. A reference may be followed (`*sum += x`), and rustfmt puts spaces
/// around a multiplication, so the shape tells.
fn follows_a_pointer(code: &str) -> bool {
    code.match_indices('*').any(|(at, _)| {
        let path = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
        let after = code[at + 1..].trim_start_matches(path);
        let name = &code[at + 1..code.len() - after.len()];
        let offset = after.starts_with('(') && [".add", ".sub", ".offset"].iter().any(|method| name.ends_with(method));
        let field = code[..at].ends_with('(') && !name.is_empty() && after.starts_with(").");
        offset || field
    })
}

#[test]
fn a_followed_pointer_is_recognised() {
    for code in ["let x = *p.add(i);", "y += *self.x.offset(1) * 2.0;", "(*block).qs"] {
        assert!(follows_a_pointer(code), "{code}");
    }
    for code in ["*sum += unsafe { shuffle(*sum, 1) };", "a * b.add(c)", "p: *const f32", "f(*x)"] {
        assert!(!follows_a_pointer(code), "{code}");
    }
}

#[test]
fn each_crate_states_how_much_unsafe_code_it_may_have() {
    let crates = [
        ("xtask/src/main.rs", "forbid"),
        ("crates/cuda_builder/src/lib.rs", "forbid"),
        ("host/src/lib.rs", "deny"),
        ("tests/validation/main.rs", "deny"),
    ];
    for (file, level) in crates {
        let text = fs::read_to_string(workspace_root().join(file)).unwrap();
        assert!(text.contains(&format!("#![{level}(unsafe_code)]")), "{file}");
    }
}

#[test]
fn nothing_is_tied_to_one_machine_or_mirror() {
    let files = outside_this_file(files(&workspace_root(), &["rs", "toml", "sh", "md"]));
    // The folder above the checkout and the home folder are this machine's; an address needs no registry's name.
    let above = workspace_root().parent().map(|above| format!("{}/", above.display()));
    let home = std::env::var("HOME").ok().map(|home| format!("{home}/"));
    let tied: Vec<String> = ["/home/", "/Users/", "/tmp/"]
        .map(str::to_owned)
        .into_iter()
        .chain(above.into_iter().chain(home).filter(|path| path.len() > 2))
        .collect();
    check_lines(&files, "a path of one machine", |line| tied.iter().any(|text| line.contains(text)));
    check_lines(&files, "a download from an address of our own choice", |line| {
        ["index-url", "https://static.", "files.python"].iter().any(|text| line.contains(text))
    });
}

/// The tests also run packed, on machines without the checkout that they were built in.
#[test]
fn tests_find_their_files_through_checkout() {
    let mut files = rust_files(&workspace_root().join("tests/validation"));
    files.retain(|file| !file.ends_with("checkout.rs") && !file.ends_with("tidy.rs"));
    check_lines(&files, "a path of the build folder", |line| line.contains("env!(\"CARGO_MANIFEST_DIR\")"));
}

#[test]
fn the_readmes_test_command_is_what_ci_runs() {
    let readme = fs::read_to_string(workspace_root().join("README.md")).unwrap();
    let ci = fs::read_to_string(workspace_root().join(".ci/run")).unwrap();
    for text in [readme, ci] {
        assert!(text.contains("cargo xtask test"));
    }
}
