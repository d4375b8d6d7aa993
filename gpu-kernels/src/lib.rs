//! zinc's GPU kernels, and the data layouts that the GPU, the CPU reference and the loader share.
//!
//! The crate is `no_std`. Compiled for `nvptx64-nvidia-cuda` it becomes PTX; compiled for the host it
//! is an ordinary library whose kernels run on `cuda_std`'s emulated device.

#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]
#![allow(clippy::needless_range_loop, reason = "an index keeps arrays in registers, an iterator over them may not")]

pub mod blocks;
pub mod kernels;
pub mod layout;
pub mod params;
