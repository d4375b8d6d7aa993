//! The HTTP server: OpenAI's API and a chat page over one [`Engine`].
//!
//! One thread owns the engine and steps it (`worker`); requests reach it through a channel, and every request has a
//! channel of its own for what comes back. The HTTP side (tokio, hyper, axum) never touches the model: it turns
//! requests into token ids and grammars (`fields`, `params`, `prompts`, `tools`, `mask`), events into replies (`pieces`,
//! `markup`, `reply`, `stream`), and drops the receiving end when a client goes away, which is all that cancelling takes.
//!
//! Who may ask is for `auth` and `guard` to say.
//!
//! What is bounded, and where: connections, their heads and their dawdling (`listen`), bodies (`body`), choices
//! (`params`), grammars (`mask`), waiting requests ([`EngineOptions::n_queue`](crate::engine::EngineOptions)), the reply
//! (the context).

mod app;
mod auth;
mod body;
mod embeddings;
mod error;
mod fields;
mod generate;
mod guard;
mod listen;
mod logprobs;
mod markup;
mod mask;
mod metrics;
mod params;
mod pieces;
mod prompts;
mod reply;
mod routes;
mod stream;
mod tokens;
mod tools;
mod worker;

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::http::HeaderValue;
use tokio::net::TcpListener;
use tokio::runtime;
use tokio::sync::watch;

use crate::engine::Engine;
use app::{App, Model};
use guard::Guard;
use listen::Times;
use markup::Markup;
use metrics::Metrics;
use worker::Worker;

pub use error::ServerError;

/// How to serve.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// A name or an address of this machine.
    pub host: String,
    /// 0 takes any free one.
    pub port: u16,
    /// The key that requests need, on every route but `/health`.
    pub api_key: Option<String>,
    /// The name of the model in replies.
    pub alias: String,
    /// How long replies under way may take to finish once the server is asked to end.
    pub drain: Duration,
    /// How long a client may keep a connection waiting: for a request, or for taking something of a reply.
    pub patience: Duration,
    /// Origins of web pages that may use the API (CORS); `*` is all of them.
    pub cors: Vec<HeaderValue>,
    /// Names that requests may call the server by, besides `localhost` and addresses.
    pub names: Vec<String>,
}

/// Serves until the process is asked to end (Ctrl-C, SIGTERM), then finishes the replies under way. `ready` is told the
/// address once connections are accepted.
///
/// # Errors
/// The address cannot be listened on, the model has no vocabulary, or the engine's thread fails.
pub fn serve(engine: Engine, options: ServerOptions, ready: impl FnOnce(SocketAddr)) -> Result<(), ServerError> {
    let tokenizer = engine.tokenizer().cloned().ok_or(ServerError::NoVocabulary)?;
    let template = engine.template().cloned();
    let model = Model {
        alias: options.alias.clone(),
        markup: template.as_ref().map_or(Markup::PLAIN, |template| Markup::of(template)),
        built: OnceLock::new(),
        tokenizer,
        template,
        n_vocab: u32::try_from(engine.config().n_vocab).expect("a configuration limits n_vocab to 2^24"),
        n_ctx: engine.n_ctx(),
    };
    let runtime = runtime::Builder::new_multi_thread()
        // The work is done by the engine; these only move bytes and prepare prompts.
        .worker_threads(2)
        .max_blocking_threads(4)
        .enable_all()
        .build()
        .map_err(ServerError::Start)?;
    let address = format!("{}:{}", options.host, options.port);
    let listen = |source| ServerError::Listen { address: address.clone(), source };
    let listener = runtime.block_on(TcpListener::bind((options.host.as_str(), options.port))).map_err(listen)?;
    let local = listener.local_addr().map_err(listen)?;

    let metrics = Arc::new(Metrics::default());
    metrics.set_engine(engine.stats());
    let (worker, thread) = Worker::start(engine, metrics.clone())?;
    let guard = Guard::new(&options, local);
    let app = Arc::new(App::new(model, worker, metrics, &options));
    // Not when the first client waits for it.
    runtime.spawn_blocking({
        let app = app.clone();
        move || app.model.grammars().is_ok()
    });
    let router = routes::router(app, guard);
    let times = Times { patience: options.patience, drain: options.drain };
    ready(local);
    runtime.block_on(run(listener, router, times))?;
    // What is still open now is dropped, and so cancelled; then the last handle of the worker is gone.
    runtime.shutdown_timeout(Duration::from_secs(1));
    thread.join().map_err(|_| ServerError::EngineStopped)
}

async fn run(listener: TcpListener, router: axum::Router, times: Times) -> Result<(), ServerError> {
    let (stop, stopped) = watch::channel(false);
    let mut serving = std::pin::pin!(listen::serve(listener, router, stopped, times));
    tokio::select! {
        () = serving.as_mut() => return Ok(()),
        asked = listen::asked_to_end() => asked.map_err(ServerError::Start)?,
    }
    tracing::info!("finishing the replies under way");
    stop.send_replace(true);
    tokio::select! {
        () = serving => Ok(()),
        // Asked twice: at once.
        _ = listen::asked_to_end() => Ok(()),
    }
}
