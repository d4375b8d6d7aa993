//! Compiles a kernel crate to PTX.
//!
//! ```no_run
//! use cuda_builder::{Arch, CudaBuilder};
//! # fn main() -> Result<(), cuda_builder::Error> {
//! CudaBuilder::new("../gpu-kernels").arch(Arch::Sm90a).copy_to("kernels.ptx").build()?;
//! # Ok(())
//! # }
//! ```
//!
//! It stands in for rust-cuda's crate of the same name, with the same calls wherever both have a
//! thing; instead of a codegen backend on an old LLVM it uses rustc's own `nvptx64-nvidia-cuda`.
//!
//! The steps: cargo compiles the crate and `core` to unoptimised bitcode, once (`compile`);
//! `llvm-link` joins it; then `opt` and `llc` make each target's PTX (`link`), which gets its launch
//! bounds and version (`ptx`). Code asks for its target with `__nvvm_reflect("__CUDA_ARCH")`, which
//! `opt` turns into a constant.

#![forbid(unsafe_code)]

mod arch;
mod builder;
mod compile;
mod error;
mod link;
mod metadata;
mod process;
pub mod ptx;
mod ptxas;
mod toolchain;

pub use arch::Arch;
pub use builder::{Built, BuiltPtx, CudaBuilder};
pub use error::Error;
pub use ptxas::{PTXAS_VAR, Ptxas, Resources};
pub use toolchain::{LLVM_BIN_VAR, RUSTC_VAR, Toolchain};
