//! Which layers have full attention, which a sliding window, and which a delta net.

use super::keys::Keys;
use super::{Arch, ConfigError, LayerKind, MAX_LAYERS, MAX_N_CTX};
use crate::gguf::Value;

/// The kind of each layer, the sliding window, and the full-attention interval.
pub(super) fn read(keys: &Keys<'_>, n_layer: usize) -> Result<(Vec<LayerKind>, usize, usize), ConfigError> {
    match keys.arch {
        Arch::GptOss => {
            let window = keys.size("attention.sliding_window", 1..=MAX_N_CTX as u32)?;
            Ok((sliding_layers(keys, n_layer)?, window, 1))
        }
        Arch::Qwen35Moe => {
            let interval = keys.size_or("full_attention_interval", 1..=MAX_LAYERS, 4)?;
            let full = |il: usize| (il + 1).is_multiple_of(interval);
            let kind = |il| if full(il) { LayerKind::Full } else { LayerKind::DeltaNet };
            Ok(((0..n_layer).map(kind).collect(), 0, interval))
        }
        _ => Ok((vec![LayerKind::Full; n_layer], 0, 1)),
    }
}

/// `{arch}.attention.sliding_window_pattern` is a period `p`, of which the last layer is full and the
/// others slide (gpt-oss, and the default: 2, so that even layers slide), or a boolean for each layer.
fn sliding_layers(keys: &Keys<'_>, n_layer: usize) -> Result<Vec<LayerKind>, ConfigError> {
    const KEY: &str = "attention.sliding_window_pattern";
    let kind = |slides| if slides { LayerKind::Sliding } else { LayerKind::Full };
    let Some(Value::Array(array)) = keys.gguf.get(&keys.full(KEY)) else {
        let period = keys.size_or(KEY, 1..=MAX_LAYERS, 2)?;
        return Ok((0..n_layer).map(|il| kind(il % period + 1 < period)).collect());
    };
    if array.len() < n_layer {
        let problem = format!("{} values for {n_layer} layers", array.len());
        return Err(keys.problem(KEY, problem));
    }
    let slides = array.iter().take(n_layer).map(|value| match value {
        Value::Bool(slides) => Ok(kind(slides)),
        other => Err(keys.problem(KEY, format!("an array element is {}", other.describe()))),
    });
    slides.collect()
}
