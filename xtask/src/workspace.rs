//! Where things are in the checkout.

use std::env;
use std::path::PathBuf;

/// The checkout's root.
pub(crate) fn root() -> PathBuf {
    // Cargo sets the variable when it runs the binary; a binary started by hand knows where it was built.
    let xtask = env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    xtask.parent().map_or(xtask.clone(), PathBuf::from)
}

/// The folder of fetched files: `.cache`, or what `ZINC_CACHE` names.
pub(crate) fn cache() -> PathBuf {
    env::var_os("ZINC_CACHE").map_or_else(|| root().join(".cache"), PathBuf::from)
}

/// The folder in the cache that `setup` unpacks NVIDIA's assembler to.
pub(crate) fn ptxas_bin() -> PathBuf {
    cache().join("nvcc/nvidia/cu13/bin")
}
