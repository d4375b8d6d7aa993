//! The networks.

pub mod config;
