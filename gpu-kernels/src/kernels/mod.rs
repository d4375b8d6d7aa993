//! The kernels. Each file is one operation: its equation, its shapes, its entry points.

pub mod embedding;
pub mod format;
pub mod matvec;
pub mod quantize_q8;
pub mod read_sweep;
pub mod repack;
