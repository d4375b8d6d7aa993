//! Messages in channels, as gpt-oss writes: a header between marks, a body, and the next message. `analysis` is
//! thought, a message to a function is a call, everything else is the answer.
//!
//! Source: the harmony response format, <https://github.com/openai/harmony>.

use super::{JsonScan, Said, certain};

pub(super) const CHANNEL: &str = "<|channel|>";
pub(super) const MESSAGE: &str = "<|message|>";
pub(super) const END: &str = "<|end|>";
pub(super) const START: &str = "<|start|>";
pub(super) const CONSTRAIN: &str = "<|constrain|>";
pub(super) const MARKS: [&str; 5] = [CHANNEL, MESSAGE, END, START, CONSTRAIN];
/// Who gets a call.
pub(super) const FUNCTIONS: &str = "functions.";
/// What ends a body, apart from the end of the reply.
const ENDS: [&str; 3] = [END, START, CHANNEL];

#[derive(Clone, Copy)]
enum State {
    /// In a header: text up to the mark before the body.
    Header,
    Reasoning,
    Content,
    Arguments(JsonScan),
    /// After a call.
    Tail,
}

/// Reads one reply; the prompt has begun its first message.
pub(in crate::server) struct Reader {
    state: State,
    held: String,
    /// Whether a message of the kind was there already: the next one is a new paragraph.
    reasoned: bool,
    answered: bool,
    n_calls: usize,
}

impl Default for Reader {
    fn default() -> Self {
        Self { state: State::Header, held: String::new(), reasoned: false, answered: false, n_calls: 0 }
    }
}

impl Reader {
    pub(super) fn push(&mut self, text: &str) -> Said {
        self.held.push_str(text);
        let mut said = Said::default();
        while self.advance(&mut said) {}
        said
    }

    pub(super) fn finish(&mut self) -> Said {
        let rest = std::mem::take(&mut self.held);
        let mut said = Said::default();
        match self.state {
            // A model that writes no header writes an answer.
            State::Header if !self.reasoned && !self.answered && !rest.contains(CHANNEL) => said.content = rest,
            State::Reasoning => said.reasoning = rest,
            State::Content => said.content = rest,
            State::Header | State::Arguments(_) | State::Tail => {}
        }
        said
    }

    pub(super) fn called(&self) -> bool {
        matches!(self.state, State::Tail)
    }

    /// Takes one step; `false` when more text is needed.
    fn advance(&mut self, said: &mut Said) -> bool {
        match self.state {
            State::Header | State::Tail => {
                let Some((header, rest)) = self.held.split_once(MESSAGE) else { return false };
                let header = header.to_owned();
                self.held = rest.to_owned();
                self.begin(&header, said);
                true
            }
            State::Reasoning | State::Content => {
                let n = certain(&self.held, &ENDS);
                let text: String = self.held.drain(..n).collect();
                let part = if matches!(self.state, State::Reasoning) { &mut said.reasoning } else { &mut said.content };
                part.push_str(&text);
                let ended = ENDS.iter().any(|mark| self.held.starts_with(mark));
                if ended {
                    self.state = State::Header;
                }
                ended
            }
            State::Arguments(mut scan) => {
                let end = scan.end(&self.held);
                self.state = State::Arguments(scan);
                let taken: String = self.held.drain(..end.unwrap_or(self.held.len())).collect();
                if !taken.is_empty() {
                    said.call(self.n_calls, None, &taken);
                }
                if end.is_some() {
                    self.n_calls += 1;
                    self.state = State::Tail;
                }
                end.is_some()
            }
        }
    }

    /// Begins a body after its header, such as `<|channel|>commentary to=functions.f <|constrain|>json`.
    fn begin(&mut self, header: &str, said: &mut Said) {
        let word = |text: &str| {
            let end = text.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(text.len());
            text[..end].to_owned()
        };
        let after = |mark: &str| header.rsplit_once(mark).map(|(_, rest)| word(rest));
        let recipient = after("to=").and_then(|name| name.strip_prefix(FUNCTIONS).map(str::to_owned));
        self.state = if let Some(name) = recipient {
            said.call(self.n_calls, Some(name), "");
            State::Arguments(JsonScan::default())
        } else if after(CHANNEL).as_deref() == Some("analysis") {
            if std::mem::replace(&mut self.reasoned, true) {
                said.reasoning.push_str("\n\n");
            }
            State::Reasoning
        } else {
            if std::mem::replace(&mut self.answered, true) {
                said.content.push_str("\n\n");
            }
            State::Content
        };
    }
}
