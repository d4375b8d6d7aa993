//! Where the tests' files are: in the checkout that they were built in, or in the folder that `ZINC_ROOT` names.

use std::path::{Path, PathBuf};

/// A path in the checkout, or in what was packed of it.
pub(crate) fn path(path: &str) -> PathBuf {
    let built_in = || Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the checkout").to_owned();
    std::env::var_os("ZINC_ROOT").map_or_else(built_in, PathBuf::from).join(path)
}

/// A file that is fetched and not in the repository; `None`, with a line that says so, where it is not
/// there. `ZINC_REQUIRE=1` makes that a failure.
pub(crate) fn fetched(name: &str) -> Option<PathBuf> {
    let cache = std::env::var_os("ZINC_CACHE").map_or_else(|| path(".cache"), PathBuf::from);
    let path = cache.join(name);
    if path.exists() {
        return Some(path);
    }
    println!("skipped: {} is not there; cargo xtask setup fetches it", path.display());
    assert!(std::env::var_os("ZINC_REQUIRE").is_none(), "{} is required", path.display());
    None
}

/// The model of the reference architecture that comes along.
pub(crate) fn zinc_tiny() -> PathBuf {
    path("models/zinc-tiny-qwen35moe.gguf")
}
