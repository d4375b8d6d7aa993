//! Kernels: from PTX text to functions that can be launched.
//!
//! Everything is loaded and every entry resolved when a device is opened, so that a kernel that this
//! driver cannot compile is a start-up error with its name, and never a failure in the middle of a
//! request.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use cust::sys::{CUfunction, CUmodule};

use super::driver::CudaVersion;
use super::error::{Error, Result, check, describe};
use super::ptx::{self, Header, PtxError, Target};
use super::raw;
use crate::gpu::device::Properties;
use crate::gpu::ptx::{EmbeddedPtx, PTX};

/// The largest PTX file that is read: a hundred times what the kernels take.
const MAX_PTX_BYTES: u64 = 256 << 20;

/// What a start may take before it is said why. Kernels from the driver's cache are there in less than one.
const PATIENCE: Duration = Duration::from_secs(2);

/// The size of the compiler's log buffers.
const LOG_BYTES: usize = 16 << 10;

/// Where the kernels come from.
#[derive(Clone, Debug, Default)]
pub enum KernelSource {
    /// The PTX in this program.
    #[default]
    Embedded,
    /// The `*.ptx` files of a folder, one a target.
    Folder(PathBuf),
}

/// One PTX text with its header.
#[derive(Clone, Debug)]
pub struct Image {
    /// Where it is from, for messages.
    pub origin: String,
    /// What it says of itself.
    pub header: Header,
    text: Text,
}

#[derive(Clone, Debug)]
enum Text {
    Embedded(&'static EmbeddedPtx),
    Read(String),
}

/// The kernels of a folder, if there is one, or the program's own.
impl From<Option<PathBuf>> for KernelSource {
    fn from(folder: Option<PathBuf>) -> Self {
        folder.map_or(Self::Embedded, Self::Folder)
    }
}

impl KernelSource {
    /// The PTX texts, with their headers read.
    ///
    /// # Errors
    /// Where the folder cannot be read or a text is not PTX.
    pub fn images(&self) -> std::result::Result<Vec<Image>, PtxError> {
        match self {
            KernelSource::Embedded => PTX.iter().map(Image::embedded).collect(),
            KernelSource::Folder(folder) => read_folder(folder),
        }
    }
}

fn read_folder(folder: &Path) -> std::result::Result<Vec<Image>, PtxError> {
    let failed = |path: &Path, reason: String| PtxError::File { path: path.display().to_string(), reason };
    let entries = std::fs::read_dir(folder).map_err(|error| failed(folder, error.to_string()))?;
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "ptx"));
    paths.sort();
    let read = |path: &PathBuf| {
        let bytes = std::fs::metadata(path).map_err(|error| failed(path, error.to_string()))?.len();
        if bytes > MAX_PTX_BYTES {
            return Err(failed(path, format!("{bytes} bytes are too many")));
        }
        let text = std::fs::read_to_string(path).map_err(|error| failed(path, error.to_string()))?;
        Image::new(path.display().to_string(), text).map_err(|error| failed(path, error.to_string()))
    };
    paths.iter().map(read).collect()
}

impl Image {
    /// Reads the header of a PTX text.
    ///
    /// # Errors
    /// [`PtxError::Malformed`].
    pub fn new(origin: String, text: String) -> std::result::Result<Image, PtxError> {
        Ok(Image { origin, header: Header::parse(&text)?, text: Text::Read(text) })
    }

    fn embedded(ptx: &'static EmbeddedPtx) -> std::result::Result<Image, PtxError> {
        let header = Header::parse(ptx.directives)?;
        Ok(Image { origin: format!("built-in {}", ptx.target), header, text: Text::Embedded(ptx) })
    }

    /// The text, for the driver.
    fn text(&self) -> std::result::Result<CString, PtxError> {
        let text = match &self.text {
            Text::Embedded(ptx) => ptx.text(),
            Text::Read(text) => text.clone(),
        };
        CString::new(text).map_err(|_| PtxError::Malformed(format!("{} has a zero byte", self.origin)))
    }
}

/// The image for a device: of those that run on it, the one for the newest target.
///
/// # Errors
/// [`PtxError::NoTarget`] where none runs on it, [`PtxError::DriverTooOld`] where those that do are all
/// newer than the driver.
pub fn choose(images: &[Image], capability: (u32, u32), driver: CudaVersion) -> std::result::Result<&Image, PtxError> {
    let mut fitting: Vec<&Image> = images.iter().filter(|image| image.header.target.runs_on(capability)).collect();
    fitting.sort_by_key(|image| image.header.target);
    let Some(newest) = fitting.last() else {
        let present = images.iter().map(|image| image.header.target.to_string()).collect();
        return Err(PtxError::NoTarget { device: capability, present });
    };
    // An older driver may still take an older target's text.
    let taken = fitting.iter().rev().find(|image| ptx::check_version(image.header.version, driver).is_ok());
    taken.copied().ok_or_else(|| match ptx::check_version(newest.header.version, driver) {
        Err(error) => error,
        Ok(()) => unreachable!("the search above tried this image"),
    })
}

/// A kernel ready to launch, with what limits it.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    pub(super) raw: CUfunction,
    /// Threads that a block of it may have, given its registers.
    pub max_threads_per_block: u32,
    /// Shared memory that a launch may ask for beside the kernel's own.
    pub max_dynamic_shared_bytes: u32,
    /// Registers of one thread.
    pub n_registers: u32,
    /// Local memory (spills, arrays) of one thread.
    pub local_bytes: u32,
}

/// A module on one device, every entry resolved. The context is current when it is dropped.
pub struct Kernels {
    module: CUmodule,
    functions: HashMap<String, Function>,
    target: Target,
    origin: String,
}

// SAFETY: module and function handles may be used from any thread; the driver locks.
unsafe impl Send for Kernels {}
// SAFETY: as above; nothing here is changed after loading.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Loads the image for the device whose context is current.
    pub(super) fn load(source: &KernelSource, driver: CudaVersion, device: &Properties) -> Result<Kernels> {
        let images = source.images()?;
        let image = choose(&images, device.capability, driver)?;
        let mut kernels = Kernels {
            module: compile(image, driver)?,
            functions: HashMap::with_capacity(image.header.entries.len()),
            target: image.header.target,
            origin: image.origin.clone(),
        };
        for entry in &image.header.entries {
            let name = entry.to_string_lossy().into_owned();
            let function = resolve(kernels.module, entry, device)
                .map_err(|source| Error::Entry { kernel: name.clone(), source: Box::new(source) })?;
            kernels.functions.insert(name, function);
        }
        Ok(kernels)
    }

    /// The kernel of this name.
    pub fn get(&self, name: &str) -> Option<&Function> {
        self.functions.get(name)
    }

    /// The kernels' names, sorted.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.functions.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    /// The target that was chosen.
    pub fn target(&self) -> Target {
        self.target
    }

    /// Where the text is from.
    pub fn origin(&self) -> &str {
        &self.origin
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: the handle is of a module loaded by `compile` and unloaded only here. A failure means
        // that the context is gone, and the module with it.
        let _ = unsafe { raw::cuModuleUnload(self.module) };
    }
}

/// Calls the driver's compiler, and says so where it takes long.
fn announced<T>(compile: impl FnOnce() -> T) -> T {
    let (compiled, waiting) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            if waiting.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                tracing::warn!("the driver compiles the kernels for this GPU, once: up to a minute");
            }
        });
        let result = compile();
        drop(compiled);
        result
    })
}

/// Gives the text to the driver's compiler.
fn compile(image: &Image, driver: CudaVersion) -> Result<CUmodule> {
    let text = image.text()?;
    let (mut log, mut info) = (vec![0u8; LOG_BYTES], vec![0u8; LOG_BYTES]);
    let mut options: [c_uint; 4] = [
        raw::CU_JIT_ERROR_LOG_BUFFER,
        raw::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        raw::CU_JIT_INFO_LOG_BUFFER,
        raw::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
    ];
    // Sizes travel as the pointer-sized values themselves.
    let size = std::ptr::without_provenance_mut::<c_void>(LOG_BYTES);
    let mut values: [*mut c_void; 4] = [log.as_mut_ptr().cast(), size, info.as_mut_ptr().cast(), size];
    let mut module = std::ptr::null_mut();
    // SAFETY: the text is nul-terminated; options and values are arrays of the given length, each value
    // of the kind that its option wants, and the buffers have the stated sizes.
    let code = announced(|| unsafe {
        raw::cuModuleLoadDataEx(
            &mut module,
            text.as_ptr().cast(),
            options.len() as c_uint,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    });
    match code {
        raw::CUDA_SUCCESS => Ok(module),
        raw::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => Err(Error::Ptx(PtxError::DriverTooOld {
            driver,
            supported: ptx::newest_for(driver).unwrap_or(image.header.version),
            wanted: image.header.version,
        })),
        code => {
            let (name, text) = describe(code);
            let log = CStr::from_bytes_until_nul(&log).map(|log| log.to_string_lossy().into_owned());
            let arch = image.header.target.to_string();
            Err(Error::Module { arch, code, name, text, log: log.unwrap_or_default() })
        }
    }
}

/// Finds an entry, reads its limits, and lets it use all the shared memory that the device has for it.
fn resolve(module: CUmodule, entry: &CStr, device: &Properties) -> Result<Function> {
    let mut function = std::ptr::null_mut();
    // SAFETY: the module is loaded, the name nul-terminated, and the handle's place valid.
    check("cuModuleGetFunction", unsafe { raw::cuModuleGetFunction(&mut function, module, entry.as_ptr()) })?;
    let attribute = |attribute: c_uint| {
        let mut value: c_int = 0;
        // SAFETY: writes one int; the function handle was just given.
        check("cuFuncGetAttribute", unsafe { raw::cuFuncGetAttribute(&mut value, attribute, function) })?;
        Ok::<u32, Error>(u32::try_from(value).unwrap_or(0))
    };
    let static_shared = attribute(raw::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
    let dynamic = device.shared_bytes_per_block.saturating_sub(static_shared);
    let set = raw::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // Above 48 KiB a kernel must ask; asking for less than it may have changes nothing but the limit.
    // SAFETY: the function handle was just given; the value is within the device's limit.
    check("cuFuncSetAttribute", unsafe { raw::cuFuncSetAttribute(function, set, dynamic as c_int) })?;
    Ok(Function {
        raw: function,
        max_threads_per_block: attribute(raw::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        max_dynamic_shared_bytes: dynamic,
        n_registers: attribute(raw::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
        local_bytes: attribute(raw::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
    })
}
