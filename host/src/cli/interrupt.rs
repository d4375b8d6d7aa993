//! Ctrl-C: once to stop cleanly, twice to stop at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::error::CliError;

/// Whether the user asked to stop.
#[derive(Clone, Debug, Default)]
pub(super) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Starts to listen. At most one per process; a second one never fires.
    pub(super) fn listen() -> Self {
        let flag = Self::default();
        let pressed = flag.0.clone();
        let handler = move || {
            if pressed.swap(true, Ordering::Relaxed) {
                std::process::exit(130);
            }
        };
        if let Err(e) = ctrlc::set_handler(handler) {
            tracing::warn!("Ctrl-C will end the program at once: {e}");
        }
        flag
    }

    /// Whether Ctrl-C was pressed since the last [`Interrupt::reset`].
    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Forgets it.
    pub(super) fn reset(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// # Errors
    /// Ctrl-C was pressed.
    pub(super) fn check(&self) -> Result<(), CliError> {
        if self.is_set() { Err(CliError::Interrupted) } else { Ok(()) }
    }
}
