//! The GPU backend, over any device that launches kernels.

pub mod ptx;
