//! The GPU kernels, one file an operation.
//!
//! A kernel trusts its launcher: what it needs (shapes, extents, alignment) is in its `# Safety` section,
//! and the launcher in the host crate checks it. Geometry that both must agree on is a constant here.

pub mod rms_norm;
