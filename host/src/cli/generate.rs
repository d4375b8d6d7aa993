//! One request at a time through the engine, for the commands that need no more.

use super::error::CliError;
use super::interrupt::Interrupt;
use crate::engine::{Engine, Event, FinishReason, Request, SampledToken, StopCause, Timings, Usage};

/// A finished reply.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) text: String,
    pub(super) tokens: Vec<SampledToken>,
    pub(super) reason: FinishReason,
    pub(super) usage: Usage,
    pub(super) timings: Timings,
}

impl Reply {
    /// The reason in OpenAI's words.
    pub(super) fn finish_reason(&self) -> &'static str {
        match self.reason {
            FinishReason::Stop(_) => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
            FinishReason::Error(_) => "error",
        }
    }

    /// All ids generated, the end-of-generation token included.
    pub(super) fn ids(&self) -> Vec<u32> {
        let last = match self.reason {
            FinishReason::Stop(StopCause::EndOfGeneration(id)) => Some(id),
            _ => None,
        };
        self.tokens.iter().map(|t| t.id).chain(last).collect()
    }
}

/// Runs a request to its end; hands every piece of text to `show`. Ctrl-C ends it early, with what there is.
///
/// # Errors
/// The request was refused, the model failed, or `show` did.
pub(super) fn generate(
    engine: &mut Engine,
    request: Request,
    interrupt: &Interrupt,
    mut show: impl FnMut(&str) -> Result<(), CliError>,
) -> Result<Reply, CliError> {
    let id = engine.submit(request)?;
    let mut reply = Reply {
        text: String::new(),
        tokens: Vec::new(),
        reason: FinishReason::Cancelled,
        usage: Usage::default(),
        timings: Timings::default(),
    };
    while !engine.is_idle() {
        if interrupt.is_set() {
            engine.cancel(id);
        }
        for event in engine.step() {
            match event {
                Event::Text { text, tokens, .. } => {
                    if let Err(e) = show(&text) {
                        engine.cancel(id);
                        return Err(e);
                    }
                    reply.text.push_str(&text);
                    reply.tokens.extend(tokens);
                }
                Event::Finished { reason, usage, timings, .. } => {
                    (reply.reason, reply.usage, reply.timings) = (reason, usage, timings);
                }
                Event::Started { .. } | Event::Embedding { .. } => {}
            }
        }
    }
    match reply.reason {
        FinishReason::Error(why) => Err(CliError::Generation(why)),
        _ => Ok(reply),
    }
}
