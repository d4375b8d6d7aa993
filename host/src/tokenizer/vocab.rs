//! A vocabulary as plain data, and how it is read from GGUF metadata.
//!
//! Source: the `tokenizer.ggml.*` keys of the GGUF specification.

use super::pretokenize::Pretokenizer;
use crate::gguf::{Gguf, GgufError, ValueType};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const SCORES: &str = "tokenizer.ggml.scores";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const EOT: &str = "tokenizer.ggml.eot_token_id";
const EOM: &str = "tokenizer.ggml.eom_token_id";
const UNK: &str = "tokenizer.ggml.unknown_token_id";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";

/// Why a vocabulary cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The metadata cannot be read.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The model has no vocabulary, so it can neither read nor write text.
    #[error("the model has no vocabulary (\"tokenizer.ggml.model\" is missing or \"none\"): it takes token ids only")]
    NoVocabulary,
    /// A kind of tokenizer that is not implemented.
    #[error("\"tokenizer.ggml.model\" {0:?} is not supported; \"gpt2\" and \"llama\" are")]
    Model(String),
    /// A splitting rule that is not known. Another rule would give wrong ids silently.
    #[error("\"tokenizer.ggml.pre\" {0:?} is not supported; {names} are", names = Pretokenizer::names())]
    Pre(String),
    /// A per-token array does not have one element a token.
    #[error("{key:?} has {len} elements, the vocabulary has {n_tokens} tokens")]
    Length {
        /// The array.
        key: &'static str,
        /// Its length.
        len: usize,
        /// The length it should have.
        n_tokens: usize,
    },
    /// An array has elements of the wrong type.
    #[error("{key:?} is an array of {found}, expected {wanted}")]
    ElementType {
        /// The array.
        key: &'static str,
        /// What it holds.
        found: &'static str,
        /// What it should hold.
        wanted: &'static str,
    },
    /// A token type out of range.
    #[error("\"tokenizer.ggml.token_type\": {value} of token {id} is not from 1 to 6")]
    Type {
        /// The token.
        id: usize,
        /// Its type.
        value: i32,
    },
    /// A token id from the file that is not in the vocabulary.
    #[error("{key:?} is {id}, the vocabulary has {n_tokens} tokens")]
    TokenId {
        /// Where the id was read.
        key: &'static str,
        /// The id.
        id: u32,
        /// Number of tokens.
        n_tokens: usize,
    },
    /// A merge that is not two parts with a space between them.
    #[error("\"tokenizer.ggml.merges\": element {index} is not a pair")]
    Merge {
        /// Its place in the list.
        index: usize,
    },
    /// A vocabulary without tokens, or with more than ids can number.
    #[error("\"tokenizer.ggml.tokens\" has {0} elements")]
    Size(usize),
    /// A table could not be built.
    #[error("\"tokenizer.ggml.tokens\": {0}")]
    Build(String),
}

/// What a token is for; the numbers are those of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenType {
    /// Text.
    Normal = 1,
    /// Stands for what has no token.
    Unknown = 2,
    /// Structure, never shown: `<|im_start|>`.
    Control = 3,
    /// Text that is always one token: `<think>`.
    UserDefined = 4,
    /// A gap in the numbering.
    Unused = 5,
    /// One byte of text that has no token: `<0x0A>`.
    Byte = 6,
}

impl TokenType {
    fn from_i32(value: i32) -> Option<TokenType> {
        use TokenType::{Byte, Control, Normal, Unknown, Unused, UserDefined};
        [Normal, Unknown, Control, UserDefined, Unused, Byte].into_iter().find(|&ty| ty as i32 == value)
    }
}

/// How text becomes tokens.
#[derive(Clone, Debug)]
pub enum VocabKind {
    /// Byte-level BPE.
    Bpe {
        /// How text is split into words.
        pre: Pretokenizer,
        /// Pairs of token texts with a space between them, most wanted first.
        merges: Vec<String>,
    },
    /// SentencePiece.
    Spm {
        /// One score a token; the pair whose union scores highest is merged first.
        scores: Vec<f32>,
    },
}

/// A vocabulary as plain data.
#[derive(Clone, Debug)]
pub struct Vocab {
    /// The algorithm and its tables.
    pub kind: VocabKind,
    /// Token texts: for BPE in its byte alphabet, for SentencePiece with `▁` for a space.
    pub tokens: Vec<String>,
    /// One type a token.
    pub types: Vec<TokenType>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<u32>,
    /// `tokenizer.ggml.eot_token_id` and `eom_token_id`: they end a turn.
    pub eot: Vec<u32>,
    /// `tokenizer.ggml.unknown_token_id`.
    pub unk: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`. There is no such field for EOS: a prompt is to be continued.
    pub add_bos: bool,
    /// `tokenizer.ggml.add_space_prefix`; used by SentencePiece only.
    pub add_space_prefix: bool,
}

impl Vocab {
    /// Reads `tokenizer.ggml.*`.
    ///
    /// # Errors
    /// As [`super::Tokenizer::from_gguf`].
    pub fn from_gguf(gguf: &Gguf) -> Result<Vocab, TokenizerError> {
        let model = gguf.opt_str(MODEL)?.unwrap_or("none");
        let spm = match model {
            "none" => return Err(TokenizerError::NoVocabulary),
            "gpt2" => false,
            "llama" => true,
            other => return Err(TokenizerError::Model(other.to_owned())),
        };
        let tokens: Vec<String> = gguf.strings(TOKENS)?.into_iter().map(str::to_owned).collect();
        let in_range = |id: u32| (id as usize) < tokens.len();
        // SentencePiece's own defaults, for files that leave them out.
        let or_default = |id: Option<u32>, default: u32| id.or_else(|| Some(default).filter(|&id| spm && in_range(id)));
        let kind = if spm { spm_kind(gguf)? } else { bpe_kind(gguf)? };
        let add_bos_default = match &kind {
            VocabKind::Bpe { pre, .. } => pre.adds_bos(),
            VocabKind::Spm { .. } => true,
        };
        let vocab = Vocab {
            types: token_types(gguf, tokens.len())?,
            bos: or_default(gguf.opt_u32(BOS)?, 1),
            eos: or_default(gguf.opt_u32(EOS)?, 2),
            eot: [gguf.opt_u32(EOT)?, gguf.opt_u32(EOM)?].into_iter().flatten().collect(),
            unk: or_default(gguf.opt_u32(UNK)?, 0),
            add_bos: gguf.opt_bool(ADD_BOS)?.unwrap_or(add_bos_default),
            add_space_prefix: gguf.opt_bool(ADD_SPACE_PREFIX)?.unwrap_or(spm),
            kind,
            tokens,
        };
        vocab.check()?;
        Ok(vocab)
    }

    /// Checks that the parts fit each other: lengths, and every id.
    pub(super) fn check(&self) -> Result<(), TokenizerError> {
        let n_tokens = self.tokens.len();
        if n_tokens == 0 || u32::try_from(n_tokens).is_err() {
            return Err(TokenizerError::Size(n_tokens));
        }
        let same_length = |key, len| match len == n_tokens {
            true => Ok(()),
            false => Err(TokenizerError::Length { key, len, n_tokens }),
        };
        same_length(TOKEN_TYPE, self.types.len())?;
        if let VocabKind::Spm { scores } = &self.kind {
            same_length(SCORES, scores.len())?;
        }
        let eot = self.eot.iter().map(|&id| (EOT, Some(id)));
        for (key, id) in [(BOS, self.bos), (EOS, self.eos), (UNK, self.unk)].into_iter().chain(eot) {
            if let Some(id) = id.filter(|&id| id as usize >= n_tokens) {
                return Err(TokenizerError::TokenId { key, id, n_tokens });
            }
        }
        Ok(())
    }

    /// The ids and texts that may come out of merging. Control tokens may not: typed text would
    /// become structure.
    pub(super) fn mergeable(&self) -> impl Iterator<Item = (u32, &str)> {
        let usable = |ty| matches!(ty, TokenType::Normal | TokenType::UserDefined | TokenType::Unused);
        let typed = (0u32..).zip(&self.tokens).zip(&self.types);
        typed.filter(move |(_, ty)| usable(**ty)).map(|((id, text), _)| (id, text.as_str()))
    }
}

fn bpe_kind(gguf: &Gguf) -> Result<VocabKind, TokenizerError> {
    let pre = gguf.opt_str(PRE)?.unwrap_or("");
    let pre = Pretokenizer::from_name(pre).ok_or_else(|| TokenizerError::Pre(pre.to_owned()))?;
    let merges = gguf.strings(MERGES)?.into_iter().map(str::to_owned).collect();
    Ok(VocabKind::Bpe { pre, merges })
}

fn spm_kind(gguf: &Gguf) -> Result<VocabKind, TokenizerError> {
    element_type(gguf, SCORES, &[ValueType::F32], "f32")?;
    Ok(VocabKind::Spm { scores: gguf.f32s(SCORES)? })
}

fn token_types(gguf: &Gguf, n_tokens: usize) -> Result<Vec<TokenType>, TokenizerError> {
    if gguf.get(TOKEN_TYPE).is_none() {
        return Ok(vec![TokenType::Normal; n_tokens]);
    }
    element_type(gguf, TOKEN_TYPE, &[ValueType::I32, ValueType::U32], "i32")?;
    let typed = |(id, value)| TokenType::from_i32(value).ok_or(TokenizerError::Type { id, value });
    gguf.i32s(TOKEN_TYPE)?.into_iter().enumerate().map(typed).collect()
}

fn element_type(
    gguf: &Gguf,
    key: &'static str,
    allowed: &[ValueType],
    wanted: &'static str,
) -> Result<(), TokenizerError> {
    let found = gguf.array(key)?.ty();
    match allowed.contains(&found) {
        true => Ok(()),
        false => Err(TokenizerError::ElementType { key, found: found.name(), wanted }),
    }
}
