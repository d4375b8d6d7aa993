//! Chat templates.

/// Stand-in until the templates are merged.
#[derive(Debug)]
pub struct Template;

/// Stand-in.
#[derive(Debug, thiserror::Error)]
#[error("stand-in")]
pub struct TemplateError;
