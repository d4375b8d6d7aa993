//! `POST /v1/chat/completions` and `POST /v1/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use super::app::{App, Model, off_thread};
use super::error::ApiError;
use super::fields::Fields;
use super::params::{MAX_CHOICES, Params, chat_logprobs, completion_logprobs};
use super::pieces::Pieces;
use super::reasoning::Splitter;
use super::reply::{Kind, Writer};
use super::worker::Work;
use super::{body, prompts};

/// A request that is understood.
struct Prepared {
    params: Params,
    prompts: Vec<Vec<u32>>,
    /// Whether the prompt ends inside a thought.
    opens_thought: bool,
}

pub(super) async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    reply(app, Kind::Chat, request).await
}

pub(super) async fn completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    reply(app, Kind::Completion, request).await
}

async fn reply(app: Arc<App>, kind: Kind, request: Request) -> Result<Response, ApiError> {
    let body = body::read(request).await?;
    let prepared = {
        let app = app.clone();
        off_thread(move || prepare(&app.model, kind, &body)).await?
    };
    let Prepared { params, prompts, opens_thought } = prepared;
    let mut work = Vec::with_capacity(prompts.len() * params.n);
    for prompt in prompts {
        work.extend((0..params.n).map(|choice| Work::Reply(Box::new(params.request(prompt.clone(), choice)))));
    }
    let splitters: Vec<Splitter> = work
        .iter()
        .map(|_| match kind {
            Kind::Chat if app.model.thinks => Splitter::new(opens_thought),
            _ => Splitter::off(),
        })
        .collect();
    let n_choices = splitters.len();
    let param = if kind == Kind::Chat { "messages" } else { "prompt" };
    // Refused before a stream begins: the status still says so.
    let events = app.submit(work, param).await?;
    let pieces = Pieces::new(events, splitters, params.n);
    let writer = Writer::new(app, kind, n_choices, params.logprobs.is_some());
    writer.respond(pieces, params.stream, params.include_usage).await
}

fn prepare(model: &Model, kind: Kind, body: &[u8]) -> Result<Prepared, ApiError> {
    let map = body::parse(body)?;
    let fields = Fields::new(&map);
    refuse_unsupported(&fields, kind)?;
    let logprobs = match kind {
        Kind::Chat => chat_logprobs(&fields)?,
        Kind::Completion => completion_logprobs(&fields)?,
    };
    let params = Params::read(&fields, logprobs, model.n_vocab)?;
    let (prompts, opens_thought) = match kind {
        Kind::Chat => {
            let prompt = prompts::chat(model, &fields)?;
            (vec![prompt.ids], prompt.opens_thought)
        }
        Kind::Completion => (prompts::plain(model, &fields, "prompt")?, false),
    };
    if prompts.len() * params.n > MAX_CHOICES {
        return Err(fields.wrong("n", format!("prompts times n may be up to {MAX_CHOICES}")));
    }
    Ok(Prepared { params, prompts, opens_thought })
}

/// Fields that change what a reply means are refused rather than ignored.
fn refuse_unsupported(fields: &Fields<'_>, kind: Kind) -> Result<(), ApiError> {
    match kind {
        Kind::Chat => {
            let no_tools = fields.get("tool_choice").and_then(|choice| choice.as_str()) == Some("none");
            for name in ["tools", "functions"] {
                if fields.list(name)?.is_some_and(|list| !list.is_empty()) && !no_tools {
                    return Err(ApiError::unsupported(name, "calling tools"));
                }
            }
            if let Some(format) = fields.object("response_format", "response_format.")?
                && format.text("type")?.is_some_and(|kind| kind != "text")
            {
                return Err(ApiError::unsupported("response_format", "a format other than text"));
            }
        }
        Kind::Completion => {
            if fields.bool("echo")? {
                return Err(ApiError::unsupported("echo", "repeating the prompt"));
            }
            if fields.text("suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
                return Err(ApiError::unsupported("suffix", "filling in before a suffix"));
            }
            let n = fields.integer("n", 1..=MAX_CHOICES as i64)?.unwrap_or(1);
            if fields.integer("best_of", 0..=i64::MAX)?.is_some_and(|best_of| best_of > n) {
                return Err(ApiError::unsupported("best_of", "choosing among more replies than are returned"));
            }
        }
    }
    Ok(())
}
