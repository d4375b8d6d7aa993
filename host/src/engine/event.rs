//! What the engine reports.

use std::time::Duration;

use super::request::RequestId;

/// News of one request. For each request the order is `Started`, any number of `Text`, one `Finished`; a request
/// that ends before it runs has only `Finished`.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The request left the queue.
    Started {
        /// Which request.
        id: RequestId,
        /// Prompt tokens that an earlier request had already computed.
        cached_tokens: u32,
    },
    /// More of the reply.
    Text {
        /// Which request.
        id: RequestId,
        /// Whole characters that are certain to be part of the reply; all of a request's pieces joined are the reply.
        text: String,
        /// Tokens generated since the last event. One whose text is held back (half a character, the beginning of
        /// a stop string) comes with an empty `text` or together with its successors. The token that ended the
        /// generation is not among them: it is [`FinishReason::Stop`]'s.
        tokens: Vec<SampledToken>,
    },
    /// The result of an embedding request, mean over the prompt's tokens, `[n_embd]`.
    Embedding {
        /// Which request.
        id: RequestId,
        /// The vector, not normalised.
        embedding: Vec<f32>,
    },
    /// The request is over and its memory free.
    Finished {
        /// Which request.
        id: RequestId,
        /// Why it ended.
        reason: FinishReason,
        /// Tokens in and out.
        usage: Usage,
        /// Where the time went.
        timings: Timings,
    },
}

impl Event {
    /// The request this is about.
    pub fn id(&self) -> RequestId {
        match self {
            Event::Started { id, .. }
            | Event::Text { id, .. }
            | Event::Embedding { id, .. }
            | Event::Finished { id, .. } => *id,
        }
    }
}

/// A token the sampler chose.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    /// Its id.
    pub id: u32,
    /// Natural log of its probability under the model, before any sampling parameter; NaN unless asked for.
    pub logprob: f32,
    /// The most probable ids and their log probabilities, descending; as many as were asked for.
    pub top: Vec<(u32, f32)>,
}

impl SampledToken {
    /// A token nothing is known about.
    pub(super) fn bare(id: u32) -> Self {
        Self { id, logprob: f32::NAN, top: Vec::new() }
    }
}

/// Why a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum FinishReason {
    /// The reply is complete.
    Stop(StopCause),
    /// `max_tokens` or the end of the context was reached.
    Length,
    /// The caller cancelled it.
    Cancelled,
    /// The model could not be run for it.
    Error(String),
}

/// What completed a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// An end-of-generation token, which is not part of the text.
    EndOfGeneration(u32),
    /// A stop string of the request.
    StopString(String),
    /// The token mask said the text is complete.
    Mask,
    /// There was nothing to generate (embeddings).
    NoReply,
}

/// Tokens in and out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated, one that ended the generation included.
    pub completion_tokens: u32,
    /// Tokens of the prompt that were not computed again.
    pub cached_tokens: u32,
}

/// Where a request's time went.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timings {
    /// From submission to the first step.
    pub queued: Duration,
    /// From the first step to the first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
}

/// A snapshot of the engine, and counters since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests that wait.
    pub queued: usize,
    /// Requests that run.
    pub running: usize,
    /// Requests that can run at once.
    pub n_slots: u32,
    /// Tokens a sequence can hold.
    pub n_ctx: u32,
    /// KV pages there are.
    pub pages: u32,
    /// KV pages that running requests hold.
    pub pages_used: u32,
    /// KV pages kept for reuse by later requests only.
    pub pages_cached: u32,
    /// Steps run.
    pub steps: u64,
    /// Prompt tokens computed.
    pub prompt_tokens: u64,
    /// Prompt tokens taken from earlier requests.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Tokens that were guessed and computed beside the next one of a sequence.
    pub drafted_tokens: u64,
    /// Of those the ones that were right.
    pub accepted_tokens: u64,
    /// Requests that ended, by any reason.
    pub finished: u64,
    /// Requests that ended with an error.
    pub failed: u64,
    /// Requests that were cancelled.
    pub cancelled: u64,
}
