//! `response_format: {"type": "json_object"}`: only tokens that keep the reply a beginning of one JSON object.
//!
//! A byte-wise automaton of the grammar decides. It is `Copy`, so that trying a token is to run a copy over its bytes;
//! most tokens fail on their first one.
//!
//! Source: RFC 8259.

use std::sync::Arc;

use crate::engine::TokenMask;
use crate::tokenizer::Tokenizer;

/// Objects and lists inside each other: the bits of a word. Deeper nesting is not offered to the model.
const MAX_DEPTH: u8 = 64;
/// Space in a row: enough for any indentation, and an end to a model that would go on for ever.
const MAX_SPACES: u8 = 64;
/// Ends a thought; the object comes after it.
const CLOSE_THOUGHT: &[u8] = b"</think>";

/// Lets one JSON object through.
pub(super) struct JsonMask {
    tokenizer: Arc<Tokenizer>,
    json: Json,
    /// The last bytes of a thought that is still open: anything may come.
    thought: Option<Vec<u8>>,
}

impl JsonMask {
    /// `opens_thought`: the prompt ends inside a thought, which the reply may finish first.
    pub(super) fn new(tokenizer: Arc<Tokenizer>, opens_thought: bool) -> Self {
        Self { tokenizer, json: Json::START, thought: opens_thought.then(Vec::new) }
    }
}

impl TokenMask for JsonMask {
    fn allow(&mut self, logits: &mut [f32]) {
        if self.thought.is_some() {
            return;
        }
        for (id, logit) in (0..).zip(logits.iter_mut()) {
            let bytes = self.tokenizer.token_bytes(id);
            // Control tokens have no bytes: the end of the text comes by itself, after the last brace.
            if *logit > f32::NEG_INFINITY && (bytes.is_empty() || self.json.after(bytes).is_none()) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    fn accept(&mut self, id: u32) {
        let bytes = self.tokenizer.token_bytes(id);
        let Some(thought) = &mut self.thought else {
            // A token that was not allowed cannot come; if it does, the reply ends.
            self.json = self.json.after(bytes).unwrap_or(Json { at: At::Done, ..self.json });
            return;
        };
        thought.extend_from_slice(bytes);
        let found = thought.windows(CLOSE_THOUGHT.len()).position(|window| window == CLOSE_THOUGHT);
        if let Some(at) = found {
            // What the same token says after the mark is seldom more than space.
            let rest = thought.split_off(at + CLOSE_THOUGHT.len());
            self.json = self.json.after(&rest).unwrap_or(self.json);
            self.thought = None;
        } else {
            let excess = thought.len().saturating_sub(CLOSE_THOUGHT.len() - 1);
            thought.drain(..excess);
        }
    }

    fn is_done(&self) -> bool {
        self.json.at == At::Done
    }
}

/// Where in an object the text stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Json {
    at: At,
    /// The open containers, the innermost in the lowest bit: 1 is an object.
    stack: u64,
    depth: u8,
    /// Space since the last other byte.
    spaces: u8,
    /// Bytes that a character in a string still needs.
    utf8: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Before the object.
    Start,
    /// Before a key; `first`: the object may still end.
    Key {
        first: bool,
    },
    Colon,
    /// Before a value; `first`: the list may still end.
    Value {
        first: bool,
    },
    /// After a value.
    After,
    Text {
        key: bool,
    },
    Escape {
        key: bool,
    },
    /// In `\uXXXX`.
    Hex {
        key: bool,
        left: u8,
    },
    Number(Number),
    /// The rest of `true`, `false` or `null`.
    Word(&'static [u8]),
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Integer,
    Dot,
    Fraction,
    E,
    Sign,
    Exponent,
}

impl Json {
    const START: Json = Json { at: At::Start, stack: 0, depth: 0, spaces: 0, utf8: 0 };

    /// The state after `bytes`; `None` if they cannot follow.
    fn after(mut self, bytes: &[u8]) -> Option<Json> {
        bytes.iter().all(|byte| self.step(*byte)).then_some(self)
    }

    fn step(&mut self, byte: u8) -> bool {
        let between = matches!(self.at, At::Start | At::Key { .. } | At::Colon | At::Value { .. } | At::After);
        if between && matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
            self.spaces += 1;
            return self.spaces <= MAX_SPACES;
        }
        self.spaces = 0;
        match (self.at, byte) {
            (At::Start, b'{') => self.open(true),
            (At::Key { .. }, b'"') => self.go(At::Text { key: true }),
            (At::Key { first: true }, b'}') | (At::Value { first: true }, b']') => self.close(),
            (At::Colon, b':') => self.go(At::Value { first: false }),
            (At::Value { .. }, _) => self.value(byte),
            (At::After, b',') if self.in_object() => self.go(At::Key { first: false }),
            (At::After, b',') => self.go(At::Value { first: false }),
            (At::After, b'}') if self.in_object() => self.close(),
            (At::After, b']') if !self.in_object() => self.close(),
            (At::Text { key }, _) => self.text(byte, key),
            (At::Escape { key }, b'u') => self.go(At::Hex { key, left: 4 }),
            (At::Escape { key }, b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => self.go(At::Text { key }),
            (At::Hex { key, left }, _) if byte.is_ascii_hexdigit() => match left - 1 {
                0 => self.go(At::Text { key }),
                left => self.go(At::Hex { key, left }),
            },
            (At::Number(number), _) => match number.next(byte) {
                Some(next) => self.go(At::Number(next)),
                // A number has no end mark: what follows it ends it.
                None => number.is_whole() && self.go(At::After) && self.step(byte),
            },
            (At::Word([next, rest @ ..]), _) if byte == *next => {
                self.go(if rest.is_empty() { At::After } else { At::Word(rest) })
            }
            _ => false,
        }
    }

    fn go(&mut self, at: At) -> bool {
        self.at = at;
        true
    }

    fn in_object(&self) -> bool {
        self.stack & 1 == 1
    }

    fn open(&mut self, object: bool) -> bool {
        if self.depth == MAX_DEPTH {
            return false;
        }
        self.stack = self.stack << 1 | u64::from(object);
        self.depth += 1;
        self.go(if object { At::Key { first: true } } else { At::Value { first: true } })
    }

    fn close(&mut self) -> bool {
        self.stack >>= 1;
        self.depth -= 1;
        self.go(if self.depth == 0 { At::Done } else { At::After })
    }

    fn value(&mut self, byte: u8) -> bool {
        match byte {
            b'{' => self.open(true),
            b'[' => self.open(false),
            b'"' => self.go(At::Text { key: false }),
            b't' => self.go(At::Word(b"rue")),
            b'f' => self.go(At::Word(b"alse")),
            b'n' => self.go(At::Word(b"ull")),
            b'-' => self.go(At::Number(Number::Minus)),
            b'0' => self.go(At::Number(Number::Zero)),
            b'1'..=b'9' => self.go(At::Number(Number::Integer)),
            _ => false,
        }
    }

    /// A byte inside a string, which has to be UTF-8.
    fn text(&mut self, byte: u8, key: bool) -> bool {
        if self.utf8 > 0 {
            self.utf8 -= 1;
            return matches!(byte, 0x80..=0xBF);
        }
        match byte {
            b'"' => self.go(if key { At::Colon } else { At::After }),
            b'\\' => self.go(At::Escape { key }),
            0x20..=0x7F => true,
            0xC2..=0xF4 => {
                self.utf8 = match byte {
                    0xC2..=0xDF => 1,
                    0xE0..=0xEF => 2,
                    _ => 3,
                };
                true
            }
            _ => false,
        }
    }
}

impl Number {
    fn next(self, byte: u8) -> Option<Number> {
        match (self, byte) {
            (Self::Minus, b'0') => Some(Self::Zero),
            (Self::Minus, b'1'..=b'9') | (Self::Integer, b'0'..=b'9') => Some(Self::Integer),
            (Self::Zero | Self::Integer, b'.') => Some(Self::Dot),
            (Self::Dot | Self::Fraction, b'0'..=b'9') => Some(Self::Fraction),
            (Self::Zero | Self::Integer | Self::Fraction, b'e' | b'E') => Some(Self::E),
            (Self::E, b'+' | b'-') => Some(Self::Sign),
            (Self::E | Self::Sign | Self::Exponent, b'0'..=b'9') => Some(Self::Exponent),
            _ => None,
        }
    }

    fn is_whole(self) -> bool {
        matches!(self, Self::Zero | Self::Integer | Self::Fraction | Self::Exponent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_done_with_their_last_byte_and_not_before() {
        for text in [
            "{}",
            " {\n}",
            r#"{"a": [1, -0.5e+3, [], {}, "é\"\u00e9", true, false, null], "b" : {"c":0}}"#,
            r#"{"👍": 1E9}"#,
        ] {
            assert!(serde_json::from_str::<serde_json::Value>(text).is_ok(), "{text}");
            let mut json = Json::START;
            for (i, byte) in text.bytes().enumerate() {
                assert_ne!(json.at, At::Done, "{text} at {i}");
                assert!(json.step(byte), "{text} at {i}");
            }
            assert_eq!(json.at, At::Done, "{text}");
        }
    }

    #[test]
    fn what_is_no_json_is_refused_at_its_first_wrong_byte() {
        for (text, at) in [
            ("[1]", 0),
            ("{,", 1),
            (r#"{"a" 1"#, 5),
            (r#"{"a":01"#, 6),
            (r#"{"a":1.}"#, 7),
            (r#"{"a":-}"#, 6),
            (r#"{"a":1,}"#, 7),
            (r#"{"a":[1}"#, 7),
            (r#"{"a":[1,]"#, 8),
            (r#"{"a":nul1"#, 8),
            ("{\"a\n", 3),
            (r#"{"\x"#, 3),
            (r#"{"\u00g"#, 6),
            ("{} ", 2),
        ] {
            let mut json = Json::START;
            let wrong = text.bytes().position(|byte| !json.step(byte));
            assert_eq!(wrong, Some(at), "{text}");
        }
        assert_eq!(Json::START.after(b"{\"a\xC3\""), None, "half a character");
        assert_eq!(Json::START.after(b"{\"\xFF"), None);
        assert_eq!(Json::START.after(&[b' '; 65]), None);
        assert_eq!(Json::START.after(format!("{{\"a\":{}", "[".repeat(64)).as_bytes()), None);
    }
}
