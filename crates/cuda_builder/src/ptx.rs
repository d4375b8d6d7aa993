//! Reading PTX text, and the changes that the builder makes to what LLVM wrote.
//!
//! - Launch bounds: neither Rust nor LLVM's text has a way to state them from `asm!`, so `cuda_std`'s
//!   `#[kernel(max_threads = …, min_blocks = …)]` leaves a comment in the module, `// cuda_std.bounds NAME
//!   THREADS BLOCKS`, which becomes `.maxntid` and `.minnctapersm` (PTX ISA, "Performance-Tuning
//!   Directives").
//! - `.version`: LLVM writes the lowest version that the target needs, but does not look into inline
//!   assembly. A driver refuses a version newer than its own, so the number is raised exactly as far
//!   as the instructions ask.

use crate::{Arch, Error};

/// A PTX ISA version, major and minor.
pub type Version = (u32, u32);

/// A kernel in PTX text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Its symbol.
    pub name: &'a str,
    /// From `.entry` to the closing brace.
    pub text: &'a str,
}

/// The instructions, and parts of them, that appeared after PTX 7.0, each with the version that
/// introduced it, from the "PTX ISA Notes" of their sections.
const INTRODUCED: [(&str, Version); 29] = [
    (".L1::", (7, 4)),
    (".L2::", (7, 4)),
    ("applypriority", (7, 4)),
    ("createpolicy", (7, 4)),
    ("discard.global", (7, 4)),
    ("%cluster_", (7, 8)),
    ("%is_explicit_cluster", (7, 8)),
    ("barrier.cluster", (7, 8)),
    ("getctarank", (7, 8)),
    ("griddepcontrol", (7, 8)),
    ("mapa", (7, 8)),
    ("mbarrier.try_wait", (7, 8)),
    ("shared::c", (7, 8)),
    ("stmatrix", (7, 8)),
    (".expect_tx", (8, 0)),
    ("cp.async.bulk", (8, 0)),
    ("cp.reduce.async.bulk", (8, 0)),
    ("elect.sync", (8, 0)),
    ("fence.mbarrier_init", (8, 0)),
    ("fence.proxy.async", (8, 0)),
    ("setmaxnreg", (8, 0)),
    ("wgmma.", (8, 0)),
    (".e4m3x2", (8, 1)),
    (".e5m2x2", (8, 1)),
    ("multimem", (8, 1)),
    (".e4m3.", (8, 4)),
    ("tcgen05", (8, 6)),
    (".kind::", (8, 7)),
    (".v8.", (8, 8)),
];

/// Functions that the driver itself provides to PTX.
const SYSTEM_CALLS: [&str; 4] = ["vprintf", "malloc", "free", "__assertfail"];

const BOUNDS: &str = "// cuda_std.bounds ";

/// Applies launch bounds and the version to LLVM's text, and checks that nothing is unresolved.
pub(crate) fn finish(text: &str, arch: Arch) -> Result<String, Error> {
    let refuse = |why: String| Error::Ptx { arch, why };
    if let Some(symbol) = unresolved(text) {
        return Err(refuse(format!("`{symbol}` is called and defined nowhere")));
    }
    let written = version(text).ok_or_else(|| refuse("no .version line".into()))?;
    let (major, minor) = needed_version(text).max(written);
    let mut bounds = bounds(text).map_err(refuse)?;
    let mut out = String::with_capacity(text.len());
    let mut pending: Option<Bounds<'_>> = None;
    for line in text.lines() {
        if line.trim_start().starts_with(BOUNDS) {
            continue;
        }
        if line.starts_with(".version ") {
            out.push_str(&format!(".version {major}.{minor}\n"));
            continue;
        }
        if let Some(name) = entry_name(line) {
            pending = bounds.iter().position(|bounds| bounds.name == name).map(|at| bounds.swap_remove(at));
        }
        if line.starts_with('{')
            && let Some(bounds) = pending.take()
        {
            out.push_str(&bounds.directives());
        }
        out.push_str(line);
        out.push('\n');
    }
    match bounds.first() {
        Some(bounds) => Err(refuse(format!("launch bounds for `{}`, which is no kernel", bounds.name))),
        None => Ok(out),
    }
}

struct Bounds<'a> {
    name: &'a str,
    max_threads: u32,
    min_blocks: u32,
}

impl Bounds<'_> {
    fn directives(&self) -> String {
        let mut text = format!(".maxntid {}\n", self.max_threads);
        if self.min_blocks > 0 {
            text.push_str(&format!(".minnctapersm {}\n", self.min_blocks));
        }
        text
    }
}

fn bounds(text: &str) -> Result<Vec<Bounds<'_>>, String> {
    let parse = |rest: &'_ str| -> Option<(u32, u32)> {
        let mut numbers = rest.split_whitespace().skip(1).map(str::parse::<u32>);
        let max_threads = numbers.next()?.ok().filter(|threads| (1..=1024).contains(threads))?;
        let min_blocks = numbers.next().unwrap_or(Ok(0)).ok().filter(|blocks| *blocks <= 32)?;
        Some((max_threads, min_blocks))
    };
    let mut all: Vec<Bounds<'_>> = Vec::new();
    for rest in text.lines().filter_map(|line| line.trim_start().strip_prefix(BOUNDS)) {
        let name = rest.split_whitespace().next().unwrap_or_default();
        let (max_threads, min_blocks) = parse(rest)
            .ok_or_else(|| format!("`{BOUNDS}{rest}`: expected a name, 1 to 1024 threads and at most 32 blocks"))?;
        // A module linked from several codegen units may carry the same comment twice.
        if !all.iter().any(|known| known.name == name) {
            all.push(Bounds { name, max_threads, min_blocks });
        }
    }
    Ok(all)
}

/// The `.version` that the text states.
pub fn version(text: &str) -> Option<Version> {
    let (major, minor) = directive(text, ".version")?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The `.target` that the text states, such as `sm_90`.
pub fn target(text: &str) -> Option<&str> {
    directive(text, ".target")?.split(',').next()
}

fn directive<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).map(str::trim)
}

/// The version that the newest instruction in the text needs; 7.0 where there is none newer.
pub fn needed_version(text: &str) -> Version {
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    code.flat_map(|line| INTRODUCED.iter().filter(|(part, _)| line.contains(part)))
        .map(|(_, version)| *version)
        .max()
        .unwrap_or((7, 0))
}

/// The kernels of a module, in its order.
pub fn entries(text: &str) -> Vec<Entry<'_>> {
    let mut found = Vec::new();
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        if let Some(name) = entry_name(line) {
            let rest = &text[at..];
            // Braces inside a body are indented (call sequences, asm scopes); its own is not.
            let end = rest.find("\n}").map_or(rest.len(), |end| end + 2);
            found.push(Entry { name, text: &rest[..end] });
        }
        at += line.len();
    }
    found
}

fn entry_name(line: &str) -> Option<&str> {
    let (before, after) = line.split_once(".entry ")?;
    let linkage = before.trim();
    (linkage.is_empty() || linkage == ".visible" || linkage == ".weak")
        .then(|| after.split(['(', ' ', '\n']).next())
        .flatten()
}

/// The first function that is declared but not defined.
fn unresolved(text: &str) -> Option<&str> {
    let mut lines = text.lines().filter(|line| line.starts_with(".extern .func"));
    lines.find_map(|line| {
        // `.extern .func (.param .b32 func_retval0) name` or `.extern .func name`
        let after = line.trim_start_matches(".extern .func").trim();
        let after = after.strip_prefix('(').and_then(|rest| rest.split_once(')')).map_or(after, |(_, name)| name);
        let name = after.trim().split(['(', ' ', ';']).next()?;
        (!SYSTEM_CALLS.contains(&name)).then_some(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
.version 7.0
.target sm_80
// cuda_std.bounds axpy 256 2
.visible .entry axpy(
\t.param .u64 axpy_param_0
)
{
\t.reg .b32 %r<3>;
\tret;
}
.visible .entry none()
{
\tret;
}
";

    fn with(instruction: &str) -> String {
        TEXT.replace("\tret;", &format!("\t{instruction};\n\tret;"))
    }

    #[test]
    fn bounds_go_before_the_body_of_their_kernel() {
        let out = finish(TEXT, Arch::Sm80).unwrap();
        assert!(out.contains(")\n.maxntid 256\n.minnctapersm 2\n{\n\t.reg"), "{out}");
        assert_eq!(out.matches(".maxntid").count(), 1);
        assert!(!out.contains("cuda_std.bounds"));
    }

    #[test]
    fn bounds_without_blocks_set_only_the_threads() {
        let out = finish(&TEXT.replace("256 2", "96"), Arch::Sm80).unwrap();
        assert!(out.contains(".maxntid 96\n{") && !out.contains("minnctapersm"));
    }

    #[test]
    fn bad_bounds_are_refused() {
        for line in ["axpy 0 1", "axpy 1025 1", "axpy", "axpy x", "axpy 256 33", "absent 32 1"] {
            assert!(finish(&TEXT.replace("axpy 256 2", line), Arch::Sm80).is_err(), "{line}");
        }
    }

    #[test]
    fn the_version_is_raised_only_as_far_as_instructions_need() {
        let version_of = |text: &str| version(&finish(text, Arch::Sm80).unwrap()).unwrap();
        assert_eq!(version_of(TEXT), (7, 0));
        assert_eq!(version_of(&with("griddepcontrol.wait")), (7, 8));
        assert_eq!(version_of(&with("ld.global.L1::no_allocate.v4.u32 {a,b,c,d}, [p]")), (7, 4));
        assert_eq!(version_of(&with("// griddepcontrol.wait")), (7, 0));
        assert_eq!(version_of(&TEXT.replace("axpy", "axpy_wgmma")), (7, 0), "a name");
        assert_eq!(version_of(&with("wgmma.fence.sync.aligned").replace("7.0", "8.7")), (8, 7));
    }

    #[test]
    fn entries_and_header_are_read() {
        let found = entries(TEXT);
        assert_eq!(found.iter().map(|entry| entry.name).collect::<Vec<_>>(), ["axpy", "none"]);
        assert!(found[0].text.ends_with("ret;\n}") && !found[0].text.contains("none"));
        assert_eq!(target(TEXT), Some("sm_80"));
        assert_eq!(version("no header"), None);
    }

    #[test]
    fn an_undefined_function_is_named() {
        let text = format!("{TEXT}.extern .func  (.param .b32 func_retval0) fmaf\n(\n);\n");
        let error = finish(&text, Arch::Sm80).unwrap_err().to_string();
        assert!(error.contains("`fmaf`"), "{error}");
        assert!(finish(&format!("{TEXT}.extern .func vprintf\n"), Arch::Sm80).is_ok());
    }
}
