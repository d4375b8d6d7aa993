//! `cargo xtask ptx`: build the kernels, assemble them, and report registers and memory.

use std::collections::BTreeMap;
use std::fs;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use cuda_builder::{Arch, Built, CudaBuilder, Ptxas, Resources, Toolchain};

use crate::workspace;

/// Kernels that may use local memory or spill registers, for which target, and the reason. A kernel that is not
/// here and does either fails the command.
const MAY_USE_LOCAL: [(&str, &str, &str); 1] = [(
    "gate_up_q4_k",
    "sm_80",
    "16 bytes, touched a few times a block; half the chunks in flight would cost the other targets more",
)];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Targets, such as 90, 9.0 or sm_90; default: those that the kernel crate names.
    #[arg(long, value_name = "ARCH")]
    arch: Vec<String>,
    /// Only kernels whose name contains this.
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// Build only, without assembling: no report.
    #[arg(long)]
    no_ptxas: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let start = Instant::now();
    let built = build(&args.arch)?;
    println!("{}: {} kernels, {:.1} s", built.toolchain.version, built.entries.len(), start.elapsed().as_secs_f32());
    for ptx in &built.ptx {
        let text = fs::read_to_string(&ptx.path).with_context(|| ptx.path.display().to_string())?;
        let (major, minor) = cuda_builder::ptx::version(&text).context("PTX without .version")?;
        println!("{:8} PTX {major}.{minor}, {} KiB  {}", ptx.arch.name(), text.len() / 1024, ptx.path.display());
    }
    if args.no_ptxas {
        return Ok(());
    }
    let Some(ptxas) = Ptxas::find(&[workspace::ptxas_bin()]) else {
        println!("there is no ptxas to report on it: `cargo xtask setup` fetches one");
        return Ok(());
    };
    report(&built, &ptxas, &args.filter)
}

/// Builds the project's kernels for the named targets.
pub(crate) fn build(archs: &[String]) -> Result<Built> {
    let toolchain = Toolchain::find()?;
    let mut builder = CudaBuilder::new(workspace::root().join("gpu-kernels"));
    for arch in archs {
        builder = Arch::parse_list(arch)?.into_iter().fold(builder, CudaBuilder::arch);
    }
    Ok(builder.build_with(&toolchain)?)
}

/// Prints a row for each kernel with a cell for each target, and fails on spills.
fn report(built: &Built, ptxas: &Ptxas, filter: &str) -> Result<()> {
    let mut rows: BTreeMap<String, Vec<Resources>> = BTreeMap::new();
    for ptx in &built.ptx {
        let resources = ptxas.resources(&ptx.path, ptx.arch)?;
        for entry in resources.into_iter().filter(|one| one.entry.contains(filter)) {
            rows.entry(entry.entry.clone()).or_default().push(entry);
        }
    }
    let width = rows.keys().map(String::len).max().unwrap_or(0).max("kernel".len());
    print!("\n{:width$}", "kernel");
    for ptx in &built.ptx {
        print!("  {:>20}", ptx.arch.name());
    }
    println!("\n{:width$}{}", "", "  regs shared local sp.".repeat(built.ptx.len()));
    let mut offenders = Vec::new();
    for (entry, targets) in &rows {
        print!("{entry:width$}");
        for one in targets {
            let spilled = one.spill_store_bytes + one.spill_load_bytes;
            print!("  {:>4} {:>6} {:>5} {:>3}", one.registers, one.shared_bytes, one.stack_bytes, spilled);
        }
        println!();
        for (one, ptx) in targets.iter().zip(&built.ptx) {
            let target = ptx.arch.name();
            let uses_local = one.stack_bytes + one.spill_store_bytes + one.spill_load_bytes > 0;
            let excused = MAY_USE_LOCAL.iter().any(|(name, arch, _)| name == entry && *arch == target);
            match (uses_local, excused) {
                (true, false) => offenders.push(format!("{entry} uses local memory on {target}")),
                (false, true) => offenders.push(format!("{entry} is excused on {target}, but uses no local memory")),
                _ => {}
            }
        }
    }
    if offenders.is_empty() { Ok(()) } else { bail!("{}", offenders.join("\n")) }
}
