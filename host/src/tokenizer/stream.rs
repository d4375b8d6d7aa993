//! Decoding one token at a time. A character may be spread over several tokens, and no piece of the
//! output may hold half of one.

use super::Tokenizer;

/// Turns tokens into text as they come.
#[derive(Clone, Debug)]
pub struct TokenStream {
    tokenizer: Tokenizer,
    special: bool,
    /// The start of a character whose rest has not come: at most three bytes.
    pending: Vec<u8>,
    /// The last piece of text.
    text: String,
}

impl TokenStream {
    pub(super) fn new(tokenizer: Tokenizer, special: bool) -> TokenStream {
        TokenStream { tokenizer, special, pending: Vec::with_capacity(8), text: String::new() }
    }

    /// The text that `id` completes; empty while a character is incomplete. Bytes that cannot be
    /// part of any character become U+FFFD at once.
    pub fn push(&mut self, id: u32) -> &str {
        self.text.clear();
        self.pending.extend(self.tokenizer.inner.pieces.bytes(id, self.special));
        let mut done = 0;
        loop {
            let rest = &self.pending[done..];
            let error = match std::str::from_utf8(rest) {
                Ok(valid) => {
                    self.text.push_str(valid);
                    done += rest.len();
                    break;
                }
                Err(error) => error,
            };
            let (valid, _) = rest.split_at(error.valid_up_to());
            self.text.push_str(std::str::from_utf8(valid).expect("from_utf8 said that it is valid"));
            done += valid.len();
            match error.error_len() {
                Some(n_bytes) => {
                    self.text.push(char::REPLACEMENT_CHARACTER);
                    done += n_bytes;
                }
                None => break,
            }
        }
        self.pending.drain(..done);
        &self.text
    }

    /// Ends the stream: a character that was never completed becomes U+FFFD.
    pub fn finish(&mut self) -> &str {
        self.text.clear();
        if !self.pending.is_empty() {
            self.pending.clear();
            self.text.push(char::REPLACEMENT_CHARACTER);
        }
        &self.text
    }
}
