//! The embedded PTX, tested as text: what is promised of every module and every kernel in it.

use std::collections::BTreeSet;
use std::fs;
use std::sync::LazyLock;

use cuda_builder::ptx::{self, Entry, Version};
use host::gpu::ptx::{PTX, WITHOUT_PTX};

use crate::tidy::{rust_files, workspace_root};

/// The newest `.version` allowed for a target. CUDA 11.8's driver takes 7.8, CUDA 12.0's 8.0; GPUs of
/// compute capability 12.0 need CUDA 12.8, hence 8.7, anyway.
const NEWEST_VERSION: [(&str, Version); 4] =
    [("sm_80", (7, 4)), ("sm_89", (7, 8)), ("sm_90a", (8, 0)), ("sm_120", (8, 7))];

/// Kernels whose weights stream through: each must load 16 bytes a lane at a time.
const WIDE_LOADS: [&str; 7] = ["matvec_", "matvecs_", "matmul_", "read_sweep", "rms_norm", "gate_up_", "expert_down_"];

struct Module {
    target: &'static str,
    text: String,
}

/// The modules, or nothing, said aloud, in a build without the kernel toolchain.
fn modules() -> &'static [Module] {
    static MODULES: LazyLock<Vec<Module>> =
        LazyLock::new(|| PTX.iter().map(|ptx| Module { target: ptx.target, text: ptx.text() }).collect());
    if let Some(why) = WITHOUT_PTX {
        assert!(std::env::var_os("ZINC_REQUIRE").is_none(), "no PTX is embedded: {why}");
        println!("skipped: no PTX is embedded: {why}");
    }
    &MODULES
}

fn each_kernel(mut check: impl FnMut(&Module, &Entry<'_>)) {
    for module in modules() {
        ptx::entries(&module.text).iter().for_each(|entry| check(module, entry));
    }
}

/// The kernels that the sources name. Those a macro names (`fn $name`) are not among them.
fn kernels_in_source() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for file in rust_files(&workspace_root().join("gpu-kernels/src")) {
        let text = fs::read_to_string(&file).expect("a source file is readable");
        for (at, _) in text.match_indices("#[kernel") {
            let Some((_, after)) = text[at..].split_once("unsafe fn ") else { continue };
            let name: String = after.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            if !name.is_empty() {
                names.insert(name);
            }
        }
    }
    names
}

#[test]
fn every_kernel_is_in_every_module() {
    let in_source = kernels_in_source();
    let mut first: Option<BTreeSet<&str>> = None;
    for module in modules() {
        let entries: BTreeSet<&str> = ptx::entries(&module.text).iter().map(|entry| entry.name).collect();
        let missing: Vec<&String> = in_source.iter().filter(|name| !entries.contains(name.as_str())).collect();
        assert!(missing.is_empty(), "{} lacks {missing:?}", module.target);
        assert_eq!(first.get_or_insert_with(|| entries.clone()), &entries, "{} differs in its kernels", module.target);
    }
}

/// B44: versions and targets of what is embedded.
#[test]
fn no_module_asks_for_a_newer_driver_or_gpu_than_its_target_needs() {
    for module in modules() {
        assert_eq!(ptx::target(&module.text), Some(module.target));
        let version = ptx::version(&module.text).expect("a module has a version");
        let (_, newest) = NEWEST_VERSION
            .iter()
            .find(|(target, _)| *target == module.target)
            .unwrap_or_else(|| panic!("no promise for {}", module.target));
        assert!(version <= *newest, "{} is PTX {version:?}, promised is {newest:?}", module.target);
        assert!(version >= ptx::needed_version(&module.text), "{} states too low a version", module.target);
    }
}

#[test]
fn no_kernel_keeps_arrays_in_local_memory() {
    each_kernel(|module, kernel| {
        for sign in [".local", "__local_depot", "%SPL"] {
            assert!(!kernel.text.contains(sign), "{} of {} has {sign}", kernel.name, module.target);
        }
    });
}

/// Everything is inlined: a call that is left is a panic, or a function too large for the optimiser's taste.
#[test]
fn no_kernel_calls_a_function() {
    each_kernel(|module, kernel| {
        for sign in ["panic", "call.uni", "call ", "malloc", "vprintf"] {
            assert!(!kernel.text.contains(sign), "{} of {} has {sign}", kernel.name, module.target);
        }
    });
}

/// `reduce_max` has two barriers. Copied into both sides of a branch they would be four, and lanes of one block would
/// wait at different ones.
#[test]
fn barriers_are_not_copied_into_branches() {
    each_kernel(|module, kernel| {
        if kernel.name == "conformance_between_branches" {
            assert_eq!(kernel.text.matches("bar.sync").count(), 2, "{}: {}", module.target, kernel.text);
        }
    });
}

/// The name and operands of an instruction.
fn operation(line: &str) -> Option<(&str, Vec<&str>)> {
    let (name, operands) = line.trim().strip_suffix(';')?.split_once(char::is_whitespace)?;
    Some((name, operands.split(',').map(str::trim).collect()))
}

/// Of a sum of two products the compiler rounds one and leaves the other to a fused multiply-add: which, differs from
/// kernel to kernel. Kernels of Q6_K have such a sum, and promise each other's bits: so they round one of them themselves,
/// which is `mul.rn`, and no other product of two registers is added to.
#[test]
fn which_product_of_q6_k_is_rounded_is_said() {
    let kernels = ["matvec_q6_k_q8", "matvec_swept_q6_k", "matvecs_q6_k"];
    let mut rounded = 0;
    each_kernel(|module, kernel| {
        if !kernels.iter().any(|prefix| kernel.name.starts_with(prefix)) {
            return;
        }
        let operations: Vec<_> = kernel.text.lines().filter_map(operation).collect();
        rounded += operations.iter().filter(|(name, _)| *name == "mul.rn.f32").count();
        let left_open: BTreeSet<&str> = operations
            .iter()
            .filter(|(name, operands)| *name == "mul.f32" && operands[1..].iter().all(|o| o.starts_with('%')))
            .map(|(_, operands)| operands[0])
            .collect();
        for (_, operands) in operations.iter().filter(|(name, _)| *name == "fma.rn.f32") {
            let addend = operands[3];
            assert!(!left_open.contains(addend), "{} on {}: {addend} is added to", kernel.name, module.target);
        }
    });
    assert!(rounded > 0 || WITHOUT_PTX.is_some(), "no product is rounded");
}

#[test]
fn weights_are_loaded_sixteen_bytes_at_a_time() {
    each_kernel(|module, kernel| {
        let absent = is_for_warpgroups(kernel.name) && module.target != "sm_90a";
        if WIDE_LOADS.iter().any(|prefix| kernel.name.starts_with(prefix)) && !absent {
            let wide = |line: &str| {
                line.contains("ld.global") && (line.contains(".v4.") || line.contains(".v2.b64"))
                    || line.contains("cp.async.cg.shared.global")
            };
            assert!(kernel.text.lines().any(wide), "{} of {} has no wide load", kernel.name, module.target);
        }
    });
}

#[test]
fn dependent_launch_is_used_only_where_the_gpu_has_it() {
    for module in modules() {
        if ["sm_80", "sm_89"].contains(&module.target) {
            assert!(!module.text.contains("griddepcontrol"), "{}", module.target);
        }
    }
}

/// Whether a kernel is made of products of warpgroups.
fn is_for_warpgroups(name: &str) -> bool {
    name == "conformance_wgmma" || name.ends_with("_w64") || name.ends_with("_w128")
}

/// Other GPUs' modules have the entries, which do nothing but trap.
#[test]
fn products_of_warpgroups_are_used_only_where_the_gpu_has_them() {
    each_kernel(|module, kernel| {
        let there = kernel.text.contains("wgmma.mma_async");
        let wanted = module.target == "sm_90a" && is_for_warpgroups(kernel.name);
        assert_eq!(there, wanted, "{} of {}", kernel.name, module.target);
        if is_for_warpgroups(kernel.name) && module.target != "sm_90a" {
            assert!(
                kernel.text.contains("trap;") && !kernel.text.contains("ld.global"),
                "{}: {}",
                module.target,
                kernel.text
            );
        }
    });
}
