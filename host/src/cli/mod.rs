//! The `host` command line.
