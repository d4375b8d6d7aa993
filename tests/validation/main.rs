//! Cross-device numeric validation: one binary, so that `cargo test` links once.

// Denied, not forbidden: a test of launching itself launches, and says so with an `expect`.
#![deny(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test, and names its line")]

mod checkout;
mod config;
mod dequant;
mod driver;
mod emulator;
mod engine;
mod fake_driver;
mod gguf;
mod gpu_model;
mod kernels;
mod logits;
mod ops;
mod ptx;
mod template;
mod tidy;
mod tokenizer;
