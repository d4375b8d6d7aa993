//! NVIDIA's assembler, for reports: what each kernel takes of a multiprocessor.
//!
//! The driver assembles PTX when it loads it, so `ptxas` is not needed to build or to run.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Arch, Error, process};

/// Names a `ptxas` to use instead of searching for one.
pub const PTXAS_VAR: &str = "ZINC_PTXAS";

/// The assembler.
#[derive(Clone, Debug)]
pub struct Ptxas {
    /// The program.
    pub path: PathBuf,
}

/// What `ptxas -v` says about one kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// The kernel.
    pub entry: String,
    /// Registers a lane.
    pub registers: u32,
    /// Static shared memory a block.
    pub shared_bytes: u32,
    /// Local memory a lane: arrays that could not stay in registers.
    pub stack_bytes: u32,
    /// Bytes of registers stored to local memory.
    pub spill_store_bytes: u32,
    /// Bytes of registers loaded back.
    pub spill_load_bytes: u32,
}

impl Ptxas {
    /// Finds `ptxas`: [`PTXAS_VAR`], the PATH, a CUDA toolkit, then the folders in `also`.
    pub fn find(also: &[PathBuf]) -> Option<Ptxas> {
        if let Some(named) = env::var_os(PTXAS_VAR) {
            return Some(Ptxas { path: named.into() });
        }
        let toolkit = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(env::var_os);
        let toolkit = toolkit.map(PathBuf::from).chain([PathBuf::from("/usr/local/cuda")]);
        let path = env::var_os("PATH").unwrap_or_default();
        env::split_paths(&path)
            .chain(toolkit.map(|root| root.join("bin")))
            .chain(also.iter().cloned())
            .map(|folder| folder.join("ptxas"))
            .find(|path| path.is_file())
            .map(|path| Ptxas { path })
    }

    /// Assembles a PTX file for `arch` and returns each kernel's resources, in the file's order.
    ///
    /// # Errors
    /// [`Error::Tool`] with the assembler's message where it refuses the text.
    pub fn resources(&self, ptx: &Path, arch: Arch) -> Result<Vec<Resources>, Error> {
        let mut ptxas = Command::new(&self.path);
        ptxas.arg("-v").arg(format!("-arch={arch}")).arg(ptx).args(["-o", "/dev/null"]);
        let output = process::run(&mut ptxas)?;
        let report = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        Ok(parse(&report))
    }
}

/// Reads the report: a line that names the entry, then lines of `NUMBER bytes WHAT` and `Used N
/// registers`.
fn parse(report: &str) -> Vec<Resources> {
    let mut all: Vec<Resources> = Vec::new();
    for line in report.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let entry = rest.split('\'').next().unwrap_or_default().to_owned();
            all.push(Resources { entry, ..Resources::default() });
        } else if let Some(resources) = all.last_mut() {
            line.split([',', ':']).for_each(|part| read(part.trim(), resources));
        }
    }
    all
}

fn read(part: &str, resources: &mut Resources) {
    let words: Vec<&str> = part.split_whitespace().collect();
    let number = |word: &str| word.parse().unwrap_or(0);
    match words[..] {
        ["Used", n, "registers"] => resources.registers = number(n),
        [n, "bytes", "stack", "frame"] => resources.stack_bytes = number(n),
        [n, "bytes", "spill", "stores"] => resources.spill_store_bytes = number(n),
        [n, "bytes", "spill", "loads"] => resources.spill_load_bytes = number(n),
        [n, "bytes", "smem"] => resources.shared_bytes = number(n),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_two_kernels_is_read() {
        let report = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'matvec_q4_k' for 'sm_90'
ptxas info    : Function properties for matvec_q4_k
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes smem, 376 bytes cmem[0]
ptxas info    : Compiling entry function 'rms_norm' for 'sm_90'
ptxas info    : Function properties for rms_norm
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
";
        let matvec = Resources {
            entry: "matvec_q4_k".into(),
            registers: 40,
            shared_bytes: 1024,
            stack_bytes: 16,
            spill_store_bytes: 8,
            spill_load_bytes: 12,
        };
        let rms_norm = Resources { entry: "rms_norm".into(), registers: 12, ..Resources::default() };
        assert_eq!(parse(report), [matvec, rms_norm]);
    }
}
