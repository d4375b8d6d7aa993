//! Builds the crate in `tests/scratch` with whatever toolchain is installed.

use std::fs;
use std::path::{Path, PathBuf};

use cuda_builder::{Arch, Built, CudaBuilder, Error, Ptxas, Toolchain, ptx};

fn scratch() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scratch")
}

/// `None`, said aloud, where no toolchain is installed; under `ZINC_REQUIRE=1` that is a failure.
fn build(out: &str) -> Option<Built> {
    let toolchain = match Toolchain::find() {
        Ok(toolchain) => toolchain,
        Err(error) if std::env::var_os("ZINC_REQUIRE").is_none() => {
            println!("skipped: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("scratch");
    let builder = CudaBuilder::new(scratch()).target_dir(&target).out_dir(target.join(out));
    Some(builder.copy_to(target.join("copy.ptx")).build_with(&toolchain).expect("the scratch crate builds"))
}

#[test]
fn a_kernel_crate_becomes_ptx_for_each_target() {
    let Some(built) = build("text") else { return };
    assert_eq!(built.entries, ["axpy", "one"]);
    assert_eq!(built.ptx.iter().map(|ptx| ptx.arch).collect::<Vec<_>>(), [Arch::Sm80, Arch::Sm90a]);
    for module in &built.ptx {
        let text = fs::read_to_string(&module.path).unwrap();
        assert_eq!(ptx::target(&text), Some(module.arch.name()));
        assert_eq!(ptx::entries(&text).len(), 2, "{text}");
        assert!(!text.contains("not_a_kernel"));
        // One source, and the target decides which branch is left.
        let hopper = module.arch == Arch::Sm90a;
        assert_eq!(text.contains("griddepcontrol.wait"), hopper);
        assert_eq!(ptx::version(&text), Some(if hopper { (8, 0) } else { (7, 0) }));
        assert_eq!(text.matches(".maxntid 256\n.minnctapersm 2\n{").count(), 1);
        assert!(text.contains("fma.rn.f32") && text.contains("ld.global"), "{text}");
    }
    let copy = fs::read_to_string(built.ptx[0].path.ancestors().nth(2).unwrap().join("copy.ptx")).unwrap();
    assert_eq!(ptx::target(&copy), Some("sm_80"));
}

/// B46: a change of a kernel rebuilds, and nothing else does.
#[test]
fn the_sources_to_watch_are_reported() {
    let Some(built) = build("sources") else { return };
    let source = scratch().join("src/lib.rs").canonicalize().unwrap();
    assert!(built.sources.contains(&source), "{:?}", built.sources);
    assert!(built.sources.iter().all(|path| path.is_absolute() && path.exists()), "{:?}", built.sources);
}

#[test]
fn ptxas_accepts_every_target_and_reports_each_kernel() {
    let cache = std::env::var_os("ZINC_CACHE")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache"), PathBuf::from);
    let Some(ptxas) = Ptxas::find(&[cache.join("nvcc/bin")]) else {
        println!("skipped: no ptxas");
        assert!(std::env::var_os("ZINC_REQUIRE").is_none(), "no ptxas: run `cargo xtask setup`");
        return;
    };
    let Some(built) = build("ptxas") else { return };
    for module in &built.ptx {
        let resources = ptxas.resources(&module.path, module.arch).unwrap();
        assert_eq!(resources.len(), 2);
        assert!(resources.iter().all(|one| one.registers > 0 && one.stack_bytes == 0));
    }
}

#[test]
fn a_folder_without_a_crate_is_a_clear_error() {
    let Ok(toolchain) = Toolchain::find() else {
        println!("skipped: no toolchain");
        return;
    };
    let error = CudaBuilder::new("no/such/folder").build_with(&toolchain).unwrap_err();
    assert!(matches!(error, Error::NoCrate(_)), "{error}");
}
