//! Where the time went.

/// A part of the model, as far as measurements tell parts apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// Looking up the tokens: every step starts with it.
    Embedding,
    /// An attention layer.
    Attention,
    /// A gated delta net layer.
    DeltaNet,
    /// A dense feed-forward layer.
    Ffn,
    /// A mixture of experts.
    Moe,
    /// From the last layer to the next token.
    Head,
}

/// One timed launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Launched {
    /// For what part of the model.
    pub section: Section,
    /// The kernel's name.
    pub kernel: &'static str,
    /// Its time in microseconds.
    pub us: f64,
    /// Least traffic with device memory that it needs.
    pub moved_bytes: u64,
}

/// Where the time of some steps went.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// The launches, in their order.
    pub launches: Vec<Launched>,
    /// How fast the device reads its memory, in units of 1e9 bytes a second, where that could be measured.
    pub read_gb_per_s: Option<f64>,
}
