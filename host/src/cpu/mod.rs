//! The CPU backend: the oracle.

pub mod dequant;
