//! From a conversation to token ids.

use super::error::CliError;
use crate::engine::Engine;

pub(super) fn chat_prompt(_engine: &Engine, _system: Option<&str>, _user: &str) -> Result<Vec<u32>, CliError> {
    Err(CliError::Usage("not merged yet".to_owned()))
}
