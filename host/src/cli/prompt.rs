//! From a conversation to token ids.

use super::error::CliError;
use super::load::need_tokenizer;
use crate::chat::{Chat, Message};
use crate::engine::Engine;

/// The prompt for the assistant's next message.
pub(super) fn chat_prompt(engine: &Engine, messages: &[Message]) -> Result<Vec<u32>, CliError> {
    let tokenizer = need_tokenizer(engine)?;
    let missing = || CliError::Usage("the model has no chat template: give one with --chat-template FILE".to_owned());
    let template = engine.template().ok_or_else(missing)?;
    let prompt = template.render(&Chat { messages, add_generation_prompt: true, ..Chat::default() })?;
    Ok(tokenizer.encode_segments(&prompt.segments()))
}
