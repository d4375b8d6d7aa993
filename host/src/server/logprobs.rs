//! Log probabilities of a reply's tokens, in the two forms that the API has.

use serde_json::{Map, Value, json};

use crate::engine::SampledToken;
use crate::tokenizer::Tokenizer;

/// JSON has no −∞. This is what OpenAI writes.
const LOWEST: f32 = -9999.0;

fn number(logprob: f32) -> Value {
    // NaN was not asked for and must not become null halfway.
    (if logprob.is_finite() { logprob } else { LOWEST }).into()
}

fn entry(tokenizer: &Tokenizer, id: u32, logprob: f32) -> Map<String, Value> {
    let bytes = tokenizer.token_bytes_special(id);
    let mut entry = Map::new();
    entry.insert("token".to_owned(), String::from_utf8_lossy(bytes).into());
    entry.insert("logprob".to_owned(), number(logprob));
    entry.insert("bytes".to_owned(), bytes.into());
    entry
}

/// The `content` of a chat's `logprobs`. Half a character shows as U+FFFD in `token`, whole in `bytes`.
pub(super) fn chat(tokenizer: &Tokenizer, tokens: &[SampledToken]) -> Vec<Value> {
    let with_top = |token: &SampledToken| {
        let mut one = entry(tokenizer, token.id, token.logprob);
        let top = token.top.iter().map(|&(id, logprob)| Value::Object(entry(tokenizer, id, logprob)));
        one.insert("top_logprobs".to_owned(), top.collect());
        Value::Object(one)
    };
    tokens.iter().map(with_top).collect()
}

/// The `logprobs` of a completion. `offset`: characters of the reply before these tokens.
pub(super) fn completion(tokenizer: &Tokenizer, tokens: &[SampledToken], offset: usize) -> Value {
    let text = |id| String::from_utf8_lossy(tokenizer.token_bytes_special(id)).into_owned();
    let top = |token: &SampledToken| -> Value {
        token.top.iter().map(|&(id, logprob)| (text(id), number(logprob))).collect::<Map<_, _>>().into()
    };
    let mut at = offset;
    let mut offsets = Vec::with_capacity(tokens.len());
    for token in tokens {
        offsets.push(at);
        at += text(token.id).chars().count();
    }
    json!({
        "tokens": tokens.iter().map(|t| text(t.id)).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|t| number(t.logprob)).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}
