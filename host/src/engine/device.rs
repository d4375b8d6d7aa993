//! From the choice of a device to one that is open, and a model on it.

use std::sync::Arc;

use super::error::EngineError;
use super::options::DeviceChoice;
use super::plan::free_memory_bytes;
use crate::cpu::CpuBackend;
use crate::cuda::{self, CudaDevice, KernelSource, Selector};
use crate::gguf::Gguf;
use crate::gpu::backend::check_config;
use crate::gpu::{BackendOptions, Device, Emulated, GpuBackend};
use crate::model::config::Config;
use crate::model::{Executor, Limits, Session};

/// Elements of the CPU's KV cache are f32.
const CPU_KV_ELEM_BYTES: u64 = 4;

/// Left for what the plan does not count: the driver's own, staging, int8 forms of activations, graphs.
pub(super) const WORKING_BYTES: u64 = 512 << 20;

/// A device ready for a model.
pub(super) enum OpenDevice {
    Cpu,
    Emulated(Arc<Emulated>),
    Cuda(Arc<CudaDevice>),
}

impl OpenDevice {
    /// Opens the chosen device, for a model of this shape with `weights_bytes` of weights.
    ///
    /// # Errors
    /// There is no such device, or a kernel is missing for the model. `Auto` takes the CPU then, unless the kernels are named.
    pub(super) fn open(
        choice: &DeviceChoice,
        kernels: &KernelSource,
        config: &Config,
        weights_bytes: u64,
    ) -> Result<OpenDevice, EngineError> {
        let failed = |why: String| EngineError::Device { device: choice.to_string(), why };
        match choice {
            DeviceChoice::Cpu => Ok(OpenDevice::Cpu),
            DeviceChoice::Emulated => {
                check_config(config).map_err(|e| failed(e.to_string()))?;
                Ok(OpenDevice::Emulated(Arc::new(Emulated::new())))
            }
            DeviceChoice::Cuda(selector) => open_cuda(selector.as_deref(), kernels, config).map_err(failed),
            // Who names kernels wants a GPU to run them, and not the CPU in its place.
            DeviceChoice::Auto if matches!(kernels, KernelSource::Folder(_)) => {
                open_cuda(None, kernels, config).map_err(failed)
            }
            DeviceChoice::Auto => {
                let opened = open_cuda(None, kernels, config).and_then(|device| match device.free_bytes() {
                    Some(free) if free <= weights_bytes => {
                        Err(format!("the weights need {weights_bytes} bytes, {free} are free"))
                    }
                    _ => Ok(device),
                });
                Ok(opened.unwrap_or_else(|why| {
                    tracing::warn!("the CPU runs the model: {why}");
                    OpenDevice::Cpu
                }))
            }
        }
    }

    /// Bytes that an allocation may still take; `None` if that is not known.
    pub(super) fn free_bytes(&self) -> Option<u64> {
        match self {
            OpenDevice::Cpu => free_memory_bytes(),
            OpenDevice::Emulated(device) => device.memory().ok().map(|memory| memory.free_bytes),
            OpenDevice::Cuda(device) => device.memory().ok().map(|memory| memory.free_bytes),
        }
    }

    /// Bytes that the weights take of the device's own memory, with what loading them needs; the CPU reads them
    /// from the file.
    pub(super) fn own_weights_bytes(&self, weights_bytes: u64) -> u64 {
        match self {
            OpenDevice::Cpu => 0,
            OpenDevice::Emulated(_) => weights_bytes,
            OpenDevice::Cuda(_) => weights_bytes.saturating_add(WORKING_BYTES),
        }
    }

    /// Bytes of a key or value.
    pub(super) fn kv_elem_bytes(&self, options: &BackendOptions) -> u64 {
        if matches!(self, OpenDevice::Cpu) { CPU_KV_ELEM_BYTES } else { options.kv.bytes() }
    }

    /// Loads a model's weights and allocates what `limits` ask for.
    ///
    /// # Errors
    /// The file is damaged, or the device is too small.
    pub(super) fn load(
        self,
        gguf: Arc<Gguf>,
        limits: Limits,
        options: BackendOptions,
        draft: bool,
    ) -> Result<Box<dyn Executor>, EngineError> {
        fn boxed<D: Device>(
            device: Arc<D>,
            gguf: &Gguf,
            limits: Limits,
            options: BackendOptions,
            draft: bool,
        ) -> Result<Box<dyn Executor>, EngineError> {
            Ok(Box::new(Session::load(GpuBackend::new(device, options), gguf, limits, draft)?))
        }
        match self {
            OpenDevice::Cpu => Ok(Box::new(Session::load(CpuBackend::new(Arc::clone(&gguf)), &gguf, limits, draft)?)),
            // Its memory is the host's, and nothing is gained from large copies.
            OpenDevice::Emulated(device) => {
                boxed(device, &gguf, limits, BackendOptions { staging_bytes: 1 << 20, ..options }, draft)
            }
            OpenDevice::Cuda(device) => boxed(device, &gguf, limits, options, draft),
        }
    }
}

/// Opens a GPU, or says why not.
fn open_cuda(selector: Option<&str>, kernels: &KernelSource, config: &Config) -> Result<OpenDevice, String> {
    let selector: Selector = selector.unwrap_or_default().parse().map_err(|e: cuda::SelectorError| e.to_string())?;
    check_config(config).map_err(|e| e.to_string())?;
    if let (KernelSource::Embedded, Some(why)) = (kernels, crate::gpu::ptx::WITHOUT_PTX) {
        return Err(format!("this program has no GPU kernels: {why}"));
    }
    let device = CudaDevice::open(&selector, kernels).map_err(|e| e.to_string())?;
    tracing::info!("device {}, kernels for {}", device.info(), device.kernels().target());
    Ok(OpenDevice::Cuda(Arc::new(device)))
}
