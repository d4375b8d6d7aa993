//! Chat templates: messages to the prompt that a model was trained on, by the Jinja template in its
//! GGUF file or one from the user.
//!
//! Templates are written for Jinja2 as Hugging Face transformers sets it up: block trimming, Python's
//! string methods, `raise_exception`, `strftime_now`, Python's JSON. `python` brings `minijinja`
//! close to that. A template that does not parse is an error when it is loaded, and is never
//! replaced by another format.
//!
//! What people typed stays text: see `taint`.

mod error;
mod json;
mod message;
mod probe;
mod python;
mod taint;

pub use error::TemplateError;
pub use message::{Message, Role, ToolCall};

use std::fmt;
use std::path::Path;

use minijinja::Environment;
use serde_json::{Map, Value as Json};

use crate::gguf::Gguf;
use crate::tokenizer::{Segment, Tokenizer};
use probe::Shape;
use taint::{Hide, Kind, Taint};

const NAME: &str = "chat template";

/// What a template can know about a vocabulary.
#[derive(Clone, Debug, Default)]
pub struct SpecialTexts {
    /// `bos_token` in templates.
    pub bos: String,
    /// `eos_token` in templates.
    pub eos: String,
    /// Texts that become control tokens. No message may smuggle them in.
    pub control: Vec<String>,
}

impl SpecialTexts {
    /// The texts of a model's vocabulary.
    pub fn of(tokenizer: &Tokenizer) -> SpecialTexts {
        let text = |id: Option<u32>| id.map(|id| tokenizer.decode(&[id], true)).unwrap_or_default();
        SpecialTexts {
            bos: text(tokenizer.bos()),
            eos: text(tokenizer.eos()),
            control: tokenizer.control_texts().map(str::to_owned).collect(),
        }
    }
}

/// A conversation to render.
#[derive(Clone, Copy, Debug, Default)]
pub struct Chat<'a> {
    /// The messages, oldest first.
    pub messages: &'a [Message],
    /// Definitions of tools as the client sent them.
    pub tools: &'a [Json],
    /// Other variables, such as `enable_thinking` or `reasoning_effort`. They hide none of the
    /// template's own.
    pub vars: Option<&'a Map<String, Json>>,
    /// Whether the prompt ends where the assistant's answer begins.
    pub add_generation_prompt: bool,
}

/// A rendered conversation: what the template wrote and what others wrote, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    pieces: Vec<(String, bool)>,
}

impl Prompt {
    /// The pieces for [`Tokenizer::encode_segments`].
    pub fn segments(&self) -> Vec<Segment<'_>> {
        self.pieces.iter().map(|(text, special)| Segment { text, special: *special }).collect()
    }

    /// The whole text.
    pub fn text(&self) -> String {
        self.pieces.iter().map(|(text, _)| text.as_str()).collect()
    }
}

/// A parsed chat template.
pub struct Template {
    env: Environment<'static>,
    source: String,
    special: SpecialTexts,
    taint: Taint,
    shape: Shape,
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Template").field("n_bytes", &self.source.len()).field("shape", &self.shape).finish()
    }
}

impl Template {
    /// Parses a template, and finds out by trial how it wants its messages.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`] if it does not parse.
    pub fn new(source: &str, special: SpecialTexts) -> Result<Template, TemplateError> {
        let mut env = python::environment();
        env.add_template_owned(NAME, python::adapt(source)).map_err(TemplateError::syntax)?;
        let taint = Taint::new(&special.control)?;
        let source = source.to_owned();
        let mut template = Template { env, source, special, taint, shape: Shape::default() };
        // A trial is short; a template that goes on and on is not worth waiting for eight times.
        template.env.set_fuel(Some(python::FUEL / 64));
        template.shape = probe::shape(&template);
        template.env.set_fuel(Some(python::FUEL));
        Ok(template)
    }

    /// The template in a model file, `None` if it has none.
    ///
    /// # Errors
    /// As [`Template::new`], and if the metadata is damaged.
    pub fn from_gguf(gguf: &Gguf, tokenizer: &Tokenizer) -> Result<Option<Template>, TemplateError> {
        let source = gguf.opt_str("tokenizer.chat_template")?;
        source.map(|source| Template::new(source, SpecialTexts::of(tokenizer))).transpose()
    }

    /// A template from a file, instead of the model's own.
    ///
    /// # Errors
    /// As [`Template::new`], and if the file cannot be read.
    pub fn from_file(path: &Path, tokenizer: &Tokenizer) -> Result<Template, TemplateError> {
        let read = |source| TemplateError::File { path: path.to_owned(), source };
        Template::new(&std::fs::read_to_string(path).map_err(read)?, SpecialTexts::of(tokenizer))
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template shows tool definitions to the model.
    pub fn supports_tools(&self) -> bool {
        self.shape.tools
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// [`TemplateError::Raised`] if the template refuses it, [`TemplateError::Render`] if the
    /// template fails or takes too many steps.
    pub fn render(&self, chat: &Chat<'_>) -> Result<Prompt, TemplateError> {
        let messages = message::to_json(chat.messages, &self.shape);
        let messages = Json::Array(messages);
        let tools = Json::Array(chat.tools.to_vec());
        let vars = Json::Object(chat.vars.cloned().unwrap_or_default());
        let aliases = self.taint.aliases([&messages, &tools, &vars], &self.source)?;

        let hidden = |hide| {
            let context = self.context(chat, [&messages, &tools, &vars], |text, kind| aliases.hide(text, kind, hide));
            self.run(context)
        };
        let lightly = hidden(Hide::Markers)?;
        if self.special.control.is_empty() {
            return Ok(Prompt { pieces: aliases.reveal(&lightly) });
        }
        let fully = hidden(Hide::All)?;
        if self.taint.same_markers(&lightly, &fully) {
            return Ok(Prompt { pieces: aliases.reveal(&lightly) });
        }
        tracing::warn!("the chat template makes control tokens of what messages say; messages are kept opaque to it");
        Ok(Prompt { pieces: aliases.reveal(&fully) })
    }

    /// The template's variables.
    fn context(
        &self,
        chat: &Chat<'_>,
        [messages, tools, vars]: [&Json; 3],
        hide: impl Fn(&str, Kind) -> String,
    ) -> minijinja::Value {
        let value = |json, kind| python::value(json, kind, &hide);
        let own = [
            ("messages", value(messages, Kind::Text)),
            ("tools", if chat.tools.is_empty() { minijinja::Value::from(()) } else { value(tools, Kind::Name) }),
            ("add_generation_prompt", chat.add_generation_prompt.into()),
            ("bos_token", self.special.bos.as_str().into()),
            ("eos_token", self.special.eos.as_str().into()),
        ];
        let vars = vars.as_object().into_iter().flatten();
        let vars = vars.map(|(name, json)| (name.as_str(), value(json, Kind::Name)));
        minijinja::Value::from_pairs(vars.chain(own))
    }

    fn run(&self, context: minijinja::Value) -> Result<String, TemplateError> {
        let template = self.env.get_template(NAME).map_err(TemplateError::syntax)?;
        template.render(context).map_err(TemplateError::from_render)
    }
}
