//! The GPU backend, over any device that launches kernels.

pub mod backend;
pub mod command;
pub mod device;
pub mod emulated;
pub mod kernel_test;
pub mod memory;
pub mod ops;
pub mod profile;
pub mod ptx;
pub mod self_test;
pub mod staging;

pub use backend::{Activations, BackendOptions, GpuBackend, KvType};
pub use command::{Ring, Ticket};
pub use device::{Device, DeviceError, DeviceId, MemoryInfo, Properties, Result};
pub use emulated::Emulated;
pub use memory::{Buffer, Slice};
pub use staging::{Readback, Staging};
