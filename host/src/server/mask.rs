//! Grammars: which tokens keep a reply the beginning of a text that a grammar has.
//!
//! `llguidance` does the work: it walks a trie of all tokens' bytes, built once per model, with a lexer and an Earley
//! parser. A grammar is a text in its variant of Lark, which [`markup`](super::markup) writes. Tokens whose text is
//! hidden (control tokens) match no text: a grammar names them by id.
//!
//! Source: <https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md>.

use std::sync::Arc;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};

use crate::engine::TokenMask;
use crate::tokenizer::Tokenizer;

/// Bytes of a grammar's text, schemas included. Compiling one takes a thread, and time that grows with it.
const MAX_GRAMMAR_BYTES: usize = 256 << 10;
/// One or two KiB each; a reply that needs more ends with an error.
const MAX_LEXER_STATES: usize = 50_000;
/// The trie has a depth that it can hold; a longer token is never chosen under a grammar.
const MAX_TOKEN_BYTES: usize = 512;

/// Compiles grammars for one vocabulary.
pub(super) struct Grammars {
    factory: ParserFactory,
}

/// A grammar that is known to compile, for any number of replies.
pub(super) struct Grammar {
    start: Matcher,
}

/// One reply's way through a grammar.
struct GrammarMask {
    matcher: Matcher,
}

impl Grammars {
    /// Builds the trie of a vocabulary.
    ///
    /// # Errors
    /// The vocabulary has no token that ends a text.
    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Self, String> {
        let ids = 0..tokenizer.n_vocab();
        let words: Vec<Vec<u8>> = ids.clone().map(|id| word(tokenizer, id)).collect();
        let ends: Vec<u32> = ids.filter(|id| tokenizer.is_eog(*id)).collect();
        let Some(end) = ends.first() else { return Err("the vocabulary has no token that ends a text".to_owned()) };
        let trie = TokTrie::from(&TokRxInfo::new(tokenizer.n_vocab(), *end), &words).with_eos_tokens(&ends);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory =
            ParserFactory::new(&env, InferenceCapabilities::default(), &slices).map_err(|e| e.to_string())?;
        // Warnings would go to stderr; what a client has to know is an error.
        factory.quiet();
        let limits =
            ParserLimits { max_lexer_states: MAX_LEXER_STATES, verbose_errors: false, ..ParserLimits::default() };
        *factory.limits_mut() = limits;
        Ok(Self { factory })
    }

    /// Compiles a grammar.
    ///
    /// # Errors
    /// Why it cannot be: what a schema asks for is not supported, contradicts itself, or is too much.
    pub(super) fn compile(&self, lark: String) -> Result<Grammar, String> {
        if lark.len() > MAX_GRAMMAR_BYTES {
            return Err(format!("it has {} bytes; at most {MAX_GRAMMAR_BYTES} are allowed", lark.len()));
        }
        let parser = self.factory.create_parser(TopLevelGrammar::from_lark(lark)).map_err(|e| e.to_string())?;
        let start = Matcher::new(Ok(parser));
        match start.get_error() {
            None => Ok(Grammar { start }),
            Some(why) => Err(why),
        }
    }
}

/// A token's bytes as the trie has them: hidden ones behind a mark, and nothing for what cannot be text.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let shown = tokenizer.token_bytes(id);
    let mut word = Vec::new();
    if shown.is_empty() {
        word.push(TokTrie::SPECIAL_TOKEN_MARKER);
        word.extend_from_slice(tokenizer.token_bytes_special(id));
    } else if shown[0] != TokTrie::SPECIAL_TOKEN_MARKER {
        word.extend_from_slice(shown);
    }
    if word.len() > MAX_TOKEN_BYTES { Vec::new() } else { word }
}

impl Grammar {
    /// The mask of a new reply. The replies of one request share what their lexers find out.
    pub(super) fn mask(&self) -> Box<dyn TokenMask> {
        Box::new(GrammarMask { matcher: self.start.clone() })
    }
}

impl TokenMask for GrammarMask {
    fn allow(&mut self, logits: &mut [f32]) -> Result<(), String> {
        let allowed = self.matcher.compute_mask().map_err(|e| format!("the grammar cannot be followed: {e}"))?;
        let words = allowed.as_slice();
        for (chunk, word) in logits.chunks_mut(32).zip(words) {
            if *word != u32::MAX {
                let banned = |i: usize| word & (1 << i) == 0;
                chunk.iter_mut().enumerate().filter(|(i, _)| banned(*i)).for_each(|(_, l)| *l = f32::NEG_INFINITY);
            }
        }
        if let Some(rest) = logits.get_mut(words.len() * 32..) {
            rest.fill(f32::NEG_INFINITY);
        }
        Ok(())
    }

    fn accept(&mut self, id: u32) {
        // A failure stays in the matcher: `allow` reports it before the next token.
        self.matcher.consume_token(id).ok();
    }

    fn is_done(&self) -> bool {
        self.matcher.is_stopped() && !self.matcher.is_error()
    }
}
