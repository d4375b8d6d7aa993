//! The whole CUDA path, from `dlopen` to graph replay, against a driver that works in host memory.
//!
//! The fake (`tests/fake_driver/libcuda.rs`) is compiled here and put where the loader looks first. A
//! process loads one driver for good, so each case is a child: this test binary again, with
//! [`check_says_what_it_finds`] alone.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use host::cli::check::{self, CheckArgs};
use tempfile::TempDir;

use crate::checkout;

/// Enough of a PTX text for the driver's side of things; the fake compiles nothing.
const PTX: &str = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry read_sweep(\n)\n{ ret; }\n";

/// `host check` with the driver that the loader finds: the fake one in a child, else the machine's own.
#[test]
fn check_says_what_it_finds() {
    let kernels = tempfile::tempdir().expect("a folder");
    std::fs::write(kernels.path().join("sm_90.ptx"), PTX).expect("a file");
    let args = CheckArgs { ptx: Some(kernels.path().to_owned()), ..CheckArgs::default() };
    let mut out = Vec::new();
    let ready = check::run(&args, &mut out).expect("writing to memory");
    let out = String::from_utf8(out).expect("text");
    println!("{out}");
    let last = out.lines().last().unwrap_or_default();
    assert_eq!(last == "READY", ready, "{out}");
    assert!(ready || last.starts_with("NOT READY: "), "{out}");
}

/// A folder with the fake `libcuda.so.1`, or why it could not be made.
fn fake_driver() -> Result<&'static Path, &'static str> {
    static BUILT: OnceLock<Result<TempDir, String>> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let source = checkout::path("tests/fake_driver/libcuda.rs");
        if !source.exists() {
            return Err(format!("{} is not there", source.display()));
        }
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let output = Command::new("rustc")
            .args(["--edition", "2024", "--crate-type", "cdylib", "-Copt-level=2", "-Cpanic=abort", "-o"])
            .arg(folder.path().join("libcuda.so.1"))
            .arg(source)
            .output()
            .map_err(|error| format!("rustc does not run: {error}"))?;
        assert!(
            output.status.success(),
            "the fake driver does not compile: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(folder)
    });
    built.as_ref().map(TempDir::path).map_err(String::as_str)
}

/// What a child prints that runs with the fake driver, asked for a fault. `None`: skipped.
fn check_with(fault: &str, sync: bool) -> Option<String> {
    let library = match fake_driver() {
        Ok(library) => library,
        Err(why) => {
            assert!(std::env::var_os("ZINC_REQUIRE").is_none(), "{why}");
            println!("skipped: {why}");
            return None;
        }
    };
    let output = Command::new(std::env::current_exe().expect("this test's own path"))
        .args(["--exact", "fake_driver::check_says_what_it_finds", "--nocapture"])
        .env("LD_LIBRARY_PATH", library)
        .env("FAKE_DRIVER", fault)
        .env("ZINC_SYNC", if sync { "1" } else { "0" })
        .env_remove("CUDA_VISIBLE_DEVICES")
        .output()
        .expect("this test starts");
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{out}\n{}", String::from_utf8_lossy(&output.stderr));
    Some(out)
}

/// Asserts what the verdict of a child says.
fn verdict_is(fault: &str, sync: bool, expected: &[&str]) {
    let Some(out) = check_with(fault, sync) else { return };
    let verdict = out.lines().find(|line| line.starts_with("NOT READY: ")).unwrap_or_default();
    for part in expected {
        assert!(verdict.contains(part), "{fault}: no {part:?} in:\n{out}");
    }
}

#[test]
fn a_working_driver_passes_every_step() {
    let Some(out) = check_with("none", false) else { return };
    for start in
        ["driver       CUDA 13.0", "device       0: Fake GPU (sm_90, 4 SMs", "chosen", "graph", "staging", "profile"]
    {
        assert!(out.lines().any(|line| line.starts_with(start)), "no {start:?} in:\n{out}");
    }
    // It has one kernel: the next step, which runs a model's operations, says which other it wants first.
    verdict_is("none", false, &["self-test, exact: ", "kernel"]);
}

#[test]
fn a_driver_without_a_device_is_told_from_no_driver() {
    verdict_is("no-device", false, &["the NVIDIA driver sees no GPU"]);
}

#[test]
fn an_old_driver_is_named_with_what_it_lacks() {
    verdict_is("cuda-11", false, &["CUDA 11.8", "PTX goes up to 7.8", "the kernels are PTX 8.0", "CUDA 12.0 or later"]);
}

#[test]
fn the_compilers_log_is_in_the_error() {
    verdict_is(
        "bad-ptx",
        false,
        &["kernels for sm_90", "CUDA_ERROR_INVALID_PTX (218)", "[ptxas fatal: no such instruction]"],
    );
}

#[test]
fn a_kernel_that_cannot_be_had_is_named_at_load() {
    verdict_is("bad-kernel", false, &["kernel read_sweep: cuModuleGetFunction failed: CUDA_ERROR_NOT_FOUND (500)"]);
}

#[test]
fn a_fault_names_its_kernel_with_zinc_sync() {
    let fault = "cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS (700): the fake driver's words";
    verdict_is("launch-fault", true, &["self-test, launch: kernel read_sweep: ", fault]);
    verdict_is("launch-fault", false, &["self-test, launch: cuStreamSynchronize failed", fault]);
}
