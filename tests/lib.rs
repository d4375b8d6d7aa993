//! Runs the documentation's code; the tests proper are in `validation/`.

#[cfg(doctest)]
#[doc = include_str!("../docs/writing-kernels.md")]
pub struct WritingKernels;
