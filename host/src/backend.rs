//! The operations a model is made of.

/// Tokens in a page of the KV cache.
pub const PAGE_TOKENS: u32 = 64;

/// Why a backend could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device has too little memory left.
    #[error("out of memory: {what} needs {needed} bytes, {free} are free")]
    OutOfMemory {
        /// What was being allocated.
        what: String,
        /// Bytes asked for.
        needed: u64,
        /// Bytes the device had free.
        free: u64,
    },
    /// The backend has no form of an operation for these types or shapes.
    #[error("{0}")]
    Unsupported(String),
    /// The device or its driver failed.
    #[error("{0}")]
    Device(String),
}

/// Result of a backend operation.
pub type Result<T = ()> = std::result::Result<T, Error>;

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
