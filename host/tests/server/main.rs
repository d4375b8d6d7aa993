//! `host serve` as a client meets it: the real program, on the CPU, with the small model.

mod access;
mod api;
mod client;
mod clients;
mod errors;
mod fuzz;
mod limits;
mod load;
mod structured;
mod text;
