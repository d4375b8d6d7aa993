//! The `host` command line.

pub mod check;
pub mod inspect;
