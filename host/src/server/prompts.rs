//! From the text of a request to token ids.

use serde_json::Value;

use super::app::Model;
use super::error::ApiError;
use super::fields::{Fields, sketch};
use super::markup::Markup;
use super::params::{MAX_CHOICES, token_ids};
use crate::chat::{Chat, Message};
use crate::tokenizer::Encode;

/// A rendered conversation.
pub(super) struct ChatPrompt {
    pub(super) ids: Vec<u32>,
    /// Whether the prompt ends inside a thought that the reply has to finish.
    pub(super) opens_thought: bool,
}

/// Renders and tokenises `messages`, and the tools on offer.
pub(super) fn chat(model: &Model, fields: &Fields<'_>, tools: &[Value]) -> Result<ChatPrompt, ApiError> {
    let messages = Message::parse_all(fields.get("messages").unwrap_or(&Value::Null))?;
    let template = model.template.as_ref().ok_or_else(|| {
        ApiError::unsupported("messages", "chatting with a model that has no chat template (see --chat-template)")
    })?;
    let mut vars = fields.map("chat_template_kwargs")?.cloned().unwrap_or_default();
    if let Some(effort) = fields.text("reasoning_effort")? {
        vars.insert("reasoning_effort".to_owned(), effort.into());
    }
    let chat = Chat { messages: &messages, tools, vars: Some(&vars), add_generation_prompt: true };
    let prompt = template.render(&chat)?;
    let opens_thought = matches!(model.markup, Markup::Tags { thinks: true, .. })
        && prompt.segments().last().is_some_and(|s| s.special && s.text.trim_end().ends_with("<think>"));
    Ok(ChatPrompt { ids: model.tokenizer.encode_segments(&prompt.segments()), opens_thought })
}

/// The prompts of a completion or embedding request: a string, a list of ids, or a list of either.
pub(super) fn plain(model: &Model, fields: &Fields<'_>, param: &'static str) -> Result<Vec<Vec<u32>>, ApiError> {
    let expected = "expected a string, a list of token ids, or a list of either";
    let encode = |text: &str| model.tokenizer.encode(text, Encode { bos: true, special: false });
    let prompts = match fields.get(param) {
        None => return Err(fields.wrong(param, expected)),
        Some(Value::String(text)) => vec![encode(text)],
        Some(Value::Array(list)) => match list.first() {
            Some(Value::String(_) | Value::Array(_)) if list.len() <= MAX_CHOICES => list
                .iter()
                .map(|prompt| match prompt {
                    Value::String(text) => Ok(encode(text)),
                    Value::Array(ids) => token_ids(param, ids, model.n_vocab),
                    other => Err(fields.wrong(param, format!("{expected}, got {}", sketch(other)))),
                })
                .collect::<Result<_, _>>()?,
            Some(Value::String(_) | Value::Array(_)) => {
                return Err(fields.wrong(param, format!("{} prompts; at most {MAX_CHOICES} are allowed", list.len())));
            }
            _ => vec![token_ids(param, list, model.n_vocab)?],
        },
        Some(other) => return Err(fields.wrong(param, format!("{expected}, got {}", sketch(other)))),
    };
    if prompts.iter().any(Vec::is_empty) {
        return Err(fields.wrong(param, "the prompt has no tokens"));
    }
    Ok(prompts)
}
