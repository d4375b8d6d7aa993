//! The `host` program as a user meets it: what goes where, and what it ends with.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

const GENESIS: &str = "Ge1:1 In the beginning";

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn golden(name: &str) -> PathBuf {
    repository().join("tests/data").join(name)
}

fn host(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_host"));
    // The CPU where no test asks for more, so that results are the same with and without a GPU.
    command.args(args).stdin(Stdio::null()).env_remove("RUST_LOG").env("ZINC_DEVICE", "cpu");
    command
}

fn run(args: &[&str]) -> Output {
    host(args).output().expect("the program starts")
}

/// The stdout of a run that has to succeed and to have nothing to complain about.
fn ok(args: &[&str]) -> String {
    let output = run(args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.is_empty(), "{args:?}: {} {stderr}", output.status);
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// The message of a run that has to fail, with this exit code, one line and nothing on stdout.
fn fails(args: &[&str], code: i32) -> String {
    let output = run(args);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{args:?}");
    let errors = stderr.lines().filter(|line| line.starts_with("error: ")).count();
    assert_eq!(errors, 1, "{args:?}: {stderr}");
    stderr
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

#[test]
fn run_gives_the_golden_tokens() {
    let cases = json(&fs::read_to_string(golden("zinc-tiny.json")).expect("the golden file"));
    for case in cases.as_array().expect("a list").iter().take(3) {
        let prompt = case["prompt"].as_str().expect("a text");
        let n = case["greedy"].as_array().expect("a list").len().to_string();
        let out = json(&ok(&["run", "-p", prompt, "-n", &n, "--device", "cpu", "--format", "json"]));
        assert_eq!(out["prompt_ids"], case["ids"], "{prompt}");
        assert_eq!(out["ids"], case["greedy"], "{prompt}");
        assert_eq!(out["finish_reason"], "length");
        for key in ["load_s", "prefill_tok_s", "decode_tok_s"] {
            assert!(out["timings"][key].as_f64().is_some_and(|x| x > 0.0), "{key}: {out}");
        }
    }
}

#[test]
fn the_prompt_comes_from_an_argument_a_file_stdin_or_ids() {
    let want = ok(&["run", "-p", GENESIS, "-n", "8"]);
    assert_eq!(want, " God created the heaven and the earth.\n\n");

    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("prompt.txt");
    fs::write(&file, GENESIS).expect("the file is written");
    assert_eq!(ok(&["run", "-f", file.to_str().expect("UTF-8"), "-n", "8"]), want);

    let mut child =
        host(&["run", "-n", "8"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the program starts");
    child.stdin.take().expect("a pipe").write_all(GENESIS.as_bytes()).expect("it is read");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(String::from_utf8_lossy(&output.stdout), want);

    let ids = ok(&["tokenize", GENESIS]);
    let ids = ids.trim().trim_matches(['[', ']']);
    assert_eq!(ok(&["run", "--ids", ids, "-n", "8"]), want);
}

#[test]
fn a_negative_limit_runs_to_the_end_of_the_context() {
    let args = ["run", "-p", GENESIS, "-n", "-1", "--ctx", "64", "--ignore-eos", "--format", "json"];
    let out = json(&ok(&args));
    let count = |key: &str| out[key].as_array().expect("a list").len();
    assert_eq!(count("prompt_ids") + count("ids"), 64);
    assert_eq!(out["finish_reason"], "length");
}

/// The device that was not asked for is said, in one line, and the result is clean all the same.
#[test]
fn falling_back_to_the_cpu_is_said_on_stderr() {
    let output = host(&["run", "-p", GENESIS, "-n", "2", "--device", "auto"])
        .env("CUDA_VISIBLE_DEVICES", "")
        .output()
        .expect("the program starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).starts_with(" God"), "{stderr}");
    assert_eq!(stderr.lines().filter(|line| line.contains("the CPU runs the model: ")).count(), 1, "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}

#[test]
fn stop_strings_and_seeds_work_from_the_command_line() {
    let stopped = json(&ok(&["run", "-p", GENESIS, "-n", "40", "--stop", "eaven an", "--format", "json"]));
    assert_eq!((&stopped["text"], &stopped["finish_reason"]), (&" God created the h".into(), &"stop".into()));
    let draw = |seed: &str| ok(&["run", "-p", GENESIS, "-n", "24", "--temperature", "1.2", "--seed", seed]);
    assert_eq!(draw("5"), draw("5"));
    assert_ne!(draw("5"), draw("6"));
}

#[test]
fn tokenize_prints_a_json_array() {
    let cases = json(&fs::read_to_string(golden("zinc-tiny.json")).expect("the golden file"));
    let prompt = cases[0]["prompt"].as_str().expect("a text");
    assert_eq!(json(&ok(&["tokenize", prompt])), cases[0]["ids"]);
    assert_eq!(ok(&["tokenize", ""]), "[]\n");
}

#[test]
fn logits_are_those_of_the_golden_file() {
    let manifest = json(&fs::read_to_string(golden("logits/manifest.json")).expect("the manifest"));
    let case = &manifest["qwen35moe"];
    let n_rows = case["rows"].as_u64().expect("a number") as usize;
    let list = |key: &str| case[key].as_array().expect("a list").iter().map(Value::to_string).collect::<Vec<_>>();
    let ids = [list("prompt"), list("greedy")].concat()[..n_rows].join(",");
    let want = floats(&golden("logits/qwen35moe-tiny.logits.f32"));
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("out.f32");
    let model = golden("logits/qwen35moe-tiny.gguf");
    let (model, path) = (model.to_str().expect("UTF-8"), out.to_str().expect("UTF-8"));
    ok(&["logits", "-m", model, "--ids", &ids, "--batch", "7", "-o", path]);
    let got = floats(&out);
    assert_eq!(got.len(), want.len());
    let difference: f64 = got.iter().zip(&want).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let norm: f64 = want.iter().map(|x| f64::from(*x).powi(2)).sum();
    assert!((difference / norm).sqrt() < 1e-4, "relative error {}", (difference / norm).sqrt());
}

#[test]
fn compare_measures_the_distance_to_a_golden_file() {
    let file = golden("logits/qwen35moe-tiny.logits.f32");
    let model = golden("logits/qwen35moe-tiny.gguf");
    let manifest = json(&fs::read_to_string(golden("logits/manifest.json")).expect("the manifest"));
    let prompt = manifest["qwen35moe"]["prompt"].to_string();
    let (model, prompt) = (model.to_str().expect("UTF-8"), prompt.trim_matches(['[', ']']).to_owned());
    // The file goes on after the prompt.
    let folder = tempfile::tempdir().expect("a folder");
    let head = folder.path().join("head.f32");
    let n_bytes = prompt.split(',').count() * 512 * 4;
    fs::write(&head, &fs::read(file).expect("the logits")[..n_bytes]).expect("the file is written");
    let head = head.to_str().expect("UTF-8");
    let out = json(&ok(&["compare", "-m", model, "--ids", &prompt, "--device", "cpu", "--file", head]));
    assert!(out["worst_relative_l2"].as_f64().is_some_and(|x| x < 1e-4), "{out}");
    assert_eq!((&out["positions"], &out["top1_agreement"]), (&40.into(), &1.0.into()));
    let itself = json(&ok(&["compare", "-m", model, "--ids", &prompt, "--device", "cpu", "--batch", "7"]));
    assert!(itself["mean_kl"].as_f64().is_some_and(|x| x.abs() < 1e-9), "{itself}");
    assert!(fails(&["compare", "--ids", "1,2", "--file", head], 2).contains("logits"));
}

#[test]
fn compare_goes_on_with_the_references_tokens() {
    let out = json(&ok(&["compare", "--ids", "5,6,7", "-n", "5", "--devices", "cpu,cpu", "--batch", "3"]));
    assert_eq!((&out["positions"], &out["top1_agreement"]), (&8.into(), &1.0.into()), "{out}");
    assert!(out["first_difference"].is_null(), "{out}");
    let model = golden("logits/qwen3moe-tiny.gguf");
    let model = model.to_str().expect("UTF-8");
    let exact = ["--devices", "cpu,emulated", "--activations", "f32", "--kv", "f32"];
    let gpu = json(&ok(&[&["compare", "-m", model, "--ids", "5,6,7", "-n", "2"][..], &exact[..]].concat()));
    assert!(gpu["worst_relative_l2"].as_f64().is_some_and(|x| x < 1e-5), "{gpu}");
    assert!(fails(&["compare", "--ids", "1", "--devices", "cpu"], 2).contains("--devices"));
}

#[test]
fn bench_reports_every_test_and_the_kernels() {
    let model = golden("logits/qwen35moe-tiny.gguf");
    let model = ["bench", "-m", model.to_str().expect("UTF-8"), "-r", "1", "--format", "json"];
    let cpu = ["-p", "40,7", "-n", "4", "-d", "0,65", "-b", "1,3", "--device", "cpu", "--profile"];
    let out = json(&ok(&[&model[..], &cpu[..]].concat()));
    let tests = out["tests"].as_array().expect("a list");
    assert_eq!(tests.len(), 2 + 4, "{out}");
    assert!(tests.iter().all(|test| test["median"].as_f64().is_some_and(|x| x > 0.0)), "{out}");
    let gpu = ["-p", "0", "-n", "2", "--device", "emulated", "--profile"];
    let out = json(&ok(&[&model[..], &gpu[..]].concat()));
    let profile = &out["profiles"][0];
    let kernels = profile["kernels"].as_array().expect("a list");
    assert!(kernels.iter().any(|kernel| kernel["name"] == "ssm_delta_step_64"), "{out}");
    let stages = profile["stages"].as_array().expect("a list");
    for name in ["embedding", "norm", "projections", "attention", "delta net", "router", "experts", "head"] {
        let stage = stages.iter().find(|stage| stage["name"] == name).unwrap_or_else(|| panic!("no {name}: {profile}"));
        let positive = |key: &str| stage[key].as_f64().is_some_and(|x| x > 0.0);
        assert!(["us", "moved_bytes", "gb_per_s", "share_of_bandwidth"].into_iter().all(positive), "{stage}");
    }
    assert!(
        profile["idle_us"].is_number() && profile["launches"].as_array().is_some_and(|l| l.len() > 20),
        "{profile}"
    );
    let folder = tempfile::tempdir().expect("a folder");
    let picture = folder.path().join("profile.svg");
    let picture = picture.to_str().expect("UTF-8");
    let table =
        ok(&[&model[..3], &["-r", "1", "-p", "0", "-n", "2", "--device", "emulated", "--plot", picture]].concat());
    assert!(table.contains("| experts |"), "{table}");
    assert!(fs::read_to_string(picture).expect("a picture").contains("experts"));
    assert!(
        fails(&[&model[..3], &["-n", "2", "-p", "0", "--device", "cpu", "--plot", picture]].concat(), 2)
            .contains("--plot")
    );
}

fn floats(path: &Path) -> Vec<f32> {
    let bytes = fs::read(path).expect("the file");
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[test]
fn errors_are_one_line_and_an_exit_code() {
    assert!(fails(&["run", "-m", "no/such.gguf", "-p", "x"], 1).contains("no/such.gguf"));
    assert!(fails(&["run", "-f", "no/such.txt"], 1).contains("no/such.txt"));
    assert!(fails(&["run", "--ids", "1,4096"], 1).contains("4096"));
    assert!(fails(&["run", "-p", ""], 1).contains("no tokens"));
    assert!(fails(&["run", "-p", GENESIS, "--temperature", "-1"], 1).contains("temperature"));
    let long = "word ".repeat(200);
    let message = fails(&["run", "-p", &long, "--ctx", "64"], 1);
    assert!(message.contains("the context holds 64"), "{message}");
    let big = fails(&["run", "-p", "x", "--ctx", "4000000000"], 1);
    assert!(big.contains("GiB are free"), "{big}");
    assert!(fails(&["run", "--device", "tpu", "-p", "x"], 2).contains("tpu"));
    assert!(fails(&["run", "-n", "-2", "-p", "x"], 2).contains("-2"));
    let folder = tempfile::tempdir().expect("a folder");
    let broken = folder.path().join("broken.gguf");
    fs::write(&broken, b"GGUF\x03\0\0\0").expect("the file is written");
    assert!(fails(&["run", "-m", broken.to_str().expect("UTF-8"), "-p", "x"], 1).contains("broken.gguf"));
}

/// A damaged file costs neither time nor memory, whatever it claims: the program has half a GiB of address space, 64 MiB
/// of which may be memory of its own.
#[test]
#[cfg(target_os = "linux")]
fn inspect_refuses_hostile_files_at_once_and_in_little_memory() {
    let whole = fs::read(golden("logits/qwen35moe-tiny.gguf")).expect("the model");
    let header = |n_tensors: u64, n_pairs: u64| {
        [&b"GGUF"[..], &3u32.to_le_bytes(), &n_tensors.to_le_bytes(), &n_pairs.to_le_bytes()].concat()
    };
    let array = [&header(0, 1)[..], &1u64.to_le_bytes(), b"a", &[9, 0, 0, 0, 4, 0, 0, 0], &(1u64 << 61).to_le_bytes()];
    let tensor = |dims: &[u64]| {
        let dims_bytes: Vec<u8> = dims.iter().flat_map(|dim| dim.to_le_bytes()).collect();
        let n_dims = (dims.len() as u32).to_le_bytes();
        [&header(1, 0)[..], &1u64.to_le_bytes(), b"t", &n_dims, &dims_bytes, &[0; 12], &[0; 128]].concat()
    };
    let files = [
        ("pairs", header(0, 1 << 62), "metadata"),
        ("tensors", header(1 << 62, 0), "tensor"),
        ("key", [&header(0, 1)[..], &u64::MAX.to_le_bytes()].concat(), "key"),
        ("array", array.concat(), "\"a\""),
        ("product", tensor(&[1 << 33, 1 << 33]), "\"t\""),
        ("bytes", tensor(&[1 << 62]), "\"t\""),
        ("large", tensor(&[1 << 60]), "\"t\""),
        ("cut", whole[..whole.len() - 1].to_vec(), "tensor"),
        ("noise", (0..4096u32).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect(), "GGUF"),
    ];
    let folder = tempfile::tempdir().expect("a folder");
    for (name, bytes, named) in files {
        let path = folder.path().join(format!("{name}.gguf"));
        fs::write(&path, bytes).expect("the file is written");
        let start = std::time::Instant::now();
        let output = Command::new("sh")
            .args([
                "-c",
                "ulimit -v 524288 && ulimit -d 65536 && exec \"$0\" inspect \"$1\"",
                env!("CARGO_BIN_EXE_host"),
            ])
            .arg(&path)
            .output()
            .expect("sh starts");
        let took = start.elapsed();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{name}: {stderr}");
        assert!(output.stdout.is_empty() && stderr.lines().count() == 1, "{name}: {stderr}");
        assert!(stderr.contains(&*path.to_string_lossy()) && stderr.contains(named), "{name}: {stderr}");
        assert!(took.as_millis() < 1000, "{name} took {took:?}");
    }
}

/// B47: a context length is a claim, and nothing to allocate by.
#[test]
fn an_absurd_context_length_in_the_file_is_not_allocated() {
    let bytes = fs::read(golden("logits/llama-tiny.gguf")).expect("the model");
    let key = b"llama.context_length";
    let at = bytes.windows(key.len()).position(|w| w == key).expect("the key") + key.len() + 4;
    let folder = tempfile::tempdir().expect("a folder");
    for claimed in [i32::MAX as u32, u32::MAX, 0] {
        let mut bytes = bytes.clone();
        bytes[at..at + 4].copy_from_slice(&claimed.to_le_bytes());
        let path = folder.path().join(format!("{claimed}.gguf"));
        fs::write(&path, bytes).expect("the file is written");
        let output = run(&["-v", "run", "-m", path.to_str().expect("UTF-8"), "--ids", "1,2,3", "-n", "4"]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{claimed}: {stderr}");
        assert!(stderr.contains("context"), "the choice is logged: {stderr}");
    }
}

#[test]
fn a_reader_that_goes_away_ends_the_program_quietly() {
    let mut child = host(&["run", "-p", GENESIS, "-n", "-1", "--ignore-eos"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut first = [0; 4];
    child.stdout.take().expect("a pipe").read_exact(&mut first).expect("some text");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(0), ""));
}

#[cfg(unix)]
#[test]
fn an_interrupt_ends_the_reply_and_still_prints_it() {
    let mut child = host(&["run", "-p", GENESIS, "-n", "-1", "--ignore-eos"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    // Text on stdout means that the handler is installed and the model runs.
    let mut stdout = child.stdout.take().expect("a pipe");
    stdout.read_exact(&mut [0; 4]).expect("some text");
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill runs");
    assert!(killed.success());
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).expect("the rest of the text");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "error: interrupted\n");
    assert!(rest.ends_with('\n'), "the last line is whole");
}

#[test]
fn the_default_model_is_found_from_anywhere() {
    let folder = tempfile::tempdir().expect("a folder");
    let output =
        host(&["run", "-p", GENESIS, "-n", "2"]).current_dir(folder.path()).output().expect("the program starts");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && stdout.starts_with(" God"), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A template that a base model can follow, in a folder that lives as long as the test.
fn template(folder: &tempfile::TempDir) -> String {
    let path = folder.path().join("template.jinja");
    let text = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:";
    fs::write(&path, text).expect("the file is written");
    path.to_str().expect("UTF-8").to_owned()
}

#[test]
fn chat_puts_the_prompt_into_the_template() {
    let folder = tempfile::tempdir().expect("a folder");
    let template = template(&folder);
    let args = ["run", "--chat", "--chat-template", &template, "--system", "Be brief.", "-p", "Hi", "-n", "3"];
    let chat = json(&ok(&[&args[..], &["--format", "json"]].concat()));
    let ids = json(&ok(&["tokenize", "system: Be brief.\nuser: Hi\nassistant:"]));
    assert_eq!(chat["prompt_ids"], ids);
    assert!(fails(&["run", "--chat", "-p", "Hi", "--chat-template", "no/such.jinja"], 1).contains("no/such.jinja"));
    assert!(fails(&["run", "-p", "Hi", "--system", "x"], 2).contains("--chat"));
}

#[test]
fn a_conversation_is_remembered_until_it_is_cleared() {
    let folder = tempfile::tempdir().expect("a folder");
    let template = template(&folder);
    let talk = |input: &str| {
        let mut child = host(&["chat", "--chat-template", &template, "-n", "12"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        child.stdin.take().expect("a pipe").write_all(input.as_bytes()).expect("it is read");
        let output = child.wait_with_output().expect("it ends");
        assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let once = talk("In the beginning\n");
    let twice = talk("In the beginning\nAnd then\n");
    let cleared = talk("In the beginning\n/clear\n\nIn the beginning\n/exit\nnever read\n");
    assert!(!once.trim().is_empty());
    assert!(twice.starts_with(&once) && twice.len() > once.len(), "{twice:?}");
    assert_eq!(cleared, format!("{once}{once}"));
    assert_ne!(twice, format!("{once}{}", talk("And then\n")), "the first turn matters to the second");
}
