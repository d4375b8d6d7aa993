//! Bitcode to PTX: `llvm-link`, then for each target `opt` and `llc`.

use std::fs;
use std::path::{Path, PathBuf};

use crate::compile::Bitcode;
use crate::{Arch, Error, Toolchain, process};

/// The linked, unoptimised module, and the kernels that it has to keep.
pub(crate) struct Module {
    bitcode: PathBuf,
    /// What `opt` is to assume of the crates' functions, a line each.
    attributes: PathBuf,
    pub(crate) entries: Vec<String>,
}

/// Options of `opt` and `llc` beyond the target.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flags {
    pub(crate) opt: Vec<String>,
    pub(crate) llc: Vec<String>,
}

/// Links all rlibs into one module under `out_dir`.
pub(crate) fn link(toolchain: &Toolchain, bitcode: &Bitcode, out_dir: &Path) -> Result<Module, Error> {
    // The kernels' names are read from the crates' own code, without the bulk of `core`.
    let own = out_dir.join("own.bc");
    let linked = out_dir.join("linked.bc");
    link_files(toolchain, bitcode.own.iter(), &own)?;
    let text = process::run(toolchain.llvm("llvm-dis").arg(&own).args(["-o", "-"]))?.stdout;
    let text = String::from_utf8_lossy(&text);
    let attributes = out_dir.join("attributes.csv");
    fs::write(&attributes, convergent(&text)).map_err(Error::file(&attributes))?;
    link_files(toolchain, bitcode.std.iter().chain([&own]), &linked)?;
    Ok(Module { bitcode: linked, attributes, entries: kernel_names(&text) })
}

fn link_files<'a>(toolchain: &Toolchain, files: impl Iterator<Item = &'a PathBuf>, to: &Path) -> Result<(), Error> {
    // An rlib is an archive of bitcode and the crate's metadata; the latter is to be ignored.
    process::run(toolchain.llvm("llvm-link").arg("--ignore-non-bitcode").args(files).arg("-o").arg(to))?;
    Ok(())
}

/// The functions that a module in LLVM's text form defines: what stands before the name, and the name.
fn definitions(ir: &str) -> impl Iterator<Item = (&str, &str)> {
    ir.lines().filter_map(|line| {
        let (before, name) = line.strip_prefix("define ")?.split_once('@')?;
        Some((before, name.split('(').next()?.trim_matches('"')))
    })
}

/// The functions with the calling convention `ptx_kernel` that a module in LLVM's text form defines.
fn kernel_names(ir: &str) -> Vec<String> {
    let kernels = definitions(ir).filter(|(before, _)| before.contains("ptx_kernel "));
    let mut names: Vec<String> = kernels.map(|(_, name)| name.to_owned()).collect();
    names.sort_unstable();
    names
}

/// Marks every function that a module defines as convergent. LLVM knows that a barrier or a shuffle must not be copied
/// into the sides of a branch, but rustc does not tell it which functions contain one, and before they are inlined LLVM
/// would copy a call of such a function. Like a compiler of CUDA C++, this assumes it of all; LLVM takes it back of
/// those without.
fn convergent(ir: &str) -> String {
    definitions(ir).map(|(_, name)| format!("{name},convergent\n")).collect()
}

/// Optimises and compiles `module` for one target; returns the PTX text as `llc` wrote it.
pub(crate) fn emit(
    toolchain: &Toolchain,
    module: &Module,
    arch: Arch,
    flags: &Flags,
    out_dir: &Path,
) -> Result<String, Error> {
    let optimised = out_dir.join(format!("{arch}.bc"));
    let mut keep = String::from("--internalize-public-api-list=");
    keep.push_str(&module.entries.join(","));
    let mut opt = toolchain.llvm("opt");
    opt.arg(&module.bitcode)
        .arg(format!("-mcpu={arch}"))
        .arg(keep)
        // Dropping the unreachable part of `core` first leaves the optimiser a hundredth of the work.
        .arg("--passes=forceattrs,internalize,globaldce,default<O3>,globaldce")
        .arg(format!("--forceattrs-csv-path={}", module.attributes.display()))
        .arg("--strip-debug")
        .args(&flags.opt)
        .arg("-o")
        .arg(&optimised);
    process::run(&mut opt)?;
    let mut llc = toolchain.llvm("llc");
    llc.arg(&optimised).arg(format!("-mcpu={arch}")).arg("-O3").args(&flags.llc).args(["-o", "-"]);
    let output = process::run(&mut llc)?;
    String::from_utf8(output.stdout)
        .map_err(|_| Error::Output { tool: "llc", why: "it wrote something that is not UTF-8".into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_told_from_functions() {
        let ir = "define ptx_kernel void @rms_norm(ptr noundef %0) #1 {\n\
                  define dso_local ptx_kernel void @\"axpy\"(i32 %0) {\n\
                  define internal void @helper() {\n\
                  declare ptx_kernel void @elsewhere()\n";
        assert_eq!(kernel_names(ir), ["axpy", "rms_norm"]);
        assert_eq!(convergent(ir), "rms_norm,convergent\naxpy,convergent\nhelper,convergent\n");
    }
}
