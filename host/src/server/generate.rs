//! `POST /v1/chat/completions` and `POST /v1/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use super::app::{App, Model, off_thread};
use super::error::ApiError;
use super::fields::Fields;
use super::json_mask::JsonMask;
use super::params::{MAX_CHOICES, Params, chat_logprobs, completion_logprobs};
use super::pieces::Pieces;
use super::reasoning::Splitter;
use super::reply::{Kind, Writer};
use super::worker::Work;
use super::{body, prompts, tools};

/// A request that is understood.
struct Prepared {
    params: Params,
    prompts: Vec<Vec<u32>>,
    /// Whether the prompt ends inside a thought.
    opens_thought: bool,
    /// Whether the reply may call tools.
    calls_tools: bool,
    /// Whether the reply has to be a JSON object.
    json: bool,
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
    let n_choices = prepared.prompts.len() * prepared.params.n;
    let splitter = || match kind {
        Kind::Chat if app.model.thinks => Splitter::new(prepared.opens_thought),
        _ => Splitter::off(),
    };
    let splitters = (0..n_choices).map(|_| splitter()).collect();
    let param = if kind == Kind::Chat { "messages" } else { "prompt" };
    // Refused before a stream begins: the status still says so.
    let events = app.submit(prepared.work(&app.model), param).await?;
    let params = prepared.params;
    let pieces = Pieces::new(events, splitters, prepared.calls_tools, params.n);
    let writer = Writer::new(app, kind, n_choices, params.logprobs.is_some());
    writer.respond(pieces, params.stream, params.include_usage).await
}

impl Prepared {
    /// The requests of all choices, those of a prompt together.
    fn work(&self, model: &Model) -> Vec<Work> {
        let mut work = Vec::with_capacity(self.prompts.len() * self.params.n);
        for prompt in &self.prompts {
            work.extend((0..self.params.n).map(|choice| {
                let mut request = self.params.request(prompt.clone(), choice);
                if self.json {
                    request.mask = Some(Box::new(JsonMask::new(model.tokenizer.clone(), self.opens_thought)));
                }
                Work::Reply(Box::new(request))
            }));
        }
        work
    }
}

fn prepare(model: &Model, kind: Kind, body: &[u8]) -> Result<Prepared, ApiError> {
    let map = body::parse(body)?;
    let fields = Fields::new(&map);
    let json = wants_json(&fields)?;
    let logprobs = match kind {
        Kind::Chat => chat_logprobs(&fields)?,
        Kind::Completion => completion_logprobs(&fields)?,
    };
    let params = Params::read(&fields, logprobs, model.n_vocab)?;
    let (prompts, opens_thought, calls_tools) = match kind {
        Kind::Chat => {
            let tools = tools::read(model, &fields)?;
            if json && !tools.is_empty() {
                return Err(ApiError::unsupported("response_format", "a JSON object together with tools"));
            }
            let prompt = prompts::chat(model, &fields, tools)?;
            (vec![prompt.ids], prompt.opens_thought, !tools.is_empty())
        }
        Kind::Completion => {
            refuse_unsupported(&fields)?;
            (prompts::plain(model, &fields, "prompt")?, false, false)
        }
    };
    if prompts.len() * params.n > MAX_CHOICES {
        return Err(fields.wrong("n", format!("prompts times n may be up to {MAX_CHOICES}")));
    }
    Ok(Prepared { params, prompts, opens_thought, calls_tools, json })
}

/// `response_format`: text, or an object of any shape.
fn wants_json(fields: &Fields<'_>) -> Result<bool, ApiError> {
    let Some(format) = fields.object("response_format", "response_format.")? else { return Ok(false) };
    match format.text("type")? {
        Some("text") => Ok(false),
        Some("json_object") => Ok(true),
        Some("json_schema") => Err(ApiError::unsupported("response_format", "a schema (json_object is)")),
        _ => Err(format.wrong("type", "expected \"text\" or \"json_object\"")),
    }
}

/// Fields of a completion that change what a reply means are refused rather than ignored.
fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), ApiError> {
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
    Ok(())
}
