//! What a caller asks of the engine.

use super::sampler::InvalidSampling;

/// Names a request for its whole life; never reused by one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// One completion: a prompt in, tokens out.
#[derive(Default)]
pub struct Request {
    /// Token ids, BOS included where the model wants one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate; `None` runs to an end-of-generation token or the end of the context.
    pub max_tokens: Option<u32>,
    /// How the next token is chosen.
    pub sampling: Sampling,
    /// Texts that end the generation; neither they nor anything after them is returned. Empty ones are ignored.
    pub stop: Vec<String>,
    /// Treat end-of-generation tokens like any other.
    pub ignore_eos: bool,
    /// Report the log probability of every token, and of this many most probable ones.
    pub logprobs: Option<u8>,
    /// Write control tokens (`<|im_end|>`, channel marks) as text instead of leaving them out.
    pub special: bool,
    /// Restricts the tokens that may follow (a grammar).
    pub mask: Option<Box<dyn TokenMask>>,
}

/// How the next token is chosen; the default is greedy.
///
/// The steps run in this order: penalties, `logit_bias`, mask, `temperature`, `top_k`, `top_p`, `min_p`, draw.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the largest logit, the lowest id on a tie.
    pub temperature: f32,
    /// Keeps this many largest logits; 0 or less keeps all.
    pub top_k: i32,
    /// Keeps the most probable tokens that together reach this probability; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this fraction as probable as the most probable one; 0 keeps all.
    pub min_p: f32,
    /// Divides positive logits, multiplies negative ones, of tokens in the prompt or the reply; 1 is off.
    pub repeat_penalty: f32,
    /// Subtracted from a token's logit for every time the reply has it; 0 is off.
    pub frequency_penalty: f32,
    /// Subtracted from a token's logit once the reply has it; 0 is off.
    pub presence_penalty: f32,
    /// Makes the draws repeatable; `None` takes a new seed for every request.
    pub seed: Option<u64>,
    /// Added to the logits of these tokens; −∞ forbids one.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seed: None,
            logit_bias: Vec::new(),
        }
    }
}

/// Decides token by token what may follow: the engine's side of a grammar.
pub trait TokenMask: Send {
    /// Sets the logits of tokens that may not come next to −∞. `logits` has one value for every id of the model.
    ///
    /// # Errors
    /// What may come next cannot be said (a grammar that takes too much to follow): the reply ends with this message.
    fn allow(&mut self, logits: &mut [f32]) -> Result<(), String>;
    /// Takes note of the token that was chosen.
    fn accept(&mut self, id: u32);
    /// Whether the text is complete and nothing may follow.
    fn is_done(&self) -> bool;
}

/// Why a request was not taken. The engine is unchanged.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// There is nothing to run the model on.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// An id the model has no embedding for.
    #[error("token id {id} is out of range: the model has {n_vocab} tokens")]
    TokenOutOfRange {
        /// The id.
        id: u32,
        /// Ids below this are good.
        n_vocab: u32,
    },
    /// The prompt does not fit.
    #[error("the prompt has {prompt} tokens, the context holds {n_ctx}")]
    ContextLengthExceeded {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens the context holds, prompt and reply together.
        n_ctx: u32,
    },
    /// As many requests wait as may.
    #[error("the queue is full: {waiting} requests wait")]
    QueueFull {
        /// Requests that wait.
        waiting: usize,
    },
    /// A sampling parameter makes no sense.
    #[error(transparent)]
    Sampling(#[from] InvalidSampling),
}
