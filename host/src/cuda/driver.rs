//! The NVIDIA driver, opened at run time.
//!
//! `cust` links against `libcuda` by name. Linking the real library would make the program refuse to
//! start where no driver is installed, and needs a CUDA toolkit to build. Instead this module *defines*
//! every driver symbol: each is a jump through a slot of one table, and a slot starts at
//! `unavailable`, which returns `CUDA_ERROR_STUB_LIBRARY`. [`load`] opens `libcuda.so.1` and fills the
//! slots. One binary therefore starts everywhere, and a call that the installed driver is too old to
//! have fails with an error code instead of failing to link.
//!
//! Deliberately absent: unloading. The driver keeps threads and state of its own, and function pointers
//! into it live in the table.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::error::{Error, Result, check};
use super::raw;
use super::symbols::driver_symbols;

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile_error!("host::cuda knows the calling sequence of x86_64 and aarch64 Linux only");

/// Where a driver library is looked for, in order. WSL2 keeps it outside the loader's path.
const LIBRARIES: [&str; 2] = ["libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"];

/// What every driver function does until a driver is loaded: fail with a code that says so.
extern "C" fn unavailable() -> c_int {
    raw::CUDA_ERROR_STUB_LIBRARY
}

macro_rules! define_table {
    ($($name:ident)*) => {
        /// The functions' names, in slot order.
        const NAMES: &[&str] = &[$(stringify!($name)),*];

        // A symbol is one indirect jump, so arguments, stack and return value pass through untouched.
        // `zinc_slot` counts slots while the text is assembled.
        #[cfg(target_arch = "x86_64")]
        std::arch::global_asm!(
            ".text", ".set zinc_slot, 0",
            $(
                concat!(".globl ", stringify!($name)),
                concat!(".type ", stringify!($name), ", @function"),
                concat!(stringify!($name), ": jmpq *{slots}+8*zinc_slot(%rip)"),
                concat!(".size ", stringify!($name), ", .-", stringify!($name)),
                ".set zinc_slot, zinc_slot+1",
            )*
            slots = sym SLOTS,
            options(att_syntax)
        );
        // x16 is the register that the procedure call standard leaves to such veneers.
        #[cfg(target_arch = "aarch64")]
        std::arch::global_asm!(
            ".text", ".p2align 2", ".set zinc_slot, 0",
            $(
                concat!(".globl ", stringify!($name)),
                concat!(".type ", stringify!($name), ", @function"),
                concat!(stringify!($name), ": adrp x16, {slots}+8*zinc_slot"),
                "ldr x16, [x16, :lo12:{slots}+8*zinc_slot]",
                "br x16",
                concat!(".size ", stringify!($name), ", .-", stringify!($name)),
                ".set zinc_slot, zinc_slot+1",
            )*
            slots = sym SLOTS
        );
    };
}
driver_symbols!(define_table);

/// The jump table. Written once, by [`load`], before any caller holds a [`Driver`].
// SAFETY: the name is this crate's own, so it can collide with no other symbol of the program; the
// trampolines need the static under one visible name whatever codegen unit it lands in.
#[unsafe(export_name = "zinc_cuda_slots")]
static SLOTS: [AtomicPtr<c_void>; NAMES.len()] =
    [const { AtomicPtr::new(unavailable as extern "C" fn() -> c_int as *mut c_void) }; NAMES.len()];

/// A loaded and initialised driver.
#[derive(Debug)]
pub struct Driver {
    library: &'static str,
    version: CudaVersion,
}

impl Driver {
    /// The library that was opened.
    pub fn library(&self) -> &'static str {
        self.library
    }

    /// The newest CUDA version that this driver implements.
    pub fn version(&self) -> CudaVersion {
        self.version
    }

    /// Whether the driver has this function; `false` for a name outside the table.
    pub fn has(&self, function: &str) -> bool {
        let stub = unavailable as extern "C" fn() -> c_int as *mut c_void;
        NAMES.iter().position(|name| *name == function).is_some_and(|i| SLOTS[i].load(Ordering::Relaxed) != stub)
    }
}

/// A CUDA version, ordered by age. The driver reports `1000 × major + 10 × minor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion {
    /// Before the dot.
    pub major: u32,
    /// After the dot.
    pub minor: u32,
}

impl std::fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The driver, loaded on the first call and kept.
///
/// # Errors
/// [`Error::NoDriver`] where no library can be opened, [`Error::NoDevice`] where the driver sees no GPU,
/// and [`Error::Call`] where it does not initialise.
pub fn load() -> Result<&'static Driver> {
    static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
    DRIVER.get_or_init(|| open(&LIBRARIES)).as_ref().map_err(Clone::clone)
}

/// Opens the first library of `candidates` that loads, fills the table and initialises the driver.
fn open(candidates: &[&'static str]) -> Result<Driver> {
    let mut tried = Vec::new();
    for &path in candidates {
        // SAFETY: opening runs the library's initialisers. These are the vendor's driver, found by the
        // names under which it is installed, and it is never unloaded.
        match unsafe { libloading::Library::new(path) } {
            Ok(library) => {
                fill(&library);
                std::mem::forget(library);
                return initialise(path);
            }
            // The loader's own words name the library and the reason; the wrapper's say only that it failed.
            Err(error) => tried.push(std::error::Error::source(&error).map_or(error.to_string(), ToString::to_string)),
        }
    }
    Err(Error::NoDriver { tried: tried.join("; ") })
}

/// Points each slot at the library's function of that name; what it lacks stays `unavailable`.
fn fill(library: &libloading::Library) {
    for (name, slot) in NAMES.iter().zip(&SLOTS) {
        // SAFETY: only the address is taken here. It is called through the declarations of cust_raw and
        // `raw`, which give the signatures that the CUDA headers give these names.
        if let Ok(function) = unsafe { library.get::<unsafe extern "C" fn()>(*name) } {
            slot.store(*function as *mut c_void, Ordering::Relaxed);
        }
    }
}

fn initialise(library: &'static str) -> Result<Driver> {
    // SAFETY: takes a flag word that must be 0, and may be called more than once.
    check("cuInit", unsafe { raw::cuInit(0) })?;
    let mut version: c_int = 0;
    // SAFETY: writes one int through a valid pointer.
    check("cuDriverGetVersion", unsafe { raw::cuDriverGetVersion(&mut version) })?;
    let version = u32::try_from(version).unwrap_or(0);
    Ok(Driver { library, version: CudaVersion { major: version / 1000, minor: version % 1000 / 10 } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_and_calls_fail_softly() {
        let error = open(&["libzinc-no-such-driver.so.1"]).expect_err("no such library");
        assert!(error.to_string().contains("libzinc-no-such-driver.so.1"), "{error}");
        assert!(matches!(error, Error::NoDriver { .. }));
    }

    #[test]
    fn cust_calls_through_the_table() {
        let version = cust::CudaApiVersion::get();
        match load() {
            Ok(driver) => assert!(driver.version() > CudaVersion { major: 0, minor: 0 }),
            Err(Error::NoDriver { .. }) => {
                assert!(version.is_err(), "a slot that was never filled returns an error");
                assert_eq!(super::super::error::describe(raw::CUDA_ERROR_STUB_LIBRARY).0, "CUDA_ERROR_STUB_LIBRARY");
            }
            Err(other) => assert!(!other.to_string().is_empty()),
        }
    }

    #[test]
    fn the_table_has_no_duplicates() {
        let mut names = NAMES.to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), NAMES.len());
        assert_eq!(SLOTS.len(), NAMES.len());
    }
}
