//! From tokens to text: a scripted model with a real vocabulary.

use std::sync::Arc;

use host::engine::mock::{Mock, Script};
use host::engine::{Engine, EngineOptions, Event, FinishReason, Request, StopCause, TokenMask, Usage};
use host::gguf::Gguf;
use host::model::config::Config;
use host::model::executor::Limits;
use host::tokenizer::{Encode, Tokenizer};

use crate::checkout;

const PROMPT: [u32; 3] = [1, 2, 3];

pub(super) struct Model {
    config: Config,
    pub(super) tokenizer: Arc<Tokenizer>,
    /// Whether the mock chooses tokens, and so may be a step ahead.
    pub(super) chooses: bool,
}

pub(super) fn model() -> Model {
    let gguf = Gguf::open(&checkout::zinc_tiny()).expect("a model");
    let tokenizer = Arc::new(Tokenizer::from_gguf(&gguf).expect("its vocabulary"));
    Model { config: Config::from_gguf(&gguf).expect("its shape"), tokenizer, chooses: false }
}

impl Model {
    /// The ids of each piece, tokenised alone.
    pub(super) fn ids(&self, pieces: &[&str]) -> Vec<u32> {
        pieces.iter().flat_map(|piece| self.tokenizer.encode(piece, Encode::default())).collect()
    }

    /// What the engine makes of a model that replies with `ids`.
    pub(super) fn reply(&self, ids: &[u32], request: Request) -> (Vec<String>, FinishReason, Usage) {
        let replies = vec![(PROMPT.to_vec(), ids.to_vec())];
        let script = Script { replies, chooses: self.chooses, ..Script::default() };
        let limits = Limits { n_pages: 8, n_slots: 4, n_batch: 64, n_outputs: 4 };
        let mock = Mock::new(self.config.clone(), limits, script);
        let tokenizer = Some(self.tokenizer.clone());
        let mut engine = Engine::new(Box::new(mock), tokenizer, None, &EngineOptions::default()).expect("an engine");
        engine.submit(Request { prompt: PROMPT.to_vec(), ..request }).expect("a good request");
        let (mut texts, mut end) = (Vec::new(), None);
        while !engine.is_idle() {
            for event in engine.step() {
                match event {
                    Event::Text { text, .. } => texts.push(text),
                    Event::Finished { reason, usage, .. } => end = Some((reason, usage)),
                    _ => {}
                }
            }
        }
        let (reason, usage) = end.expect("the request ends");
        (texts, reason, usage)
    }

    /// The joined text and the stop string that ended it, for pieces and stop strings.
    fn stopped(&self, pieces: &[&str], stop: &[&str]) -> (String, Option<String>) {
        let ids = self.ids(pieces);
        let stop = stop.iter().map(|s| s.to_string()).collect();
        let (texts, reason, _) =
            self.reply(&ids, Request { stop, max_tokens: Some(ids.len() as u32), ..Request::default() });
        for text in &texts {
            assert!(!text.contains('\u{fffd}'), "half a character in {texts:?}");
        }
        match reason {
            FinishReason::Stop(StopCause::StopString(stop)) => (texts.concat(), Some(stop)),
            FinishReason::Length => (texts.concat(), None),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_stop_string_over_token_borders_is_neither_missed_nor_shown() {
    let model = model();
    let pieces = ["The quick br", "own", " fox jumps"];
    let all = "The quick brown fox jumps".to_owned();
    assert_eq!(model.stopped(&pieces, &["own fox"]), ("The quick br".into(), Some("own fox".into())));
    assert_eq!(model.stopped(&pieces, &["own cat"]), (all.clone(), None));
    assert_eq!(model.stopped(&pieces, &["jumps!"]), (all.clone(), None), "the held tail is released at the end");
    assert_eq!(model.stopped(&pieces, &["ui"]), ("The q".into(), Some("ui".into())), "inside a token");
    assert_eq!(model.stopped(&pieces, &["jumps", "brown"]), ("The quick ".into(), Some("brown".into())));
    assert_eq!(model.stopped(&pieces, &["", "fox"]), ("The quick brown ".into(), Some("fox".into())));
    assert_eq!(model.stopped(&pieces, &[""]), (all, None));
}

#[test]
fn characters_spread_over_tokens_come_whole() {
    let model = model();
    let text = "a 👍🏽 日本 b";
    assert!(model.ids(&["👍🏽"]).len() > 2, "the emoji is several tokens");
    assert_eq!(model.stopped(&[text], &[]), (text.into(), None));
    assert_eq!(model.stopped(&[text], &["🏽 日"]), ("a 👍".into(), Some("🏽 日".into())));
    assert_eq!(model.stopped(&[text], &["本 c"]), (text.into(), None));
}

#[test]
fn a_character_cut_by_the_limit_becomes_one_replacement() {
    let model = model();
    let ids = model.ids(&["a👍"]);
    let n = ids.len() as u32 - 1;
    let (texts, reason, _) = model.reply(&ids, Request { max_tokens: Some(n), ..Request::default() });
    assert_eq!((texts.concat().as_str(), reason), ("a\u{fffd}", FinishReason::Length));
}

#[test]
fn end_of_generation_is_a_stop_and_not_shown() {
    let model = model();
    let eos = model.tokenizer.eos().expect("an EOS token");
    let mut ids = model.ids(&["Hello"]);
    ids.push(eos);
    let n_said = ids.len() as u32;
    ids.extend(model.ids(&[" more"]));
    let (texts, reason, usage) = model.reply(&ids, Request { max_tokens: Some(40), ..Request::default() });
    assert_eq!((texts.concat().as_str(), reason), ("Hello", FinishReason::Stop(StopCause::EndOfGeneration(eos))));
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (3, n_said));

    let ignore = Request { ignore_eos: true, max_tokens: Some(ids.len() as u32), ..Request::default() };
    let (texts, reason, _) = model.reply(&ids, ignore);
    assert_eq!((texts.concat().as_str(), reason), ("Hello more", FinishReason::Length));
}

#[test]
fn rows_that_pad_the_head_are_never_said() {
    let mut model = model();
    let n_tokens = model.tokenizer.n_vocab();
    model.config.n_vocab = n_tokens as usize + 20;
    // The head prefers a row without a token; the runner-up is said instead, and the request goes on.
    let (texts, reason, usage) =
        model.reply(&[n_tokens + 10], Request { max_tokens: Some(4), ignore_eos: true, ..Request::default() });
    assert_eq!((reason, usage.completion_tokens), (FinishReason::Length, 4));
    assert!(!texts.concat().is_empty());
}

/// Allows the given ids, one after the other.
struct Only(Vec<u32>);

impl TokenMask for Only {
    fn allow(&mut self, logits: &mut [f32]) -> Result<(), String> {
        let allowed = self.0.first().copied();
        for (id, logit) in (0..).zip(logits) {
            if Some(id) != allowed {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    fn accept(&mut self, id: u32) {
        assert_eq!(self.0.remove(0), id);
    }

    fn is_done(&self) -> bool {
        self.0.is_empty()
    }
}

#[test]
fn a_mask_decides_what_is_said_and_when_it_is_over() {
    let model = model();
    let mask = Box::new(Only(model.ids(&["{\"a\": 1}"])));
    let request = Request { mask: Some(mask), max_tokens: Some(40), ..Request::default() };
    let (texts, reason, _) = model.reply(&model.ids(&["Hello"]), request);
    assert_eq!((texts.concat().as_str(), reason), ("{\"a\": 1}", FinishReason::Stop(StopCause::Mask)));
}
