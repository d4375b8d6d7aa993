//! Why a conversation cannot be rendered.

use std::fmt;
use std::path::PathBuf;

use crate::gguf::GgufError;

/// Why a chat template cannot be used, or refuses a conversation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The model's metadata is damaged.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The template's file cannot be read.
    #[error("{}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The template is not valid Jinja.
    #[error("the chat template does not parse: {0}")]
    Syntax(#[source] Box<minijinja::Error>),
    /// The template called `raise_exception`: it refuses this conversation.
    #[error("{0}")]
    Raised(String),
    /// The template failed.
    #[error("the chat template failed: {0}")]
    Render(#[source] Box<minijinja::Error>),
    /// A message is malformed.
    #[error("{place}: {problem}")]
    Message {
        /// Which part of the request, such as `messages[2].content`.
        place: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Texts use so many private-use characters that none are left to mark what people typed.
    #[error("the text uses too many private-use characters")]
    PrivateUse,
}

impl TemplateError {
    /// Whether the conversation is at fault, and not the template or the model.
    pub fn is_client_error(&self) -> bool {
        matches!(self, TemplateError::Raised(_) | TemplateError::Message { .. } | TemplateError::PrivateUse)
    }

    pub(super) fn syntax(error: minijinja::Error) -> TemplateError {
        TemplateError::Syntax(Box::new(error))
    }

    pub(super) fn from_render(error: minijinja::Error) -> TemplateError {
        let mut cause: Option<&dyn std::error::Error> = Some(&error);
        while let Some(current) = cause {
            if let Some(Raised(message)) = current.downcast_ref() {
                return TemplateError::Raised(message.clone());
            }
            cause = current.source();
        }
        TemplateError::Render(Box::new(error))
    }
}

/// The message of `raise_exception` on its way through the template engine.
#[derive(Debug)]
pub(super) struct Raised(pub(super) String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}
