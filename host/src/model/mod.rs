//! The networks.

pub mod config;
pub mod session;
