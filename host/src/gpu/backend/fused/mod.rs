//! Whole sub-layers in few launches, for steps of few rows, where a launch costs as much as its work.
//!
//! Each falls back to the plain operations in [`layers`](crate::model::layers) for shapes and types without a
//! fused kernel, and with [`BackendOptions::fuse`](super::BackendOptions::fuse) off; those are its reference.

mod attention;
mod delta_net;
mod dense_ffn;
mod moe;
