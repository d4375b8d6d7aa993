//! The `host` command line.

pub mod inspect;
