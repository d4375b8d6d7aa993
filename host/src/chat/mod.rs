//! Chat templates.

/// Stand-in until the templates are merged.
#[derive(Debug)]
pub struct Template;
