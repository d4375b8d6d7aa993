//! The `host` command line.

pub mod check;
