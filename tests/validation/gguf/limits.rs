//! Running a test in a process of its own with little address space, so that an allocation by a number
//! from the file, or a loop over one, is seen.

use std::process::Command;
use std::time::Instant;

use host::gguf::Gguf;

use super::craft::{header, one_tensor, pair};

const ADDRESS_SPACE_KIB: u32 = 524_288;
const PEAK_MEMORY_KIB: u64 = 64 * 1024;
const IN_CHILD: &str = "ZINC_TEST_LIMITED";

/// Runs `body` in a child process that is this test again, under `ulimit -v`, and asserts that it
/// succeeds and that its peak memory stays below 64 MiB. `test` is the calling test's full name.
pub(super) fn limited(test: &str, body: impl FnOnce()) {
    if std::env::var_os(IN_CHILD).is_some() {
        body();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
        assert!(peak < PEAK_MEMORY_KIB, "the peak was {peak} KiB");
        println!("{test} ran, peak {peak} KiB");
        return;
    }
    let script = format!("ulimit -v {ADDRESS_SPACE_KIB} && exec \"$0\" \"$@\"");
    let child = Command::new("sh")
        .args(["-c", &script])
        .arg(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(IN_CHILD, "1")
        .output()
        .unwrap();
    let text = [child.stdout, child.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(child.status.success(), "{}:\n{text}", child.status);
    assert!(text.contains(&format!("{test} ran")), "the child must have run the test:\n{text}");
}

/// B1, B4: claims of 2^61 and more, in a process that has half a GiB.
#[test]
fn b4_claims_cost_neither_memory_nor_time() {
    limited("gguf::limits::b4_claims_cost_neither_memory_nor_time", || {
        let huge = 1u64 << 62;
        let array = |ty: u32, n: u64| {
            let value = [ty.to_le_bytes().to_vec(), n.to_le_bytes().to_vec(), vec![0; 64]].concat();
            [header(0, 1), pair("a", 9, &value)].concat()
        };
        let mut files = vec![header(0, huge), header(huge, 0), header(u64::MAX, u64::MAX)];
        files.extend([huge, u64::MAX].map(|n| [header(0, 1), n.to_le_bytes().to_vec()].concat()));
        // Elements of every type, strings and arrays too; 40 million fit 32 bits but not the file.
        for ty in 0..13 {
            files.extend([40_000_000, u64::from(u32::MAX), 1 << 61, u64::MAX].map(|n| array(ty, n)));
        }
        files.extend([one_tensor(&[1 << 33, 1 << 33], 0, &[]), one_tensor(&[1 << 62], 0, &[0; 128])]);
        for file in files {
            let start = Instant::now();
            Gguf::parse(&file).expect_err("the file must be refused");
            assert!(start.elapsed().as_millis() < 1000);
        }
    });
}
