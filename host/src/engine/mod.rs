//! Requests in, tokens out: continuous batching over one loaded model.
//!
//! An [`Engine`] owns a model and everything its sequences need. Callers [`submit`](Engine::submit) requests and call
//! [`step`](Engine::step) in a loop; each step is one forward pass over all live sequences, and returns what there is
//! to report. The engine has no thread of its own: the same calls give the same replies.
//!
//! - [`scheduler`]: the queue, admission, what goes into a batch.
//! - [`pager`]: KV pages; [`prefix`]: pages kept for requests that begin alike.
//! - `sequence`: one running request; [`sampler`]: its next token; [`stop`]: where its text ends.
//! - [`plan`]: what memory it takes.
//! - [`mock`]: a model without weights, for tests of everything above it.

mod device;
mod error;
mod event;
pub mod mock;
mod open;
mod options;
pub mod pager;
pub mod plan;
pub mod prefix;
mod request;
mod rng;
pub mod sampler;
pub mod scheduler;
mod sequence;
pub mod stop;

use std::path::Path;
use std::sync::Arc;

use crate::chat::Template;
use crate::model::config::Config;
use crate::model::executor::Executor;
use crate::tokenizer::Tokenizer;

pub use error::EngineError;
pub use event::{Event, FinishReason, SampledToken, Stats, StopCause, Timings, Usage};
pub use open::{Needs, load, load_with};
pub use options::{CPU_BATCH, DeviceChoice, EngineOptions};
pub use request::{Request, RequestId, Sampling, SubmitError, TokenMask};
pub use sampler::InvalidSampling;

use scheduler::Scheduler;

/// A loaded model that takes requests.
pub struct Engine {
    scheduler: Scheduler,
    config: Config,
    tokenizer: Option<Arc<Tokenizer>>,
    template: Option<Arc<Template>>,
}

impl Engine {
    /// Loads a model.
    ///
    /// # Errors
    /// The file, the device or the options do not allow it; see [`EngineError`].
    pub fn open(path: &Path, options: &EngineOptions) -> Result<Self, EngineError> {
        open::open(path, options)
    }

    /// An engine over a model that is loaded already. Without a tokenizer the replies have ids and no text, and end
    /// by length only.
    ///
    /// # Errors
    /// The executor's limits leave no room for a sequence.
    pub fn new(
        executor: Box<dyn Executor>,
        tokenizer: Option<Arc<Tokenizer>>,
        template: Option<Arc<Template>>,
        options: &EngineOptions,
    ) -> Result<Self, EngineError> {
        let config = executor.config().clone();
        let scheduler = Scheduler::new(executor, tokenizer.clone(), options)?;
        Ok(Self { scheduler, config, tokenizer, template })
    }

    /// The model's tokenizer; `None` for a file without a vocabulary.
    pub fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        self.tokenizer.as_ref()
    }

    /// The model's chat template.
    pub fn template(&self) -> Option<&Arc<Template>> {
        self.template.as_ref()
    }

    /// The model's hyperparameters.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Puts a request into the queue.
    ///
    /// # Errors
    /// The request cannot run, now or ever; see [`SubmitError`].
    pub fn submit(&mut self, request: Request) -> Result<RequestId, SubmitError> {
        self.scheduler.submit(request)
    }

    /// Puts a prompt into the queue whose mean hidden state is wanted: [`Event::Embedding`], then `Finished`.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub fn submit_embedding(&mut self, prompt: Vec<u32>) -> Result<RequestId, SubmitError> {
        self.scheduler.submit_embedding(prompt)
    }

    /// Ends a request, whatever it is doing. Its memory is free at once; `Finished` comes with the next step. An id
    /// that is not live is ignored.
    pub fn cancel(&mut self, id: RequestId) {
        self.scheduler.cancel(id);
    }

    /// One forward pass over all live sequences: a row for each that is decoding, the rest of the batch for prompts in
    /// order of arrival. Where the device fails, the requests of the step end with [`FinishReason::Error`] and the
    /// engine stays usable.
    pub fn step(&mut self) -> Vec<Event> {
        self.scheduler.step()
    }

    /// Whether a step would do nothing.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }

    /// Counters and levels.
    pub fn stats(&self) -> Stats {
        self.scheduler.stats()
    }

    /// Tokens a sequence can hold, prompt and reply together.
    pub fn n_ctx(&self) -> u32 {
        self.scheduler.n_ctx()
    }

    /// The model itself, for callers that run batches of their own while no request is live.
    pub fn executor_mut(&mut self) -> &mut dyn Executor {
        self.scheduler.executor_mut()
    }
}
