//! The GPU kernels, one file an operation.
//!
//! A kernel trusts its launcher: what it needs (shapes, extents, alignment) is in its `# Safety` section,
//! and the launcher in the host crate checks it. Geometry that both must agree on is a constant here.

mod rms_norm;

pub use rms_norm::{RMS_NORM_SHARED_BYTES, RMS_NORM_THREADS, rms_norm};
