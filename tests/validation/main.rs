//! Cross-device numeric validation: one binary, so that `cargo test` links once.

#![deny(unsafe_code)]

mod cli;
mod config;
mod dequant;
mod driver;
mod emulator;
mod engine;
mod gguf;
mod kernels;
mod logits;
mod ops;
mod ptx;
mod template;
mod tidy;
mod tokenizer;
