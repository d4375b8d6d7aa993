//! What can go wrong with the driver, in words that say what to do about it.

use std::ffi::{CStr, c_char, c_int};

use super::driver::CudaVersion;
use super::ptx::PtxError;
use super::raw;

/// The result of this module's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// A failure of the driver, of a device, or of the kernels' loading.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// No driver library could be opened.
    #[error("no NVIDIA driver found ({tried}); install one, or run with --device cpu")]
    NoDriver {
        /// Each library and why it did not open.
        tried: String,
    },
    /// The driver works, and has no device to offer.
    #[error("the NVIDIA driver sees no GPU{}", visible_note())]
    NoDevice,
    /// No device is the asked one.
    #[error("no GPU is {selector}; there {}", listing(.present))]
    NotSelected {
        /// What was asked for.
        selector: String,
        /// The devices that there are, as one line each.
        present: Vec<String>,
    },
    /// A driver call failed.
    #[error("{call} failed: {name} ({code}): {text}")]
    Call {
        /// The driver function.
        call: &'static str,
        /// The error's number.
        code: i32,
        /// The error's name in the driver's header.
        name: String,
        /// The driver's explanation.
        text: String,
    },
    /// The driver lacks a function.
    #[error("the driver (CUDA {version}) is too old: it has no {function}")]
    NoFunction {
        /// The driver function.
        function: &'static str,
        /// The driver's CUDA version.
        version: CudaVersion,
    },
    /// The kernels do not suit this driver or device.
    #[error(transparent)]
    Ptx(#[from] PtxError),
    /// The driver's compiler refused the kernels.
    #[error("kernels for {arch} do not load: {name} ({code}): {text}{}", log_note(.log))]
    Module {
        /// The PTX target.
        arch: String,
        /// The error's number.
        code: i32,
        /// The error's name.
        name: String,
        /// The driver's explanation.
        text: String,
        /// The compiler's log, which may be empty.
        log: String,
    },
    /// One kernel cannot be had from its module, or its launch failed.
    #[error("kernel {kernel}: {source}")]
    Entry {
        /// The kernel's name.
        kernel: String,
        /// The call that failed.
        source: Box<Error>,
    },
}

fn visible_note() -> String {
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(value) => format!(" (CUDA_VISIBLE_DEVICES is {value:?})"),
        Err(_) => String::new(),
    }
}

fn listing(present: &[String]) -> String {
    match present {
        [] => "is none".to_owned(),
        [one] => format!("is only {one}"),
        many => format!("are {}", many.join("; ")),
    }
}

fn log_note(log: &str) -> String {
    // One line: the log is the compiler's, and a start-up error should stay greppable.
    let log: Vec<&str> = log.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    if log.is_empty() { String::new() } else { format!(" [{}]", log.join(" | ")) }
}

/// Turns a driver's return code into a result that names the call.
///
/// # Errors
/// [`Error::NoDevice`] for that code, [`Error::Call`] for every other but success.
pub(super) fn check(call: &'static str, code: c_int) -> Result<()> {
    match code {
        raw::CUDA_SUCCESS => Ok(()),
        raw::CUDA_ERROR_NO_DEVICE => Err(Error::NoDevice),
        code => {
            let (name, text) = describe(code);
            Err(Error::Call { call, code, name, text })
        }
    }
}

/// The same for a result of `cust`, whose error enum has the driver's numbers.
pub(super) fn check_cust<T>(call: &'static str, result: cust::error::CudaResult<T>) -> Result<T> {
    result.map_err(|error| match check(call, error as u32 as c_int) {
        Err(error) => error,
        Ok(()) => unreachable!("cust reports success as Ok"),
    })
}

/// The driver's name and explanation of an error code.
pub(super) fn describe(code: c_int) -> (String, String) {
    if code == raw::CUDA_ERROR_STUB_LIBRARY {
        return ("CUDA_ERROR_STUB_LIBRARY".to_owned(), "the driver is not loaded, or lacks this function".to_owned());
    }
    (
        text_of(code, raw::cuGetErrorName).unwrap_or_else(|| "unknown error".to_owned()),
        text_of(code, raw::cuGetErrorString).unwrap_or_else(|| "the driver has no text for it".to_owned()),
    )
}

fn text_of(code: c_int, get: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int) -> Option<String> {
    let mut text = std::ptr::null();
    // SAFETY: both functions take any code and write one pointer: to a static string, or null.
    let status = unsafe { get(code, &mut text) };
    if status != raw::CUDA_SUCCESS || text.is_null() {
        return None;
    }
    // SAFETY: on success the pointer is to a nul-terminated string that lives as long as the driver.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_names_call_code_and_text() {
        let error = check("cuMemAlloc", raw::CUDA_ERROR_STUB_LIBRARY).expect_err("an error code");
        assert_eq!(
            error.to_string(),
            "cuMemAlloc failed: CUDA_ERROR_STUB_LIBRARY (34): the driver is not loaded, or lacks this function"
        );
        assert!(check("cuInit", 0).is_ok());
    }

    #[test]
    fn a_compiler_log_becomes_one_line() {
        assert_eq!(log_note("ptxas fatal: x\n\n  line 2 \n"), " [ptxas fatal: x | line 2]");
        assert_eq!(log_note(" \n"), "");
    }
}
