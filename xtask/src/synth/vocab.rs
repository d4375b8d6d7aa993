//! A real tokenizer in a synthetic model.

use std::collections::HashSet;

use anyhow::Result;
use host::gguf::{Gguf, Value, Writer};

/// `tokenizer.ggml.token_type` of a token that no text makes.
const UNUSED: i32 = 5;

/// Copies the tokenizer of `from`, cut or padded to `n_vocab` tokens. Special ids beyond the cut, and
/// merges that make a token beyond it, are left out.
pub(super) fn copy(writer: &mut Writer, from: &Gguf, n_vocab: usize) -> Result<()> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    for name in ["model", "pre", "add_bos_token", "add_eos_token", "add_space_prefix"] {
        if let Some(value) = from.get(&key(name)) {
            writer.put(&key(name), value);
        }
    }
    for name in ["bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id"] {
        if let Some(id) = from.opt_u32(&key(name))?.filter(|&id| (id as usize) < n_vocab) {
            writer.put(&key(name), Value::U32(id));
        }
    }

    let given = from.strings(&key("tokens"))?;
    let mut tokens: Vec<String> = given.iter().take(n_vocab).map(|&s| s.to_owned()).collect();
    tokens.extend((tokens.len()..n_vocab).map(|id| format!("[PAD{id}]")));
    writer.put_strings(&key("tokens"), &tokens);
    if from.get(&key("token_type")).is_some() {
        let mut types = from.i32s(&key("token_type"))?;
        types.resize(n_vocab, UNUSED);
        writer.put_i32s(&key("token_type"), &types);
    }
    if from.get(&key("scores")).is_some() {
        let mut scores = from.f32s(&key("scores"))?;
        scores.resize(n_vocab, f32::MIN);
        writer.put_f32s(&key("scores"), &scores);
    }
    if from.get(&key("merges")).is_some() {
        let known: HashSet<&str> = tokens.iter().map(String::as_str).collect();
        let mut merges = from.strings(&key("merges"))?;
        merges.retain(|merge| {
            merge.split_once(' ').is_some_and(|(left, right)| {
                let made = format!("{left}{right}");
                [left, right, &made].into_iter().all(|token| known.contains(token))
            })
        });
        writer.put_strings(&key("merges"), &merges);
    }
    if let Some(template) = from.get("tokenizer.chat_template") {
        writer.put("tokenizer.chat_template", template);
    }
    Ok(())
}
