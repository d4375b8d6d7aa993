//! The CUDA driver: the one module that names `cust`.
//!
//! Levels of trust, from the bottom: `symbols` and [`driver`] load the library; `raw` declares what
//! `cust` does not; [`device`], `memory`, `event`, [`module`] and `graph` own one kind of handle
//! each; `launch` puts them together as a [`crate::gpu::Device`]. Above that, code is safe but for
//! launching, whose contract is the kernel's.
//!
//! # Handles, threads, and the end
//! Every handle keeps the device's primary context alive, and binds it to the calling thread before it
//! calls the driver. Device memory, events and graphs may thus be dropped in any order, on any thread,
//! also after their device. After a kernel's fault the context is unusable, and every later call says
//! so; nothing is retried.
//!
//! # Streams
//! One device has one stream. It synchronises with the legacy default stream, as `cust` creates it;
//! nothing here uses that one.

#[expect(unsafe_code, reason = "asks the driver")]
pub mod device;
#[expect(unsafe_code, reason = "opens the driver and defines its symbols")]
pub mod driver;
#[expect(unsafe_code, reason = "reads the driver's texts")]
pub mod error;
#[expect(unsafe_code, reason = "owns a raw handle")]
mod event;
#[expect(unsafe_code, reason = "owns a raw handle")]
mod graph;
#[expect(unsafe_code, reason = "launches kernels")]
mod launch;
#[expect(unsafe_code, reason = "raw memory between threads")]
mod memory;
#[expect(unsafe_code, reason = "owns a raw handle")]
pub mod module;
pub mod ptx;
#[expect(unsafe_code, reason = "declares foreign functions")]
mod raw;
pub mod select;
mod symbols;
mod timing;

pub use device::{CudaDevice, DeviceInfo, list};
pub use driver::{CudaVersion, load};
pub use error::{Error, Result};
pub use event::CudaEvent;
pub use graph::CudaGraph;
pub use memory::{CudaMemory, CudaPinned};
pub use module::KernelSource;
pub use select::{Selector, SelectorError};
