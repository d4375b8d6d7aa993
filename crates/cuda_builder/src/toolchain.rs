//! Finding a rustc that knows `core` for nvptx64, and the LLVM tools of the same LLVM.
//!
//! Two sources are known to work: a rustup toolchain with the components `rust-src` and
//! `llvm-tools`, and Debian's packages `rustc-web cargo-web rust-web-src llvm-22`. Bitcode is not
//! stable between LLVM releases, so the tools' major version has to be rustc's.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Error, process};

/// The oldest compiler that the kernels are written for.
const MIN_RUSTC_MINOR: u32 = 95;

/// Names a `rustc` to use instead of searching for one.
pub const RUSTC_VAR: &str = "ZINC_KERNEL_RUSTC";
/// Names the folder of `llvm-link`, `opt`, `llc` and `llvm-dis` that match [`RUSTC_VAR`]'s LLVM.
pub const LLVM_BIN_VAR: &str = "ZINC_LLVM_BIN";

const LLVM_TOOLS: [&str; 4] = ["llvm-link", "llvm-dis", "opt", "llc"];

/// A complete set of tools for kernels.
#[derive(Clone, Debug)]
pub struct Toolchain {
    /// The compiler.
    pub rustc: PathBuf,
    /// The cargo of the same release.
    pub cargo: PathBuf,
    /// The folder of the LLVM tools.
    pub llvm_bin: PathBuf,
    /// `rustc 1.95.0, LLVM 22.1.2`, for reports.
    pub version: String,
}

impl Toolchain {
    /// Finds a toolchain: the one named by [`RUSTC_VAR`], else the rustc in use, else the system's.
    ///
    /// # Errors
    /// [`Error::NoToolchain`] says for each compiler looked at what it lacks.
    pub fn find() -> Result<Toolchain, Error> {
        let mut lacks = Vec::new();
        for rustc in candidates() {
            match probe(&rustc) {
                Ok(toolchain) => return Ok(toolchain),
                Err(why) => lacks.push(format!("  {}: {why}", rustc.display())),
            }
        }
        lacks.push("install one with `cargo xtask setup`, or by hand:".to_owned());
        lacks.push("  rustup component add rust-src llvm-tools".to_owned());
        lacks.push("  apt-get install rustc-web cargo-web rust-web-src llvm-22   (Debian 12)".to_owned());
        lacks.push(format!("or name one with {RUSTC_VAR} and {LLVM_BIN_VAR}"));
        Err(Error::NoToolchain(lacks.join("\n")))
    }

    /// Existing files that change when a toolchain is installed: rustup's list of components and
    /// dpkg's list of packages.
    pub fn install_records() -> Vec<PathBuf> {
        let sysroots = candidates().into_iter().filter_map(|rustc| sysroot(&rustc).ok());
        let components = sysroots.map(|sysroot| sysroot.join("lib/rustlib/components"));
        components.chain(["/var/lib/dpkg/status".into()]).filter(|path| path.exists()).collect()
    }

    /// A command that runs an LLVM tool.
    pub(crate) fn llvm(&self, tool: &str) -> Command {
        Command::new(self.llvm_bin.join(tool))
    }
}

fn candidates() -> Vec<PathBuf> {
    if let Some(named) = env::var_os(RUSTC_VAR) {
        return vec![named.into()];
    }
    // Cargo sets RUSTC for build scripts; outside of them `rustc` is whatever the PATH and rustup say.
    let mut found = vec![env::var_os("RUSTC").map_or_else(|| "rustc".into(), PathBuf::from)];
    for system in ["/usr/bin/rustc", "/usr/local/bin/rustc"].map(PathBuf::from) {
        if system.exists() && !found.contains(&system) {
            found.push(system);
        }
    }
    found
}

/// Checks one compiler; the error is a sentence for [`Error::NoToolchain`].
fn probe(rustc: &Path) -> Result<Toolchain, String> {
    let release = stdout(Command::new(rustc).arg("-vV"))?;
    let field = |name: &str| {
        release
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .map(str::trim)
            .ok_or_else(|| format!("`rustc -vV` has no line `{name}`"))
    };
    let (version, llvm, host) = (field("release:")?, field("LLVM version:")?, field("host:")?);
    let minor = version.strip_prefix("1.").and_then(|rest| rest.split('.').next()?.parse().ok());
    if minor.is_none_or(|minor: u32| minor < MIN_RUSTC_MINOR) {
        return Err(format!("is {version}, and the kernels need 1.{MIN_RUSTC_MINOR} or later"));
    }
    let sysroot = sysroot(rustc)?;
    if !sysroot.join("lib/rustlib/src/rust/library/core/Cargo.toml").exists() {
        return Err("has no library sources (rustup: component rust-src, Debian: rust-web-src)".into());
    }
    // rustup's `rustc` and `cargo` on the PATH are proxies that obey the folder's toolchain file; the
    // sysroot's own programs are what was probed.
    let own = |name: &str, otherwise: PathBuf| {
        let path = sysroot.join("bin").join(name);
        if path.exists() { path } else { otherwise }
    };
    Ok(Toolchain {
        rustc: own("rustc", rustc.to_owned()),
        cargo: own("cargo", rustc.with_file_name("cargo")),
        llvm_bin: llvm_bin(&sysroot, host, llvm)?,
        version: format!("rustc {version}, LLVM {llvm}"),
    })
}

fn sysroot(rustc: &Path) -> Result<PathBuf, String> {
    stdout(Command::new(rustc).args(["--print", "sysroot"])).map(|path| path.trim().into())
}

/// The first folder that has all LLVM tools of rustc's own major version.
fn llvm_bin(sysroot: &Path, host: &str, llvm: &str) -> Result<PathBuf, String> {
    let major = llvm.split('.').next().unwrap_or(llvm);
    let folders = match env::var_os(LLVM_BIN_VAR) {
        Some(named) => vec![PathBuf::from(named)],
        None => vec![
            sysroot.join("lib/rustlib").join(host).join("bin"),
            PathBuf::from(format!("/usr/lib/llvm-{major}/bin")),
        ],
    };
    let complete = |folder: &PathBuf| {
        LLVM_TOOLS.iter().all(|tool| folder.join(tool).exists())
            && stdout(Command::new(folder.join("llc")).arg("--version"))
                .is_ok_and(|text| text.contains(&format!("version {major}.")))
    };
    folders.iter().find(|folder| complete(folder)).cloned().ok_or_else(|| {
        let searched = folders.iter().map(|folder| folder.display().to_string());
        format!(
            "has LLVM {major}, but {} of that version are not in {} \
             (rustup: component llvm-tools, Debian: llvm-{major})",
            LLVM_TOOLS.join(", "),
            searched.collect::<Vec<_>>().join(" or ")
        )
    })
}

fn stdout(command: &mut Command) -> Result<String, String> {
    let output = process::run(command).map_err(|error| error.to_string())?;
    String::from_utf8(output.stdout).map_err(|_| "wrote something that is not UTF-8".to_owned())
}
