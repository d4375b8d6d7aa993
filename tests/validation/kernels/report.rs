//! The worst error of each kernel, for the record: `ZINC_REPORT=FILE` writes them as JSON.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex};

thread_local! {
    static ON_GPU: Cell<bool> = const { Cell::new(false) };
}

/// By kernel: the worst error emulated, and on the GPU.
static WORST: LazyLock<Mutex<BTreeMap<String, [Option<f64>; 2]>>> = LazyLock::new(Default::default);
static FILE: LazyLock<Option<PathBuf>> = LazyLock::new(|| std::env::var_os("ZINC_REPORT").map(PathBuf::from));

/// Runs a check whose errors count as the GPU's.
pub(crate) fn on_gpu(check: impl FnOnce()) {
    ON_GPU.set(true);
    check();
    ON_GPU.set(false);
}

/// Notes the error of a result, relative to its largest element: `max |got − want| / max |want|`. The first words of
/// `what` are the operation and, for weights, their type; sizes come after them.
pub(super) fn note(what: &str, got: &[f32], want: &[f64]) {
    let Some(file) = &*FILE else { return };
    let is_name = |word: &&str| !word.starts_with(|c: char| c.is_ascii_digit());
    let what = what.split(' ').take_while(is_name).collect::<Vec<_>>().join(" ");
    let largest = want.iter().fold(0.0, |a: f64, b| a.max(b.abs()));
    if largest == 0.0 {
        return;
    }
    let error = got.iter().zip(want).fold(0.0, |a: f64, (&g, &w)| a.max((f64::from(g) - w).abs())) / largest;
    let mut worst = WORST.lock().expect("no check panics in here");
    let entry = &mut worst.entry(what).or_default()[usize::from(ON_GPU.get())];
    if entry.is_none_or(|before| error > before) {
        *entry = Some(error);
        let kernels: BTreeMap<_, _> = worst
            .iter()
            .map(|(name, [emulated, gpu])| (name, serde_json::json!({ "emulated": emulated, "gpu": gpu })))
            .collect();
        // Written each time: the test runner has no last moment to do it in.
        std::fs::write(file, serde_json::to_string_pretty(&kernels).expect("numbers and names")).expect("ZINC_REPORT");
    }
}

/// The worst error on the GPU that an earlier run wrote to `ZINC_REPORT`, by operation and type.
pub(super) fn written() -> BTreeMap<String, f64> {
    let text = FILE.as_ref().and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
    let kernels: BTreeMap<String, serde_json::Value> = serde_json::from_str(&text).unwrap_or_default();
    kernels.into_iter().filter_map(|(name, errors)| Some((name, errors["gpu"].as_f64()?))).collect()
}
