//! What every route can see.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::ServerOptions;
use super::error::ApiError;
use super::markup::Markup;
use super::mask::Grammars;
use super::metrics::Metrics;
use super::worker::{Events, Refused, Work, Worker};
use crate::chat::Template;
use crate::tokenizer::Tokenizer;

/// The model as far as requests are concerned.
pub(super) struct Model {
    /// The name that replies give it.
    pub(super) alias: String,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) template: Option<Arc<Template>>,
    /// Ids below this have an embedding.
    pub(super) n_vocab: u32,
    pub(super) n_ctx: u32,
    /// How it marks thoughts and calls.
    pub(super) markup: Markup,
    /// Builds grammars for its vocabulary, where it has a token that ends a text; see [`Model::grammars`].
    pub(super) built: OnceLock<Result<Grammars, String>>,
}

impl Model {
    /// What builds grammars. It takes a while, once.
    pub(super) fn grammars(&self) -> &Result<Grammars, String> {
        self.built.get_or_init(|| {
            let start = Instant::now();
            let grammars = Grammars::new(&self.tokenizer);
            tracing::info!("ready for grammars after {:.2} s", start.elapsed().as_secs_f64());
            grammars
        })
    }
}

/// The server's state.
pub(super) struct App {
    pub(super) model: Model,
    pub(super) worker: Worker,
    pub(super) metrics: Arc<Metrics>,
    /// The key that requests need.
    pub(super) api_key: Option<String>,
    /// How long a body may take to come.
    pub(super) patience: Duration,
    /// When the server started, in seconds since 1970.
    pub(super) created: u64,
    next_id: AtomicU64,
}

impl App {
    pub(super) fn new(model: Model, worker: Worker, metrics: Arc<Metrics>, options: &ServerOptions) -> Self {
        let (api_key, patience) = (options.api_key.clone(), options.patience);
        Self { model, worker, metrics, api_key, patience, created: now_s(), next_id: AtomicU64::new(0) }
    }

    /// An id for a reply, like no other of this server.
    pub(super) fn new_id(&self, prefix: &str) -> String {
        format!("{prefix}-{:x}{:08x}", self.created, self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// Hands work to the engine; `param` names the field that the prompts came from.
    pub(super) async fn submit(&self, work: Vec<Work>, param: &str) -> Result<Events, ApiError> {
        self.worker.submit(work).await.map_err(|refused| match refused {
            Refused::Stopped => ApiError::unavailable(),
            Refused::Submit { index, error } => {
                tracing::debug!("prompt {index} of a request was refused: {error}");
                ApiError::submit(&error, param)
            }
        })
    }
}

/// Runs what takes long for long texts (parsing, templates, tokenising) where it blocks nobody.
pub(super) async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(e) => {
            tracing::error!("a request's preparation ended by a bug: {e}");
            Err(ApiError::internal("the request could not be prepared"))
        }
    }
}

/// Seconds since 1970.
pub(super) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs())
}
