//! Embeds the kernels' PTX.
//!
//! A machine without the kernel toolchain still builds the host, for the CPU only, and is told so by
//! one warning. No GPU and no CUDA toolkit is needed or asked: the targets are those that
//! `gpu-kernels/Cargo.toml` lists, or those in `ZINC_CUDA_ARCH` (`90`, `9.0`, `sm_90`, or a list).

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use cuda_builder::{Arch, Built, CudaBuilder, Toolchain};
use flate2::{Compression, write::ZlibEncoder};

const KERNELS: &str = "../gpu-kernels";
const ARCH_VAR: &str = "ZINC_CUDA_ARCH";

fn main() -> ExitCode {
    match embed() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            // Cargo shows `cargo::error` lines in place of the script's whole output.
            message.lines().for_each(|line| println!("cargo::error={line}"));
            ExitCode::FAILURE
        }
    }
}

fn embed() -> Result<(), String> {
    println!("cargo::rerun-if-changed=build.rs");
    for variable in [ARCH_VAR, cuda_builder::RUSTC_VAR, cuda_builder::LLVM_BIN_VAR] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let archs = match env::var_os(ARCH_VAR).filter(|list| !list.is_empty()) {
        Some(list) => Arch::parse_list(&list.to_string_lossy()).map_err(|error| format!("{ARCH_VAR}: {error}"))?,
        None => Vec::new(),
    };
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo did not set OUT_DIR")?);
    let source = match Toolchain::find() {
        Ok(toolchain) => table(&modules(&build(&toolchain, archs, &out_dir)?)?, None),
        Err(error) => {
            let why = match error {
                cuda_builder::Error::NoToolchain(lacks) => lacks.join("; "),
                other => other.to_string(),
            };
            warn_cpu_only(&why);
            table("", Some(&why))
        }
    };
    let path = out_dir.join("embedded_ptx.rs");
    fs::write(&path, source).map_err(|error| format!("{}: {error}", path.display()))
}

fn warn_cpu_only(why: &str) {
    // Installing a toolchain changes one of these, and then this script runs again.
    for record in Toolchain::install_records() {
        println!("cargo::rerun-if-changed={}", record.display());
    }
    println!("cargo::warning=built for the CPU only: no toolchain for GPU kernels ({why})");
    println!("cargo::warning=`cargo xtask setup` installs one; then the next build has the kernels");
}

fn build(toolchain: &Toolchain, archs: Vec<Arch>, out_dir: &Path) -> Result<Built, String> {
    // Only PTX differs between profiles, so debug, release and clippy share cargo's objects, `core`
    // among them; the folder is apart from the outer cargo's, whose lock is held while this runs.
    let shared = out_dir.ancestors().find(|folder| folder.join("CACHEDIR.TAG").exists()).unwrap_or(out_dir);
    let builder = CudaBuilder::new(KERNELS).target_dir(shared.join("ptx")).out_dir(out_dir.join("ptx"));
    let builder = archs.into_iter().fold(builder, CudaBuilder::arch);
    let built = builder.build_with(toolchain).map_err(|error| format!("GPU kernels: {error}"))?;
    for source in &built.sources {
        println!("cargo::rerun-if-changed={}", source.display());
    }
    Ok(built)
}

/// The rows of `PTX`, one a target.
fn modules(built: &Built) -> Result<String, String> {
    let mut rows = String::new();
    for ptx in &built.ptx {
        let text = fs::read_to_string(&ptx.path).map_err(|error| format!("{}: {error}", ptx.path.display()))?;
        let packed = ptx.path.with_extension("ptx.z");
        fs::write(&packed, zlib(&text)?).map_err(|error| format!("{}: {error}", packed.display()))?;
        let packed = packed.to_str().ok_or("the target folder's path is not UTF-8")?;
        let (target, directives) = (ptx.arch.name(), directives(&text));
        writeln!(
            rows,
            "    EmbeddedPtx {{ target: {target:?}, directives: {directives:?}, zlib: include_bytes!({packed:?}) }},"
        )
        .expect("a String takes any text");
    }
    Ok(rows)
}

/// The lines that say what a module is and which kernels it has.
fn directives(text: &str) -> String {
    let says = |line: &&str| line.starts_with(".version") || line.starts_with(".target") || line.contains(".entry");
    text.lines().filter(says).fold(String::new(), |lines, line| lines + line + "\n")
}

/// PTX is a tenth of its size when packed, and there is one text for each target.
fn zlib(text: &str) -> Result<Vec<u8>, String> {
    let mut packed = ZlibEncoder::new(Vec::new(), Compression::default());
    packed.write_all(text.as_bytes()).and_then(|()| packed.finish()).map_err(|error| error.to_string())
}

/// The Rust source that `gpu::ptx` includes.
fn table(rows: &str, without: Option<&str>) -> String {
    format!(
        "/// The modules, lowest target first.\n\
         pub static PTX: &[EmbeddedPtx] = &[\n{rows}];\n\
         /// Why there are none, where there are none.\n\
         pub static WITHOUT_PTX: Option<&str> = {without:?};\n"
    )
}
