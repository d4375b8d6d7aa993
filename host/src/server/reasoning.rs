//! Thinking apart from the answer: `<think>…</think>` at the beginning of a reply.
//!
//! Marks may be spread over pieces of text; what could be the beginning of one is held back. Space around the marks is
//! layout and belongs to neither side. The result does not depend on how the text was cut, so a streamed reply and a
//! whole one are equal.

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// At the beginning: a thought may come.
    Start,
    /// At the beginning of a thought or of the answer after one: space is dropped.
    Gap {
        thought: bool,
    },
    Thought,
    Answer,
}

/// Splits one reply.
#[derive(Debug)]
pub(super) struct Splitter {
    state: State,
    held: String,
}

/// Text of each kind, possibly none.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Split {
    pub(super) reasoning: String,
    pub(super) content: String,
}

impl Splitter {
    /// A splitter for a model that thinks; `opened`: the prompt has opened the thought already.
    pub(super) fn new(opened: bool) -> Self {
        Self { state: if opened { State::Gap { thought: true } } else { State::Start }, held: String::new() }
    }

    /// A splitter for a model that does not: everything is answer.
    pub(super) fn off() -> Self {
        Self { state: State::Answer, held: String::new() }
    }

    /// Takes more of the reply.
    pub(super) fn push(&mut self, text: &str) -> Split {
        self.held.push_str(text);
        let mut split = Split::default();
        while self.advance(&mut split) {}
        split
    }

    /// The reply is over: what is held back is what it looked like.
    pub(super) fn finish(&mut self) -> Split {
        let rest = std::mem::take(&mut self.held);
        match self.state {
            State::Start | State::Answer => Split { content: rest, ..Split::default() },
            State::Thought => Split { reasoning: rest.trim_end().to_owned(), ..Split::default() },
            State::Gap { .. } => Split::default(),
        }
    }

    /// Takes one step; `false` when more text is needed.
    fn advance(&mut self, split: &mut Split) -> bool {
        match self.state {
            State::Start => {
                let trimmed = self.held.trim_start();
                if let Some(rest) = trimmed.strip_prefix(OPEN) {
                    self.held = rest.to_owned();
                    self.state = State::Gap { thought: true };
                    return true;
                }
                if OPEN.starts_with(trimmed) {
                    return false;
                }
                self.state = State::Answer;
                true
            }
            State::Gap { thought } => {
                self.held.drain(..self.held.len() - self.held.trim_start().len());
                if self.held.is_empty() {
                    return false;
                }
                self.state = if thought { State::Thought } else { State::Answer };
                true
            }
            State::Thought => self.think(split),
            State::Answer => {
                split.content.push_str(&self.held);
                self.held.clear();
                false
            }
        }
    }

    fn think(&mut self, split: &mut Split) -> bool {
        if let Some(at) = self.held.find(CLOSE) {
            split.reasoning.push_str(self.held[..at].trim_end());
            self.held.drain(..at + CLOSE.len());
            self.state = State::Gap { thought: false };
            return true;
        }
        // Held back: the longest ending that may turn out to be space before a mark, or the beginning of one.
        let mark = (0..self.held.len()).find(|&i| self.held.is_char_boundary(i) && CLOSE.starts_with(&self.held[i..]));
        let text = &self.held[..mark.unwrap_or(self.held.len())];
        let n_certain = text.trim_end().len();
        split.reasoning.push_str(&self.held[..n_certain]);
        self.held.drain(..n_certain);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(mut splitter: Splitter, pieces: &[&str]) -> (String, String) {
        let mut all: Vec<Split> = pieces.iter().map(|piece| splitter.push(piece)).collect();
        all.push(splitter.finish());
        (all.iter().map(|s| s.reasoning.as_str()).collect(), all.iter().map(|s| s.content.as_str()).collect())
    }

    #[test]
    fn the_result_does_not_depend_on_the_cuts() {
        for (opened, text, reasoning, content) in [
            (false, "<think>\nwhy < not?\n</think>\n\nBecause </think> é", "why < not?", "Because </think> é"),
            (true, "\nwell \n é</think>yes", "well \n é", "yes"),
            (false, "  plain <think>", "", "  plain <think>"),
            (false, "<thin", "", "<thin"),
            (false, "<think>cut </thi", "cut </thi", ""),
            (true, "cut off \n", "cut off", ""),
            (false, "<think>\n\n</think>\n\nno thought", "", "no thought"),
        ] {
            let chars: Vec<String> = text.chars().map(String::from).collect();
            let chars: Vec<&str> = chars.iter().map(String::as_str).collect();
            for pieces in [&[text][..], &chars] {
                let got = split(Splitter::new(opened), pieces);
                assert_eq!(got, (reasoning.to_owned(), content.to_owned()), "{pieces:?}");
            }
        }
    }

    #[test]
    fn a_model_that_does_not_think_keeps_its_text() {
        assert_eq!(split(Splitter::off(), &["<think>", " a"]), (String::new(), "<think> a".to_owned()));
    }
}
