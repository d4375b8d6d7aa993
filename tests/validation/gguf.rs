//! GGUF files: what opens, what is refused, and how.
//!
//! "Refused" always means an error value whose one line names the key or tensor; never a panic, a hang,
//! or an allocation that the file only claims to need.

pub(crate) mod craft;
mod fuzz;
mod hostile;
mod inspect;
mod limits;
mod split;
mod valid;
