//! The CPU backend: the oracle.
