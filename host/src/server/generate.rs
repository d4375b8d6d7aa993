//! `POST /v1/chat/completions` and `POST /v1/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Value, json};

use super::app::{App, Model, off_thread};
use super::error::ApiError;
use super::fields::Fields;
use super::markup::Markup;
use super::markup::grammar::{self, Rules};
use super::mask::Grammar;
use super::params::{MAX_CHOICES, Params, chat_logprobs, completion_logprobs};
use super::pieces::Pieces;
use super::reply::{Kind, Writer};
use super::tools::{Tool, Tools};
use super::worker::Work;
use super::{body, prompts, tools};

/// A request that is understood.
struct Prepared {
    params: Params,
    prompts: Vec<Vec<u32>>,
    markup: Markup,
    /// Whether the prompt ends inside a thought.
    opens_thought: bool,
    /// What the reply may call.
    tools: Arc<[Tool]>,
    /// What the reply may be, where that is restricted.
    grammar: Option<Grammar>,
}

pub(super) async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    reply(app, Kind::Chat, request).await
}

pub(super) async fn completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    reply(app, Kind::Completion, request).await
}

async fn reply(app: Arc<App>, kind: Kind, request: Request) -> Result<Response, ApiError> {
    let body = body::read(request, app.patience).await?;
    let prepared = {
        let app = app.clone();
        off_thread(move || prepare(&app.model, kind, &body)).await?
    };
    let n_choices = prepared.prompts.len() * prepared.params.n;
    let reader = || prepared.markup.reader(prepared.opens_thought, &prepared.tools);
    let readers = (0..n_choices).map(|_| reader()).collect();
    let param = if kind == Kind::Chat { "messages" } else { "prompt" };
    // Refused before a stream begins: the status still says so.
    let events = app.submit(prepared.work(&app.model), param).await?;
    let params = prepared.params;
    let pieces = Pieces::new(events, readers, params.n);
    let writer = Writer::new(app, kind, n_choices, params.logprobs.is_some());
    writer.respond(pieces, params.stream, params.include_usage).await
}

impl Prepared {
    /// The requests of all choices, those of a prompt together.
    fn work(&self, model: &Model) -> Vec<Work> {
        let special = self.markup.is_hidden(&model.tokenizer);
        let mut work = Vec::with_capacity(self.prompts.len() * self.params.n);
        for prompt in &self.prompts {
            work.extend((0..self.params.n).map(|choice| {
                let mut request = self.params.request(prompt.clone(), choice);
                request.special = special;
                request.mask = self.grammar.as_ref().map(Grammar::mask);
                Work::Reply(Box::new(request))
            }));
        }
        work
    }
}

fn prepare(model: &Model, kind: Kind, body: &[u8]) -> Result<Prepared, ApiError> {
    let map = body::parse(body)?;
    let fields = Fields::new(&map);
    let schema = answer_schema(&fields)?;
    let logprobs = match kind {
        Kind::Chat => chat_logprobs(&fields)?,
        Kind::Completion => completion_logprobs(&fields)?,
    };
    let params = Params::read(&fields, logprobs, model.n_vocab)?;
    let (tools, prompts, markup, opens_thought) = match kind {
        Kind::Chat => {
            let tools = tools::read(model, &fields)?;
            let prompt = prompts::chat(model, &fields, tools.offered)?;
            (tools, vec![prompt.ids], model.markup, prompt.opens_thought)
        }
        Kind::Completion => {
            refuse_unsupported(&fields)?;
            (Tools::default(), prompts::plain(model, &fields, "prompt")?, Markup::PLAIN, false)
        }
    };
    if prompts.len() * params.n > MAX_CHOICES {
        return Err(fields.wrong("n", format!("prompts times n may be up to {MAX_CHOICES}")));
    }
    let rules = Rules { tools: &tools, schema: schema.as_ref(), opens_thought };
    let grammar = compile(model, markup, &rules)?;
    Ok(Prepared { params, prompts, markup, opens_thought, tools: tools.callable.into(), grammar })
}

/// The grammar of the replies, if they have one. What cannot be compiled is the fault of one of two fields.
fn compile(model: &Model, markup: Markup, rules: &Rules<'_>) -> Result<Option<Grammar>, ApiError> {
    let field = if rules.schema.is_some() { "response_format" } else { "tools" };
    let wrong = |why: String| ApiError::field(field, format!("this cannot be made a grammar: {why}"));
    let Some(lark) = grammar::write(markup, &model.tokenizer, rules).map_err(wrong)? else { return Ok(None) };
    let grammars = model.grammars().as_ref().map_err(|why| wrong(why.clone()))?;
    grammars.compile(lark).map(Some).map_err(wrong)
}

/// `response_format`: the schema of the answer; `None` for text.
fn answer_schema(fields: &Fields<'_>) -> Result<Option<Value>, ApiError> {
    let Some(format) = fields.object("response_format", "response_format.")? else { return Ok(None) };
    match format.text("type")? {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(json!({"type": "object"}))),
        Some("json_schema") => {
            let place = "response_format.json_schema.";
            let Some(named) = format.object("json_schema", place)? else {
                return Err(format.wrong("json_schema", "expected an object with a \"schema\""));
            };
            named.text("name")?;
            named.bool("strict")?;
            match named.get("schema") {
                Some(schema @ Value::Object(_)) => Ok(Some(schema.clone())),
                _ => Err(named.wrong("schema", "expected an object")),
            }
        }
        _ => Err(format.wrong("type", "expected \"text\", \"json_object\" or \"json_schema\"")),
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
