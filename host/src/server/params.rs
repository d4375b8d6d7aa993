//! The fields that chats and completions share: how tokens are chosen, and when a reply ends.

use std::ops::RangeInclusive;

use serde_json::Value;

use super::error::ApiError;
use super::fields::{Fields, sketch, whole};
use crate::engine::{Request, Sampling};

/// Choices of one request, and prompts times choices.
pub(super) const MAX_CHOICES: usize = 64;
/// OpenAI's limits are 5 and 20; more tops would be a copy of the vocabulary.
const MAX_TOP_LOGPROBS: i64 = 20;
/// OpenAI allows four; each one costs a search in every piece of text.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;
/// What OpenAI allows; −100 is as good as a ban.
const MAX_BIAS: f64 = 100.0;
/// OpenAI allows 2 of both; more is nonsense, not danger.
const MAX_TEMPERATURE: f32 = 100.0;
const MAX_PENALTY: f32 = 100.0;

/// How to reply.
pub(super) struct Params {
    sampling: Sampling,
    max_tokens: Option<u32>,
    stop: Vec<String>,
    ignore_eos: bool,
    /// Log probabilities of the tokens, and of this many of the most probable ones.
    pub(super) logprobs: Option<u8>,
    /// Replies per prompt.
    pub(super) n: usize,
    pub(super) stream: bool,
    /// One more chunk with the token counts at the end of a stream.
    pub(super) include_usage: bool,
}

impl Params {
    /// Reads them. `logprobs` differs between the endpoints, see [`chat_logprobs`] and [`completion_logprobs`].
    pub(super) fn read(fields: &Fields<'_>, logprobs: Option<u8>, n_vocab: u32) -> Result<Self, ApiError> {
        let include_usage = match fields.object("stream_options", "stream_options.")? {
            Some(options) => options.bool("include_usage")?,
            None => false,
        };
        // Checked although it does not matter: there is one model.
        fields.text("model")?;
        let limit = |name| fields.integer(name, 1..=i64::from(u32::MAX));
        let max_tokens = limit("max_completion_tokens")?.or(limit("max_tokens")?);
        Ok(Self {
            sampling: sampling(fields, n_vocab)?,
            max_tokens: max_tokens.map(|n| n as u32),
            stop: stops(fields)?,
            ignore_eos: fields.bool("ignore_eos")?,
            logprobs,
            n: fields.integer("n", 1..=MAX_CHOICES as i64)?.unwrap_or(1) as usize,
            stream: fields.bool("stream")?,
            include_usage,
        })
    }

    /// The request for one choice. A seed makes a request repeatable; its choices still differ from each other.
    pub(super) fn request(&self, prompt: Vec<u32>, choice: usize) -> Request {
        let mut sampling = self.sampling.clone();
        sampling.seed = sampling.seed.map(|seed| seed.wrapping_add(choice as u64));
        Request {
            prompt,
            max_tokens: self.max_tokens,
            sampling,
            stop: self.stop.clone(),
            ignore_eos: self.ignore_eos,
            logprobs: self.logprobs,
            ..Request::default()
        }
    }
}

/// `logprobs: true` and `top_logprobs: N`.
pub(super) fn chat_logprobs(fields: &Fields<'_>) -> Result<Option<u8>, ApiError> {
    let top = fields.integer("top_logprobs", 0..=MAX_TOP_LOGPROBS)?;
    match (fields.bool("logprobs")?, top) {
        (true, top) => Ok(Some(top.unwrap_or(0) as u8)),
        (false, Some(1..)) => Err(fields.wrong("top_logprobs", "needs logprobs to be true")),
        (false, _) => Ok(None),
    }
}

/// `logprobs: N`.
pub(super) fn completion_logprobs(fields: &Fields<'_>) -> Result<Option<u8>, ApiError> {
    Ok(fields.integer("logprobs", 0..=MAX_TOP_LOGPROBS)?.map(|n| n as u8))
}

/// OpenAI's defaults: temperature 1, nothing else. The ranges keep every logit a finite number.
fn sampling(fields: &Fields<'_>, n_vocab: u32) -> Result<Sampling, ApiError> {
    let off = Sampling::default();
    let number = |name, default, range: RangeInclusive<f32>| match fields.number(name)? {
        None => Ok(default),
        Some(x) if range.contains(&x) => Ok(x),
        Some(x) => Err(fields.wrong(name, format!("{x} is not from {} to {}", range.start(), range.end()))),
    };
    let seed = fields.integer("seed", i64::MIN..=i64::MAX)?;
    Ok(Sampling {
        temperature: number("temperature", 1.0, 0.0..=MAX_TEMPERATURE)?,
        top_k: fields.integer("top_k", -1..=i64::from(i32::MAX))?.unwrap_or(0) as i32,
        top_p: number("top_p", off.top_p, 0.0..=1.0)?,
        min_p: number("min_p", off.min_p, 0.0..=1.0)?,
        repeat_penalty: number("repeat_penalty", off.repeat_penalty, 1.0 / MAX_PENALTY..=MAX_PENALTY)?,
        frequency_penalty: number("frequency_penalty", off.frequency_penalty, -MAX_PENALTY..=MAX_PENALTY)?,
        presence_penalty: number("presence_penalty", off.presence_penalty, -MAX_PENALTY..=MAX_PENALTY)?,
        // Only the bits matter, and a negative seed is as good as another.
        seed: seed.map(i64::cast_unsigned),
        logit_bias: logit_bias(fields, n_vocab)?,
    })
}

fn logit_bias(fields: &Fields<'_>, n_vocab: u32) -> Result<Vec<(u32, f32)>, ApiError> {
    let biases = fields.map("logit_bias")?.into_iter().flatten();
    biases
        .map(|(id, bias)| {
            let id = id.parse().ok().filter(|id| *id < n_vocab);
            let id =
                id.ok_or_else(|| fields.wrong("logit_bias", format!("expected token ids from 0 to {}", n_vocab - 1)))?;
            match bias.as_f64() {
                Some(bias) if bias.abs() <= MAX_BIAS => Ok((id, bias as f32)),
                _ => Err(fields.wrong("logit_bias", format!("token {id}: expected a number from -100 to 100"))),
            }
        })
        .collect()
}

/// A string or a list of them.
fn stops(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let expected =
        |got: &Value| fields.wrong("stop", format!("expected a string or a list of strings, got {}", sketch(got)));
    let stops: Vec<String> = match fields.get("stop") {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop.clone()],
        Some(Value::Array(list)) => list
            .iter()
            .map(|stop| stop.as_str().map(str::to_owned).ok_or_else(|| expected(stop)))
            .collect::<Result<_, _>>()?,
        Some(other) => return Err(expected(other)),
    };
    if stops.len() > MAX_STOPS || stops.iter().any(|stop| stop.len() > MAX_STOP_BYTES) {
        return Err(fields.wrong("stop", format!("at most {MAX_STOPS} strings of {MAX_STOP_BYTES} bytes are allowed")));
    }
    Ok(stops)
}

/// Token ids from a request.
pub(super) fn token_ids(param: &str, list: &[Value], n_vocab: u32) -> Result<Vec<u32>, ApiError> {
    let id = |value: &Value| whole(value).and_then(|id| u32::try_from(id).ok()).filter(|id| *id < n_vocab);
    let wrong = |value| format!("expected token ids from 0 to {}, got {}", n_vocab - 1, sketch(value));
    list.iter().map(|value| id(value).ok_or_else(|| ApiError::field(param, wrong(value)))).collect()
}
