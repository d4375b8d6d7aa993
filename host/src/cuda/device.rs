//! The devices that the driver shows, and opening one.

use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use cust::context::Context;
use cust::device::{Device as CustDevice, DeviceAttribute};
use cust::stream::{Stream, StreamFlags};

use super::driver::{self, Driver};
use super::error::{Error, Result, check, check_cust};
use super::module::{KernelSource, Kernels};
use super::ptx::{Reach, Target};
use super::raw;
use super::select::Selector;
use super::timing::Timers;
use crate::gpu::device::{DeviceId, MemoryInfo, Properties};

/// A device, as seen before it is opened.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Its position among the visible devices.
    pub index: u32,
    /// `GPU-` and 32 hexadecimal digits in five groups.
    pub uuid: String,
    /// Name and limits.
    pub properties: Properties,
    /// Its memory now.
    pub memory: MemoryInfo,
}

impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Properties { name, capability: (major, minor), n_sm, .. } = &self.properties;
        let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
        let (free, total) = (gib(self.memory.free_bytes), gib(self.memory.total_bytes));
        let Self { index, uuid, .. } = self;
        write!(f, "{index}: {name} (sm_{major}{minor}, {n_sm} SMs, {free:.1} of {total:.1} GiB free, {uuid})")
    }
}

/// The visible devices.
///
/// Free memory can be asked only of a device in use, so each is briefly opened; one that refuses (it is
/// in exclusive use, say) counts as full.
///
/// # Errors
/// Where there is no driver or no device, or a property cannot be read.
pub fn list() -> Result<Vec<DeviceInfo>> {
    (0..count()?).map(|index| Ok(probe(index)?.info)).collect()
}

/// How many devices there are, at least one.
fn count() -> Result<u32> {
    driver::load()?;
    match check_cust("cuDeviceGetCount", CustDevice::num_devices())? {
        0 => Err(Error::NoDevice),
        n => Ok(n),
    }
}

/// A device and the context that its free memory was asked in. Making a context takes a fraction of a
/// second, so the one of the device that is chosen is kept.
struct Probe {
    info: DeviceInfo,
    context: Result<SharedContext>,
}

fn probe(index: u32) -> Result<Probe> {
    let device = check_cust("cuDeviceGet", CustDevice::get_device(index))?;
    let total_bytes = check_cust("cuDeviceTotalMem", device.total_memory())? as u64;
    let context = SharedContext::retain(device);
    let memory = context.as_ref().ok().and_then(|context| context.memory().ok());
    let memory = memory.unwrap_or(MemoryInfo { free_bytes: 0, total_bytes });
    let info = DeviceInfo { index, uuid: uuid(device)?, properties: properties(device)?, memory };
    Ok(Probe { info, context })
}

fn properties(device: CustDevice) -> Result<Properties> {
    let attribute = |attribute| {
        let value = check_cust("cuDeviceGetAttribute", device.get_attribute(attribute))?;
        Ok::<u32, Error>(u32::try_from(value).unwrap_or(0))
    };
    Ok(Properties {
        name: check_cust("cuDeviceGetName", device.name())?,
        capability: (
            attribute(DeviceAttribute::ComputeCapabilityMajor)?,
            attribute(DeviceAttribute::ComputeCapabilityMinor)?,
        ),
        n_sm: attribute(DeviceAttribute::MultiprocessorCount)?,
        shared_bytes_per_block: shared_bytes_optin(device)?,
        max_threads_per_block: attribute(DeviceAttribute::MaxThreadsPerBlock)?,
        l2_bytes: attribute(DeviceAttribute::L2CacheSize)?,
        // Known when kernels are loaded.
        wgmma: false,
    })
}

fn shared_bytes_optin(device: CustDevice) -> Result<u32> {
    let attribute = raw::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    let mut value: c_int = 0;
    // SAFETY: writes one int; the device handle is the driver's own.
    check("cuDeviceGetAttribute", unsafe { raw::cuDeviceGetAttribute(&mut value, attribute, device.as_raw()) })?;
    Ok(u32::try_from(value).unwrap_or(0))
}

fn uuid(device: CustDevice) -> Result<String> {
    let mut bytes = [0u8; 16];
    // SAFETY: writes 16 bytes; the device handle is the driver's own.
    check("cuDeviceGetUuid", unsafe { raw::cuDeviceGetUuid_v2(&mut bytes, device.as_raw()) })?;
    Ok(format_uuid(bytes))
}

/// `GPU-01234567-89ab-cdef-0123-456789abcdef`, as `nvidia-smi -L` prints it.
fn format_uuid(bytes: [u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (i, byte) in bytes.iter().enumerate() {
        if matches!(i, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// The device's primary context. A driver call acts on the calling thread's current context, so each
/// use binds it first: the engine may move between threads, and drops may happen anywhere.
pub(super) struct SharedContext {
    context: Context,
}

impl SharedContext {
    fn retain(device: CustDevice) -> Result<Self> {
        let context = check_cust("cuDevicePrimaryCtxRetain", Context::new(device))?;
        Ok(SharedContext { context })
    }

    /// Makes this the calling thread's context. It costs tens of nanoseconds.
    pub(super) fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained as long as `self` lives.
        check("cuCtxSetCurrent", unsafe { raw::cuCtxSetCurrent(self.context.as_raw()) })
    }

    pub(super) fn memory(&self) -> Result<MemoryInfo> {
        self.bind()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: writes two sizes.
        check("cuMemGetInfo", unsafe { raw::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(MemoryInfo { free_bytes: free as u64, total_bytes: total as u64 })
    }
}

/// An NVIDIA GPU with its kernels loaded.
///
/// Fields are dropped in order: what needs the context comes before it.
pub struct CudaDevice {
    pub(super) timers: Timers,
    pub(super) kernels: Kernels,
    pub(super) stream: Arc<Stream>,
    pub(super) context: Arc<SharedContext>,
    pub(super) id: DeviceId,
    pub(super) info: DeviceInfo,
    pub(super) driver: &'static Driver,
    /// `ZINC_SYNC=1`: wait after each launch, so that a fault is reported with its kernel.
    pub(super) sync_each_launch: bool,
    /// Whether launches can overlap the end of the one before (sm_90 and later).
    pub(super) overlaps_launches: bool,
    pub(super) capturing: AtomicBool,
}

impl CudaDevice {
    /// Opens the selected device and loads every kernel on it.
    ///
    /// # Errors
    /// Where there is no driver or no such device, or where the kernels do not load: a missing target,
    /// PTX newer than the driver, or one bad entry, each named.
    pub fn open(selector: &Selector, source: &KernelSource) -> Result<CudaDevice> {
        let n = count()?;
        // A device that is named by its index needs no look at the others.
        let indices = match selector {
            Selector::Index(index) if *index < n => *index..*index + 1,
            _ => 0..n,
        };
        let mut probes = indices.map(probe).collect::<Result<Vec<_>>>()?;
        let infos: Vec<DeviceInfo> = probes.iter().map(|probe| probe.info.clone()).collect();
        let chosen = selector.choose(&infos)?.index;
        probes.retain(|probe| probe.info.index == chosen);
        let Probe { info, context } = probes.pop().expect("the chosen device is one of the probed");
        CudaDevice::with_context(info, context?, source)
    }

    /// Opens a device of [`list`].
    ///
    /// # Errors
    /// As for [`CudaDevice::open`].
    pub fn open_listed(info: &DeviceInfo, source: &KernelSource) -> Result<CudaDevice> {
        driver::load()?;
        let device = check_cust("cuDeviceGet", CustDevice::get_device(info.index))?;
        CudaDevice::with_context(info.clone(), SharedContext::retain(device)?, source)
    }

    fn with_context(mut info: DeviceInfo, context: SharedContext, source: &KernelSource) -> Result<CudaDevice> {
        let driver = driver::load()?;
        let context = Arc::new(context);
        context.bind()?;
        let kernels = Kernels::load(source, driver.version(), &info.properties)?;
        let target = kernels.target();
        info.properties.wgmma = target == Target { capability: (9, 0), reach: Reach::Exact };
        // Apart from the legacy default stream: work there, by anyone in the process, would break a capture here.
        let stream = Arc::new(check_cust("cuStreamCreate", Stream::new(StreamFlags::NON_BLOCKING, None))?);
        Ok(CudaDevice {
            timers: Timers::default(),
            kernels,
            stream,
            context,
            id: DeviceId::next(),
            // Kernels for older targets do not wait for the grid ahead.
            overlaps_launches: target.capability >= (9, 0) && driver.has("cuLaunchKernelEx"),
            info,
            driver,
            sync_each_launch: std::env::var_os("ZINC_SYNC").is_some_and(|value| value == "1"),
            capturing: AtomicBool::new(false),
        })
    }

    /// What the driver says of the device.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// The loaded kernels.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // The fields' own drops call the driver. Without a context they fail, and nothing is freed twice.
        let _ = self.context.bind();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_like_nvidia_smi() {
        let bytes = std::array::from_fn(|i| (i as u8) * 17);
        assert_eq!(format_uuid(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
