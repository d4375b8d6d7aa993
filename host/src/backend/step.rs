//! What goes through the model together, and what is kept of it.

/// `M` tokens of `N` sequences that go through the model together.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Token id of every row.
    pub tokens: Vec<u32>,
    /// The sequences, in row order; their `rows` sum to `tokens.len()`.
    pub spans: Vec<Span>,
    /// Rows whose logits are wanted, ascending.
    pub outputs: Vec<u32>,
}

/// One sequence's consecutive rows of a [`Batch`].
#[derive(Clone, Debug)]
pub struct Span {
    /// Which sequence slot: indexes the recurrent state.
    pub slot: u32,
    /// Position of the first row in its sequence. At 0 the recurrent state starts from zero.
    pub start: u32,
    /// Number of rows.
    pub rows: u32,
    /// Physical KV pages that hold positions `0 .. start + rows`, in order.
    pub pages: Vec<u32>,
}

/// What a cache must hold.
#[derive(Clone, Debug)]
pub struct CacheShape {
    /// For each layer, what it keeps.
    pub layers: Vec<LayerCache>,
    /// Physical KV pages, shared by all sequences; each layer with attention has its own copy of them.
    pub n_pages: u32,
    /// Recurrent-state slots: one a sequence, then those that keep checkpoints.
    pub n_slots: u32,
}

/// How a token is drawn from a row of logits, where a backend does that.
///
/// Tokens are ranked by their logit, the lower id first on a tie. With `w[i] = e^((l[i] − max l)/temperature)`, kept
/// are of all tokens the first `top_k`; of those the shortest run from the first on that weighs at least `top_p` of
/// their sum; of those the ones with `w[i] ≥ min_p`. Of the kept tokens, by rising id, the one is drawn at which the
/// running sum of weights passes the share `uniform` of their total.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// Divides the logits; positive.
    pub temperature: f32,
    /// Tokens that may be kept; 0: all.
    pub top_k: u32,
    /// Share of the weight that is kept; 1 or more: all.
    pub top_p: f32,
    /// Smallest weight relative to the largest; 0: all.
    pub min_p: f32,
    /// A number in [0, 1), as a multiple of 2⁻⁶⁴.
    pub uniform: u64,
}

impl Draw {
    /// The largest logit, the lowest id on a tie.
    pub const GREEDY: Self = Draw { temperature: 1.0, top_k: 1, top_p: 1.0, min_p: 0.0, uniform: 0 };
}

/// What a step chooses on the device, and what it takes from the step before without the host.
#[derive(Clone, Debug, Default)]
pub struct Choose {
    /// Ids from here on are never chosen.
    pub n_tokens: u32,
    /// How the token of each output is drawn; empty: each is the largest logit, the lowest id on a tie.
    pub draws: Vec<Draw>,
    /// For every row, the output of the last step that chose whose token it takes instead of the batch's; empty: none.
    pub fed: Vec<Option<u32>>,
}

/// What one layer keeps between steps.
#[derive(Clone, Copy, Debug)]
pub enum LayerCache {
    /// Keys and values, `kv_dim = n_head_kv · head_dim` each a token.
    Kv {
        /// Values a token.
        kv_dim: u32,
    },
    /// Gated delta net: the latest inputs of the convolution, and one matrix a head.
    Recurrent {
        /// Values of one input of the convolution.
        conv_dim: u32,
        /// Its taps: at least `d_conv − 1` inputs have to be kept.
        d_conv: u32,
        /// Elements of the state: `n_head · d_state · d_state`.
        state: u32,
    },
}
