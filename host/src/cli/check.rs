//! `host check`: is this machine ready, and if not, what is missing?

use std::io::{self, Write};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

use super::inspect;
use super::model_path::by_name;
use crate::cuda::{self, CudaDevice, DeviceInfo, KernelSource, Selector, SelectorError};
use crate::engine::{EngineOptions, Needs};
use crate::gguf::Gguf;
use crate::gpu::self_test::{self, Scale};
use crate::gpu::{Device, Emulated, MemoryInfo, kernel_test};

/// What to check.
#[derive(clap::Args, Debug, Default)]
pub struct CheckArgs {
    /// Also check that this model fits: weights, keys and values, state, activations
    #[arg(short, long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Tokens of context that have to fit; without it, the model's own up to a cap
    #[arg(long, value_name = "N", requires = "model", value_parser = clap::value_parser!(u32).range(1..))]
    pub ctx: Option<u32>,
    /// The GPU: auto, or cuda:SELECTOR with an index, a UUID, or a compute capability (sm_90)
    #[arg(long, default_value_t, value_name = "DEVICE", env = "ZINC_DEVICE")]
    pub device: CheckedDevice,
    /// Load the kernels from this folder's *.ptx files instead of the built-in ones
    #[arg(long, value_name = "DIR")]
    pub ptx: Option<PathBuf>,
}

/// The device that is checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckedDevice {
    /// A GPU.
    Cuda(Selector),
    /// The emulated one: checks the program, and not the machine.
    Emulated,
}

impl Default for CheckedDevice {
    fn default() -> Self {
        CheckedDevice::Cuda(Selector::default())
    }
}

impl FromStr for CheckedDevice {
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Self, SelectorError> {
        match text {
            "auto" | "cuda" | "cuda:" => Ok(CheckedDevice::default()),
            "emulated" => Ok(CheckedDevice::Emulated),
            _ => text.strip_prefix("cuda:").unwrap_or(text).parse().map(CheckedDevice::Cuda),
        }
    }
}

impl std::fmt::Display for CheckedDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CheckedDevice::Emulated => f.write_str("emulated"),
            CheckedDevice::Cuda(Selector::MostFree) => f.write_str("auto"),
            CheckedDevice::Cuda(Selector::Index(index)) => write!(f, "cuda:{index}"),
            CheckedDevice::Cuda(Selector::Uuid(uuid)) => write!(f, "cuda:{uuid}"),
            CheckedDevice::Cuda(Selector::Capability(major, minor)) => write!(f, "cuda:{major}.{minor}"),
        }
    }
}

/// Writes one line for each finding, then `READY` or what is missing. Returns whether it is ready.
///
/// # Errors
/// Where `out` cannot be written.
pub fn run(args: &CheckArgs, out: &mut dyn Write) -> io::Result<bool> {
    let missing = match &args.device {
        CheckedDevice::Cuda(selector) => check_cuda(args, selector, out)?,
        CheckedDevice::Emulated => {
            let device = Arc::new(Emulated::new());
            match check_model(args, device.memory(), out)? {
                None => check_device(&device, Scale::EMULATED, kernel_test::ROWS_EMULATED, out)?,
                missing => missing,
            }
        }
    };
    match &missing {
        None => writeln!(out, "READY")?,
        Some(missing) => writeln!(out, "NOT READY: {missing}")?,
    }
    Ok(missing.is_none())
}

fn line(out: &mut dyn Write, what: &str, finding: &str) -> io::Result<()> {
    writeln!(out, "{what:<12} {finding}")
}

/// `None` where nothing is missing.
fn check_cuda(args: &CheckArgs, selector: &Selector, out: &mut dyn Write) -> io::Result<Option<String>> {
    let source = KernelSource::from(args.ptx.clone());
    // The kernels first: they are in the program, whatever the machine is.
    let images = match source.images() {
        Ok(images) => images,
        Err(error) => return Ok(Some(error.to_string())),
    };
    for image in &images {
        let header = &image.header;
        let finding = format!("{}: PTX {}, {} kernels", header.target, header.version, header.entries.len());
        line(out, "kernels", &finding)?;
    }
    if images.is_empty() {
        let why = crate::gpu::ptx::WITHOUT_PTX.unwrap_or("the folder has no *.ptx file");
        return Ok(Some(format!("there are no GPU kernels: {why}")));
    }
    match cuda::load() {
        Ok(driver) => line(out, "driver", &format!("CUDA {} ({})", driver.version(), driver.library()))?,
        Err(error) => return Ok(Some(error.to_string())),
    }
    let devices = match cuda::list() {
        Ok(devices) => devices,
        Err(error) => return Ok(Some(error.to_string())),
    };
    for device in &devices {
        line(out, "device", &device.to_string())?;
    }
    match selector.choose(&devices) {
        Ok(info) => check_gpu(args, info, &source, out),
        Err(error) => Ok(Some(error.to_string())),
    }
}

fn check_gpu(
    args: &CheckArgs,
    info: &DeviceInfo,
    source: &KernelSource,
    out: &mut dyn Write,
) -> io::Result<Option<String>> {
    let start = Instant::now();
    let device = match CudaDevice::open_listed(info, source) {
        Ok(device) => Arc::new(device),
        Err(error) => return Ok(Some(format!("device {}: {error}", info.index))),
    };
    let kernels = device.kernels();
    let names = kernels.names();
    let (origin, seconds) = (kernels.origin(), start.elapsed().as_secs_f64());
    line(
        out,
        "chosen",
        &format!("device {}: {} kernels of {origin} loaded in {seconds:.2} s", info.index, names.len()),
    )?;
    for name in names {
        // Local memory in a kernel that should not have any is a slow kernel, not a wrong one.
        if let Some(function) = kernels.get(name).filter(|function| function.local_bytes > 0) {
            let finding =
                format!("{name}: {} registers, {} bytes of local memory", function.n_registers, function.local_bytes);
            line(out, "note", &finding)?;
        }
    }
    if let Some(missing) = check_model(args, device.memory(), out)? {
        return Ok(Some(missing));
    }
    // A card that others use may have little left, which is no fault.
    let share = usize::try_from(info.memory.free_bytes / 8).unwrap_or(usize::MAX);
    let scale = Scale { bytes: Scale::GPU.bytes.min(share), ..Scale::GPU };
    check_device(&device, scale, kernel_test::ROWS_GPU, out)
}

fn check_model(
    args: &CheckArgs,
    memory: crate::gpu::Result<MemoryInfo>,
    out: &mut dyn Write,
) -> io::Result<Option<String>> {
    let Some(model) = &args.model else { return Ok(None) };
    let path = match by_name(model) {
        Ok(path) => path,
        Err(error) => return Ok(Some(error.to_string())),
    };
    let gguf = match Gguf::open(&path) {
        Ok(gguf) => gguf,
        Err(error) => return Ok(Some(error.to_string())),
    };
    let options = EngineOptions { n_ctx: args.ctx, ..EngineOptions::default() };
    let needs = match Needs::of(&gguf, &options) {
        Ok(needs) => needs,
        Err(error) => return Ok(Some(format!("{}: {error}", path.display()))),
    };
    let free_bytes = match memory {
        Ok(memory) => memory.free_bytes,
        Err(error) => return Ok(Some(error.to_string())),
    };
    let size = |bytes: u64| inspect::size(usize::try_from(bytes).unwrap_or(usize::MAX));
    let total_bytes = needs.total_bytes();
    line(out, "model", &path.display().to_string())?;
    for (what, bytes) in [
        ("weights", needs.weights_bytes),
        ("KV cache", needs.plan.kv_bytes),
        ("state", needs.plan.state_bytes),
        ("activations", needs.plan.batch_bytes),
        ("reserve", needs.reserve_bytes),
    ] {
        line(out, "", &format!("{what:<12} {:>12}", size(bytes)))?;
    }
    let (needed, free, n_ctx) = (size(total_bytes), size(free_bytes), needs.n_ctx);
    line(out, "", &format!("{needed} with a context of {n_ctx} tokens, of {free} free"))?;
    let short = format!("a context of {n_ctx} tokens needs {needed}, {free} are free; --ctx makes it shorter");
    Ok((total_bytes > free_bytes).then_some(short))
}

fn check_device<D: Device>(
    device: &Arc<D>,
    scale: Scale,
    rows: &[u32],
    out: &mut dyn Write,
) -> io::Result<Option<String>> {
    let mut written = Ok(());
    let mut report = |step: &str, finding: &str| {
        if written.is_ok() {
            written = line(out, step, finding);
        }
    };
    let result =
        self_test::run(&**device, scale, &mut report).and_then(|()| kernel_test::run(device, rows, &mut report));
    written?;
    Ok(result.err().map(|error| format!("self-test, {error}")))
}
