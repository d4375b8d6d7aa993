//! zinc's host side: read a GGUF model, run it on a CPU or an NVIDIA GPU, serve it.
//!
//! The layers have one direction:
//!
//! `gguf` → `model` (what the network computes, over a [`backend::Backend`]) → `cpu`, `gpu` (how) →
//! `engine` (requests, sampling, text) → `cli`, `server`. `tokenizer` and `chat` stand beside
//! `model`, and `models` finds files by name; `cuda` is the only module that knows the CUDA driver.

#![deny(unsafe_code)]

pub mod backend;
pub mod chat;
pub mod cli;
pub mod cpu;
pub mod cuda;
pub mod engine;
pub mod gguf;
pub mod gpu;
pub mod model;
pub mod models;
pub mod server;
pub mod tokenizer;
