//! The networks: hyperparameters, weights, and the layers over a [`Backend`](crate::backend::Backend).

pub mod config;
pub mod distance;
mod draft;
pub mod executor;
pub mod golden;
pub mod layers;
pub mod rope;
pub mod session;
pub mod weights;

pub use config::Config;
pub use executor::{Executor, Limits};
pub use session::Session;
pub use weights::{LoadError, Model};
