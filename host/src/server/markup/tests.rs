//! Replies taken apart, and grammars followed token by token.

use serde_json::{Value, json};

use super::grammar::{Rules, write};
use super::*;
use crate::chat::SpecialTexts;
use crate::server::mask::Grammars;
use crate::server::tools::Tools;
use crate::tokenizer::{Encode, TokenType, Vocab, VocabKind};

/// A vocabulary of bytes, and of control tokens with these texts.
fn bytes_and(control: &[&str]) -> Tokenizer {
    let bytes = (0..=255u8).map(|byte| (format!("<0x{byte:02X}>"), TokenType::Byte));
    let control = ["</s>"].iter().chain(control).map(|text| ((*text).to_owned(), TokenType::Control));
    let others = [("▁".to_owned(), TokenType::Normal), ("<unk>".to_owned(), TokenType::Unknown)];
    let (tokens, types): (Vec<_>, Vec<_>) = bytes.chain(control).chain(others).unzip();
    let scores = vec![0.0; tokens.len()];
    let unk = Some(tokens.len() as u32 - 1);
    let kind = VocabKind::Spm { scores };
    let (bos, eot, eom) = (None, None, None);
    let vocab =
        Vocab { kind, tokens, types, bos, eos: Some(256), eot, eom, unk, add_bos: false, add_space_prefix: false };
    Tokenizer::new(vocab).expect("a vocabulary")
}

fn tool(name: &str, parameters: Value) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": parameters}})
}

/// Tools of a request, as `tools` reads them.
fn tools(offered: &[Value], choice: &str, parallel: bool) -> Tools<'static> {
    let callable = offered.iter().map(|tool| Tool::parse("tools[0]", tool).expect("a tool")).collect();
    Tools { offered: &[], callable, required: choice == "required", parallel }
}

fn weather() -> Value {
    let city = json!({"type": "string"});
    let unit = json!({"enum": ["C", "F"]});
    let days = json!({"type": "integer"});
    tool(
        "weather",
        json!({"type": "object", "properties": {"city": city, "unit": unit, "days": days}, "required": ["city"],
               "additionalProperties": false}),
    )
}

/// How much of `text` a grammar takes, and whether it may end there.
fn follow<'a>(tokenizer: &Tokenizer, lark: &str, text: &'a str) -> (&'a str, bool) {
    let grammar = Grammars::new(tokenizer).and_then(|g| g.compile(lark.to_owned()));
    let grammar = grammar.unwrap_or_else(|why| panic!("{why}\n{lark}"));
    let mut mask = grammar.mask();
    let eos = tokenizer.eos().expect("one") as usize;
    let mut taken = 0;
    for id in tokenizer.encode(text, Encode { bos: false, special: true }) {
        let mut logits = vec![0.0; tokenizer.n_vocab() as usize];
        if mask.is_done() || mask.allow(&mut logits).is_err() || logits[id as usize] < 0.0 {
            return (&text[..text.floor_char_boundary(taken)], false);
        }
        mask.accept(id);
        taken += tokenizer.token_bytes_special(id).len();
    }
    if mask.is_done() {
        return (text, true);
    }
    let mut logits = vec![0.0; tokenizer.n_vocab() as usize];
    mask.allow(&mut logits).expect("it goes on");
    (text, logits[eos] == 0.0)
}

/// A grammar takes the first texts as whole replies, and not the others.
fn check(markup: Markup, tokenizer: &Tokenizer, rules: &Rules<'_>, whole: &[&str], wrong: &[&str]) {
    let lark = write(markup, tokenizer, rules).expect("writable").expect("a grammar");
    for text in whole {
        assert_eq!(follow(tokenizer, &lark, text), (*text, true), "{lark}");
    }
    for text in wrong {
        assert_ne!(follow(tokenizer, &lark, text), (*text, true), "{lark}");
    }
}

const JSON: Markup = Markup::Tags { thinks: false, calls: Some(CallForm::Json) };
const THINKING: Markup = Markup::Tags { thinks: true, calls: Some(CallForm::Json) };
const TAGS: Markup = Markup::Tags { thinks: true, calls: Some(CallForm::Tags) };
const CHANNELS: Markup = Markup::Channels { calls: true };

const ROME: &str =
    "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\", \"days\": 2}}\n</tool_call>";
const NO_CITY: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"days\": 2}}\n</tool_call>";

#[test]
fn calls_as_json_when_they_may_and_when_they_have_to_come() {
    let two = format!("{ROME}\n{ROME}");
    let after = format!("{ROME} and more");
    // The marks are text in one vocabulary and control tokens in the other.
    for tokenizer in [bytes_and(&[]), bytes_and(&["<tool_call>", "</tool_call>"])] {
        let offered = [weather()];
        for (choice, parallel) in [("auto", true), ("required", true), ("required", false)] {
            let tools = tools(&offered, choice, parallel);
            let rules = Rules { tools: &tools, schema: None, opens_thought: false };
            check(JSON, &tokenizer, &rules, &[ROME], &[NO_CITY, &after, "<tool_call>\n{\"name\": \"rain\""]);
            let (ok, no): (&[&str], &[&str]) = if parallel { (&[&two], &[]) } else { (&[], &[&two]) };
            check(JSON, &tokenizer, &rules, ok, no);
            let free = ["Sunny, I think.", "", "a <tool_cal", " \n<b>"];
            let led = format!("Let me see.\n\n{ROME}");
            if choice == "auto" {
                check(JSON, &tokenizer, &rules, &free, &[]);
                check(JSON, &tokenizer, &rules, &[&led], &[]);
            } else {
                check(JSON, &tokenizer, &rules, &[], &free);
                check(JSON, &tokenizer, &rules, &[], &[&led]);
            }
        }
    }
}

#[test]
fn thoughts_come_first_and_may_mention_calls() {
    let tokenizer = bytes_and(&[]);
    let offered = [weather()];
    let thought = "<think>\nShould I <tool_call>?\n</think>\n\n";
    for choice in ["auto", "required"] {
        let tools = tools(&offered, choice, true);
        let rules = Rules { tools: &tools, schema: None, opens_thought: false };
        check(THINKING, &tokenizer, &rules, &[&format!("{thought}{ROME}"), ROME], &[&format!("{thought}{NO_CITY}")]);
        let opened = Rules { opens_thought: true, ..rules };
        let rest = thought.trim_start_matches("<think>");
        check(THINKING, &tokenizer, &opened, &[&format!("{rest}{ROME}")], &[&format!("{rest}{NO_CITY}"), ROME]);
        if choice == "auto" {
            check(THINKING, &tokenizer, &opened, &[&format!("{rest}Yes.")], &[]);
        }
    }
    let none = Tools::default();
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    let rules = Rules { tools: &none, schema: Some(&schema), opens_thought: false };
    check(THINKING, &tokenizer, &rules, &["{\"a\": 1}", "<think>hm</think>\n\n{\"a\":\n1}"], &["hm {\"a\":1}", "{}"]);
    check(JSON, &tokenizer, &rules, &["{\"a\": 1}"], &["<think>hm</think>{\"a\":1}"]);
}

#[test]
fn an_answer_of_a_schema_or_a_call() {
    let tokenizer = bytes_and(&[]);
    let tools = tools(&[weather()], "auto", true);
    let schema = json!({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer", "minimum": 3}}});
    let rules = Rules { tools: &tools, schema: Some(&schema), opens_thought: false };
    check(JSON, &tokenizer, &rules, &["3", "41", ROME], &["2", "three", "3 ", "Let me see. "]);
    let word = format!("<|channel|>final<|message|>{}", 7);
    check(CHANNELS, &tokenizer, &rules, &[&word], &["<|channel|>final<|message|>seven"]);
}

#[test]
fn calls_with_tags() {
    let tokenizer = bytes_and(&[]);
    let call = |arguments: &str| format!("<tool_call>\n<function=weather>\n{arguments}</function>\n</tool_call>");
    let argument = |name: &str, value: &str| format!("<parameter={name}>\n{value}\n</parameter>\n");
    let tools = tools(&[weather()], "required", true);
    let rules = Rules { tools: &tools, schema: None, opens_thought: false };
    let good = [
        call(&argument("city", "a \"b\"\n</x>")),
        call(&format!("{}{}{}", argument("city", ""), argument("unit", "F"), argument("days", "-3"))),
    ];
    let bad = [
        call(""),
        call(&argument("town", "Rome")),
        call(&format!("{}{}", argument("city", "Rome"), argument("unit", "K"))),
        call(&format!("{}{}", argument("city", "Rome"), argument("days", "two"))),
    ];
    let (good, bad) = (good.each_ref().map(String::as_str), bad.each_ref().map(String::as_str));
    check(TAGS, &tokenizer, &rules, &good, &bad);

    let odd = json!({"type": "object", "properties": {"a>\n": {"type": "string"}}});
    let odd = super::tests::tools(&[tool("f", odd)], "auto", true);
    let rules = Rules { tools: &odd, schema: None, opens_thought: false };
    assert!(write(TAGS, &tokenizer, &rules).expect_err("no").contains("line breaks"));
    assert!(write(JSON, &tokenizer, &rules).expect("in JSON it is fine").is_some());
}

#[test]
fn calls_in_channels() {
    let thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant";
    let call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\": \"Rome\"}";
    let other = " to=functions.weather<|channel|>commentary json<|message|>{\"city\": \"Rome\"}";
    let answer = "<|channel|>final<|message|>Sunny.";
    for tokenizer in [bytes_and(&[]), bytes_and(&channels::MARKS)] {
        for choice in ["auto", "required"] {
            let tools = tools(&[weather()], choice, true);
            let rules = Rules { tools: &tools, schema: None, opens_thought: false };
            let (thought_call, thought_answer) = (format!("{thought}{call}"), format!("{thought}{answer}"));
            check(CHANNELS, &tokenizer, &rules, &[&thought_call, call, other], &["Sunny.", thought]);
            let whole = choice == "auto";
            let both = [answer, thought_answer.as_str()];
            check(CHANNELS, &tokenizer, &rules, if whole { &both } else { &[] }, if whole { &[] } else { &both });
        }
    }
}

#[test]
fn what_cannot_be_a_grammar_is_said() {
    let tokenizer = bytes_and(&[]);
    let grammars = Grammars::new(&tokenizer).expect("a trie");
    let none = Tools::default();
    let deep = (0..100).fold(json!({"type": "integer"}), |inner, _| json!({"type": "array", "items": inner}));
    for (schema, compiles) in [
        (json!({}), true),
        (json!({"type": "object", "x-guidance": 5}), true),
        (deep, true),
        (json!({"type": "strnig"}), false),
        (json!({"type": "object", "if": {}, "then": {}}), false),
        (json!({"$ref": "#/nowhere"}), false),
        (json!({"$ref": "https://example.org/schema"}), false),
        (json!({"type": "string", "pattern": "("}), false),
        (json!({"type": "string", "pattern": "(((a{1,1000}){1,1000}){1,1000}){1,1000}b"}), true),
        (json!({"type": "integer", "minimum": 3, "maximum": 2}), false),
        (json!({"enum": ["x".repeat(300_000)]}), false),
    ] {
        let rules = Rules { tools: &none, schema: Some(&schema), opens_thought: false };
        let lark = write(Markup::PLAIN, &tokenizer, &rules).expect("writable").expect("a grammar");
        let start = std::time::Instant::now();
        let compiled = grammars.compile(lark);
        assert_eq!(compiled.as_ref().err().is_none(), compiles, "{:?}: {schema:.200}", compiled.err());
        assert!(start.elapsed().as_secs() < 5, "{:?}: {schema:.200}", start.elapsed());
    }
}

/// A schema is the client's: whatever it says, it costs a bounded time and no panic, at first and for every token.
#[test]
fn hostile_schemas_are_bounded() {
    let tokenizer = bytes_and(&[]);
    let grammars = Grammars::new(&tokenizer).expect("a trie");
    let none = Tools::default();
    let words: Vec<String> = (0..9000).map(|i| format!("word {i} {}", i * 7919)).collect();
    let object =
        |n: usize| (0..n).map(|i| (format!("p{i}"), json!({"type": "integer"}))).collect::<serde_json::Map<_, _>>();
    let nested = (0..12).fold(json!({"type": "string"}), |inner, i| {
        json!({"anyOf": [{"type": "object", "properties": {(format!("a{i}")): inner}}, {"type": "array", "items": inner}]})
    });
    for schema in [
        json!({"enum": words}),
        json!({"type": "object", "properties": object(3000)}),
        json!({"type": "object", "properties": object(500), "required": object(500).keys().collect::<Vec<_>>()}),
        nested,
        json!({"type": "array", "minItems": 100_000, "items": {"type": "integer"}}),
        json!({"type": "array", "maxItems": 1_000_000_000, "items": {"type": "integer"}}),
        json!({"type": "string", "minLength": 1_000_000_000}),
        json!({"type": "string", "pattern": "^(a|b|ab)*(.*x){40}(a?){60}a{60}$"}),
        json!({"type": "string", "pattern": "^(.*a.*|.*b.*|.*c.*){30}$"}),
        json!({"type": "string", "pattern": "(?=a)b"}),
        json!({"type": "string", "format": "no-such-format"}),
        json!({"type": "number", "multipleOf": 1e-300, "minimum": -1e308, "maximum": 1e308}),
        json!({"type": "integer", "minimum": -9.0e18, "maximum": 9.0e18}),
        json!({"allOf": [{"$ref": "#"}]}),
        json!({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}),
        json!({"type": "object", "patternProperties": {"^(a+)+$": {"$ref": "#"}, "(": {}}}),
        json!({"not": {}}),
    ] {
        let rules = Rules { tools: &none, schema: Some(&schema), opens_thought: false };
        let lark = write(Markup::PLAIN, &tokenizer, &rules).expect("writable").expect("a grammar");
        let start = std::time::Instant::now();
        if let Ok(grammar) = grammars.compile(lark) {
            let mut mask = grammar.mask();
            for _ in 0..12 {
                let mut logits = vec![0.0; tokenizer.n_vocab() as usize];
                if mask.is_done() || mask.allow(&mut logits).is_err() {
                    break;
                }
                // A letter where one may come: patterns are at their worst in the middle.
                let good = |id: &usize| logits[*id] == 0.0;
                let Some(id) = (97..123).find(good).or((0..logits.len()).find(good)) else { break };
                mask.accept(id as u32);
            }
        }
        assert!(start.elapsed().as_secs() < 20, "{:?}: {:.200}", start.elapsed(), schema.to_string());
    }
}

/// What a reader says of a text in one piece, which has to be what it says of single characters.
fn read(markup: Markup, opened: bool, tools: &[Value], text: &str) -> (Said, bool) {
    let tools: Arc<[Tool]> = tools.iter().map(|tool| Tool::parse("", tool).expect("a tool")).collect();
    let said = |pieces: &mut dyn Iterator<Item = &str>| {
        let mut reader = markup.reader(opened, &tools);
        let mut said = Said::default();
        pieces.for_each(|piece| said.extend(reader.push(piece)));
        let called = reader.called();
        said.extend(reader.finish());
        (said, called)
    };
    let whole = said(&mut std::iter::once(text));
    let mut cuts: Vec<usize> = text.char_indices().map(|(i, _)| i).collect();
    cuts.push(text.len());
    assert_eq!(said(&mut cuts.windows(2).map(|cut| &text[cut[0]..cut[1]])), whole, "{text}");
    whole
}

fn said(reasoning: &str, content: &str, calls: &[(&str, &str)]) -> Said {
    let call = |(index, (name, arguments)): (usize, &(&str, &str))| CallPiece {
        index,
        name: Some((*name).to_owned()),
        arguments: (*arguments).to_owned(),
    };
    let calls = calls.iter().enumerate().map(call).collect();
    Said { reasoning: reasoning.to_owned(), content: content.to_owned(), calls }
}

#[test]
fn thoughts_are_read_apart() {
    for (opened, text, reasoning, content) in [
        (false, "<think>\nwhy < not?\n</think>\n\nBecause </think> é", "why < not?", "Because </think> é"),
        (true, "\nwell \n é</think>yes", "well \n é", "yes"),
        (false, "  plain <think>", "", "  plain <think>"),
        (false, "<thin", "", "<thin"),
        (false, "<think>cut </thi", "cut </thi", ""),
        (true, "cut off \n", "cut off", ""),
        (false, "<think>\n\n</think>\n\nno thought", "", "no thought"),
    ] {
        assert_eq!(read(THINKING, opened, &[], text), (said(reasoning, content, &[]), false), "{text}");
    }
    assert_eq!(read(Markup::PLAIN, false, &[], "<think> a").0, said("", "<think> a", &[]));
    assert_eq!(read(JSON, false, &[], ROME).0, said("", ROME, &[]), "no tools, no calls");
}

#[test]
fn calls_are_read_piece_by_piece() {
    let rome = ("weather", "{\"city\": \"Rome\", \"days\": 2}");
    let tools = [weather()];
    for (text, want, called) in [
        (format!("See.\n{ROME}\n{ROME}"), said("", "See.", &[rome, rome]), true),
        (format!("<think>a</think>\n\n{ROME}\n"), said("a", "", &[rome]), true),
        ("no <tool call> \n".to_owned(), said("", "no <tool call> \n", &[]), false),
        ("<tool_call>\n{\"na".to_owned(), said("", "<tool_call>\n{\"na", &[]), false),
        (
            ROME[..ROME.find(", \"days").expect("it is there")].to_owned(),
            said("", "", &[("weather", "{\"city\": \"Rome\"")]),
            false,
        ),
    ] {
        assert_eq!(read(THINKING, false, &tools, &text), (want, called), "{text}");
    }
    let text = "<tool_call>\n<function=weather>\n<parameter=city>\n12\n\"é\"\n</parameter>\n<parameter=days>\n3\n\
                </parameter>\n<parameter=other>\n[1]\n</parameter>\n<parameter=more>\nwell\n</parameter>\n\
                </function>\n</tool_call>";
    let arguments = r#"{"city": "12\n\"é\"", "days": 3, "other": [1], "more": "well"}"#;
    assert_eq!(read(TAGS, false, &tools, text), (said("", "", &[("weather", arguments)]), true));
    let empty = "<tool_call>\n<function=weather>\n</function>\n</tool_call>";
    assert_eq!(read(TAGS, false, &tools, empty), (said("", "", &[("weather", "{}")]), true));
}

#[test]
fn channels_are_read_apart() {
    let thought = "<|channel|>analysis<|message|>Hm <|.<|end|><|start|>assistant";
    let call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"a\": \"}\"}";
    for (text, want, called) in [
        (format!("{thought}<|channel|>final<|message|>Yes."), said("Hm <|.", "Yes.", &[]), false),
        (format!("{thought}{call}"), said("Hm <|.", "", &[("weather", "{\"a\": \"}\"}")]), true),
        (
            format!("<|channel|>commentary<|message|>First.<|end|><|start|>assistant{call}"),
            said("", "First.", &[("weather", "{\"a\": \"}\"}")]),
            true,
        ),
        (format!("{thought}{thought}"), said("Hm <|.\n\nHm <|.", "", &[]), false),
        ("no channel".to_owned(), said("", "no channel", &[]), false),
        ("<|channel|>fin".to_owned(), said("", "", &[]), false),
        (" to=functions.f<|channel|>commentary json<|message|>{".to_owned(), said("", "", &[("f", "{")]), false),
    ] {
        assert_eq!(read(CHANNELS, false, &[weather()], &text), (want, called), "{text}");
    }
}

#[test]
fn a_template_tells_how_its_model_writes() {
    let of = |source: &str| Markup::of(&Template::new(source, SpecialTexts::default()).expect("a template"));
    let tools = "{% for t in tools %}{{ t.function.name }}{% endfor %}";
    assert_eq!(of("{{ messages[0].content }}"), Markup::PLAIN);
    assert_eq!(of(&format!("{tools}<tool_call>{{\"name\"")), JSON);
    assert_eq!(of(&format!("{tools}<tool_call><function=x></think>")), TAGS);
    assert_eq!(of("<tool_call></think>"), Markup::Tags { thinks: true, calls: None });
    assert_eq!(of(&format!("{tools}<|channel|>final<|message|>")), CHANNELS);
}
