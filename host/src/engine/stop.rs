//! Stop strings across token borders.
//!
//! Text is released as soon as it cannot be the beginning of a stop string. The stop that completes first wins (the
//! longer of two that end together), which does not depend on how the text was cut into tokens; so a streamed reply
//! and a whole one are equal.

/// Watches a reply for stop strings.
#[derive(Debug, Default)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// Received but not released: a proper beginning of some stop string.
    held: String,
}

/// What came of more text.
#[derive(Debug, PartialEq, Eq)]
pub enum Matched<'a> {
    /// This much is certain to be part of the reply.
    Text(String),
    /// A stop string is complete; the reply ends with this text.
    Stop {
        /// Text before the stop string that was not released yet.
        text: String,
        /// The stop string.
        stop: &'a str,
    },
}

impl StopMatcher {
    /// Watches for these; empty ones are ignored.
    pub fn new(stops: Vec<String>) -> Self {
        Self { stops: stops.into_iter().filter(|s| !s.is_empty()).collect(), held: String::new() }
    }

    /// Takes more of the reply.
    pub fn push(&mut self, text: &str) -> Matched<'_> {
        if self.stops.is_empty() {
            return Matched::Text(text.to_owned());
        }
        self.held.push_str(text);
        let found = self
            .stops
            .iter()
            .filter_map(|stop| self.held.find(stop.as_str()).map(|start| (start + stop.len(), start, stop)))
            .min_by_key(|&(end, start, _)| (end, start));
        if let Some((_, start, stop)) = found {
            let mut text = std::mem::take(&mut self.held);
            text.truncate(start);
            return Matched::Stop { text, stop };
        }
        let keep = self.held.char_indices().map(|(i, _)| i).find(|&i| self.is_beginning(&self.held[i..]));
        let tail = self.held.split_off(keep.unwrap_or(self.held.len()));
        Matched::Text(std::mem::replace(&mut self.held, tail))
    }

    /// The reply is over: what was held back is part of it after all.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    fn is_beginning(&self, text: &str) -> bool {
        self.stops.iter().any(|stop| stop.starts_with(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reply to pieces that arrive one by one, and the stop string that ended it.
    fn reply(stops: &[&str], pieces: &[&str]) -> (Vec<String>, Option<String>) {
        let mut matcher = StopMatcher::new(stops.iter().map(|s| s.to_string()).collect());
        let mut out = Vec::new();
        for piece in pieces {
            match matcher.push(piece) {
                Matched::Text(text) => out.push(text),
                Matched::Stop { text, stop } => {
                    let stop = stop.to_owned();
                    out.push(text);
                    return (out, Some(stop));
                }
            }
        }
        out.push(matcher.finish());
        (out, None)
    }

    #[test]
    fn a_stop_that_spans_tokens_is_found_and_never_shown() {
        let (out, stop) = reply(&["own fox"], &["The quick br", "own", " fox jumps"]);
        assert_eq!(out, ["The quick br", "", ""]);
        assert_eq!(stop.as_deref(), Some("own fox"));
    }

    #[test]
    fn held_text_that_was_no_stop_is_released() {
        let (out, stop) = reply(&["own cat"], &["The quick br", "own", " fox jumps"]);
        assert_eq!((out.concat().as_str(), stop), ("The quick brown fox jumps", None));
        let (out, stop) = reply(&["own cat"], &["The quick br", "own ca"]);
        assert_eq!((out, stop), (vec!["The quick br".into(), "".into(), "own ca".into()], None));
    }

    #[test]
    fn stop_inside_one_token() {
        let (out, stop) = reply(&["b"], &["abc"]);
        assert_eq!((out.concat().as_str(), stop.as_deref()), ("a", Some("b")));
    }

    #[test]
    fn the_stop_that_completes_first_wins_however_the_text_is_cut() {
        for pieces in [&["xabcd"][..], &["xa", "bcd"], &["x", "a", "b", "c", "d"]] {
            let (out, stop) = reply(&["abcd", "bc"], pieces);
            assert_eq!((out.concat().as_str(), stop.as_deref()), ("xa", Some("bc")), "{pieces:?}");
        }
        let (out, stop) = reply(&["c", "bc"], &["abc"]);
        assert_eq!((out.concat().as_str(), stop.as_deref()), ("a", Some("bc")), "of two that end together the longer");
    }

    #[test]
    fn the_longest_possible_beginning_is_held_back() {
        let (out, stop) = reply(&["aab"], &["aa", "a", "b"]);
        assert_eq!((out, stop.as_deref()), (vec!["".into(), "a".into(), "".into()], Some("aab")));
    }

    #[test]
    fn whole_characters_only() {
        let (out, stop) = reply(&["👍🏽!"], &["ok 👍", "🏽", "? 👍🏽!"]);
        assert_eq!((out.concat().as_str(), stop.as_deref()), ("ok 👍🏽? ", Some("👍🏽!")));
        assert_eq!(out[0], "ok ");
    }

    #[test]
    fn empty_stops_are_ignored() {
        assert_eq!(reply(&["", "z"], &["ab", "cz"]).0.concat(), "abc");
        assert_eq!(reply(&[""], &["ab"]), (vec!["ab".into(), String::new()], None));
    }
}
