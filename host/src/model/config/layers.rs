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
            Ok((delta_net_layers(keys, n_layer, interval)?, 0, interval))
        }
        _ => Ok((vec![LayerKind::Full; n_layer], 0, 1)),
    }
}

/// The last layer of each interval has full attention, unless `{arch}.attention.recurrent_layers` says for
/// each layer whether it is a delta net.
fn delta_net_layers(keys: &Keys<'_>, n_layer: usize, interval: usize) -> Result<Vec<LayerKind>, ConfigError> {
    let recurrent = match flags(keys, "attention.recurrent_layers", n_layer)? {
        Some(recurrent) => recurrent,
        None => (0..n_layer).map(|il| !(il + 1).is_multiple_of(interval)).collect(),
    };
    let kind = |recurrent| if recurrent { LayerKind::DeltaNet } else { LayerKind::Full };
    Ok(recurrent.into_iter().map(kind).collect())
}

/// `{arch}.attention.sliding_window_pattern` is a period, of which the last layer is full and the others
/// slide (gpt-oss, and the default: 2, so that even layers slide), or says for each layer whether it
/// slides.
fn sliding_layers(keys: &Keys<'_>, n_layer: usize) -> Result<Vec<LayerKind>, ConfigError> {
    const KEY: &str = "attention.sliding_window_pattern";
    let slides = match flags(keys, KEY, n_layer)? {
        Some(slides) => slides,
        None => {
            let period = keys.size_or(KEY, 1..=MAX_LAYERS, 2)?;
            (0..n_layer).map(|il| il % period + 1 < period).collect()
        }
    };
    let kind = |slides| if slides { LayerKind::Sliding } else { LayerKind::Full };
    Ok(slides.into_iter().map(kind).collect())
}

/// An array of booleans with one for each layer; blocks after the layers may have one too. `None` if the
/// key is missing or holds no array.
fn flags(keys: &Keys<'_>, key: &str, n_layer: usize) -> Result<Option<Vec<bool>>, ConfigError> {
    let Some(Value::Array(array)) = keys.gguf.get(&keys.full(key)) else {
        return Ok(None);
    };
    if array.len() < n_layer {
        return Err(keys.problem(key, format!("{} values for {n_layer} layers", array.len())));
    }
    let flag = |value| match value {
        Value::Bool(flag) => Ok(flag),
        other => Err(keys.problem(key, format!("an element is {}, expected a boolean", other.describe()))),
    };
    array.iter().take(n_layer).map(flag).collect::<Result<_, _>>().map(Some)
}
