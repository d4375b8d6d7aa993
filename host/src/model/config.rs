//! Stand-in until the loader is merged.

/// Hyperparameters.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// Logits of a row.
    pub n_vocab: u32,
    /// Positions the model was trained on.
    pub n_ctx_train: u32,
}

impl Config {
    /// Whether any layer keeps a recurrent state.
    pub fn is_recurrent(&self) -> bool {
        false
    }
}
