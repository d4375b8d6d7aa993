//! Chat templates: against Jinja2's own output, and the rules about who may write control tokens.

mod markers;
mod messages;

use host::chat::{Chat, Message, Role, SpecialTexts, Template, TemplateError};
use host::tokenizer::Tokenizer;
use serde_json::{Map, Value as Json, json};

use crate::checkout;
use crate::tokenizer::tokenizer;

fn data(name: &str) -> String {
    let path = checkout::path("tests/data").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn special(control: &[&str]) -> SpecialTexts {
    let control = control.iter().map(|text| (*text).to_owned()).collect();
    SpecialTexts { bos: "<|bos|>".to_owned(), eos: "<|eos|>".to_owned(), control }
}

const MARKERS: [&str; 12] = [
    "<|bos|>",
    "<|eos|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|call|>",
];

fn template(name: &str, control: &[&str]) -> Template {
    Template::new(&data(&format!("templates/{name}")), special(control)).expect("the test's template parses")
}

fn inline(source: &str) -> Template {
    Template::new(source, special(&[])).expect("the test's template parses")
}

/// Renders with contents of user messages in `m`.
fn render(source: &str, contents: &[&str]) -> Result<String, TemplateError> {
    let messages: Vec<Message> = contents.iter().map(|text| Message::new(Role::User, *text)).collect();
    let chat = Chat { messages: &messages, ..Chat::default() };
    inline(source).render(&chat).map(|prompt| prompt.text())
}

#[test]
fn templates_render_as_jinja2_renders_them() {
    // Made by templates/golden.py.
    let golden: Json = serde_json::from_str(&data("templates.json")).expect("valid JSON");
    let rendered = golden["rendered"].as_array().expect("a list");
    assert_eq!(rendered.len(), 15);
    for row in rendered {
        let (name, chat) = (row["template"].as_str().expect("a name"), row["chat"].as_str().expect("a name"));
        let input = &golden["chats"][chat];
        let messages = Message::parse_all(&input["messages"]).expect("valid messages");
        let tools = input["tools"].as_array().cloned().unwrap_or_default();
        let mut vars = input["vars"].as_object().cloned().unwrap_or_default();
        vars.entry("date_string").or_insert("DATE".into());
        let chat_input = Chat {
            messages: &messages,
            tools: &tools,
            vars: Some(&vars),
            add_generation_prompt: input["add_generation_prompt"].as_bool().unwrap_or(true),
        };
        // Hiding what people typed must not change the text.
        for control in [&[][..], &MARKERS] {
            let prompt = template(name, control).render(&chat_input).expect("renders");
            assert_eq!(prompt.text(), row["text"].as_str().expect("text"), "{name}, {chat}");
        }
    }
}

#[test]
fn b20_python_methods_and_slices() {
    let source = "{%- for m in messages[::-1] -%}{{ m.content.strip().split('|')[-1].lstrip('x') }};{%- endfor -%}";
    assert_eq!(render(source, &["c|d", " a|xb "]).expect("renders"), "b;d;");
    let source = "{% set ns = namespace(n=0) %}{% for m in messages %}\
                  {% if m.content.startswith('a') and m.content.endswith('c') %}{% set ns.n = ns.n + 1 %}{% endif %}\
                  {% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}{{ ns.n }}\
                  {% for k, v in {'x': 1, 'y': none}.items() %} {{ k }}={{ v }}{% endfor %}";
    assert_eq!(render(source, &["abc", "ac", "ac"]).expect("renders"), "2 x=1 y=None");
    let source = "{{ messages[0].content.removeprefix('ab').removesuffix('d').upper() }}{{ true }}";
    assert_eq!(render(source, &["abcd"]).expect("renders"), "CTrue");
}

#[test]
fn b20_none_is_not_iterable() {
    // As Qwen3-Coder's template asks; tools are none where a request has none.
    let source = "{% if tools is iterable and tools | length > 0 %}tools{% endif %}\
                  {{ messages is iterable }} {{ 'a' is iterable }} {{ 1 is iterable }} {{ nothing is iterable }}";
    assert_eq!(render(source, &["u"]).expect("renders"), "True True False True");
}

#[test]
fn b20_blocks_are_trimmed() {
    assert_eq!(render("A\n{% if true %}\n  B\n{% endif %}\nC\n", &["u"]).expect("renders"), "A\n  B\nC");
}

#[test]
fn b20_generation_tags_do_nothing() {
    assert_eq!(render("{% generation %}x{% endgeneration %}", &["u"]).expect("renders"), "x");
    assert_eq!(render("a {%- generation -%} x {%- endgeneration %} b", &["u"]).expect("renders"), "ax b");
}

#[test]
fn b20_json_is_pythons() {
    let source = "{{ {'k': [1, 2.5, none, true], 'é<&>': '\\'\"\\n'} | tojson }}|{{ {'b': 1e-7, 'a': {}} | tojson(indent=2, sort_keys=true) }}|{{ 'é😀' | tojson(ensure_ascii=true) }}|{{ [1, 2] | tojson(separators=(',', ':')) }}";
    let wanted = "{\"k\": [1, 2.5, null, true], \"é<&>\": \"'\\\"\\n\"}|{\n  \"a\": {},\n  \"b\": 1e-07\n}|\"\\u00e9\\ud83d\\ude00\"|[1,2]";
    assert_eq!(render(source, &["u"]).expect("renders"), wanted);
}

#[test]
fn b20_strftime_now_gives_the_date_and_refuses_nonsense() {
    let year = render("{{ strftime_now('%Y') }}", &["u"]).expect("renders");
    assert!(year.len() == 4 && year.starts_with("20"), "{year}");
    assert!(matches!(render("{{ strftime_now('%Q%') }}", &["u"]), Err(TemplateError::Render(_))));
}

#[test]
fn b20_a_refusal_keeps_its_message_and_the_next_request_works() {
    let source = "{% if messages|length > 1 %}{{ raise_exception('no') }}{% endif %}ok";
    let refused = render(source, &["a", "b"]).expect_err("refused");
    assert!(matches!(&refused, TemplateError::Raised(message) if message == "no"));
    assert!(refused.is_client_error());
    assert_eq!(refused.to_string(), "no");
    assert_eq!(render(source, &["a"]).expect("renders"), "ok");
    // Also from within a macro.
    let nested = "{% macro m() %}{{ raise_exception('deep') }}{% endmacro %}{{ m() }}";
    assert!(matches!(render(nested, &["a"]), Err(TemplateError::Raised(message)) if message == "deep"));
}

#[test]
fn b20_a_template_that_does_not_parse_is_an_error_at_once() {
    for broken in ["{% if %}", "{{ 'a", "{% for x in y %}", "{% unknown_tag %}"] {
        assert!(matches!(Template::new(broken, special(&[])), Err(TemplateError::Syntax(_))), "{broken}");
    }
}

#[test]
fn a_template_cannot_run_forever_or_read_files() {
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}";
    assert!(matches!(render(endless, &["u"]), Err(TemplateError::Render(_))));
    let doubling = "{% set ns = namespace(x='xxxxxxxxxxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}";
    assert!(matches!(render(doubling, &["u"]), Err(TemplateError::Render(_))));
    assert!(matches!(render("{% include '/etc/passwd' %}", &["u"]), Err(TemplateError::Render(_))));
}

#[test]
fn deep_recursion_is_an_error_on_a_servers_stack() {
    let deep = |text: String| {
        let work = move || render(&text, &["u"]).map(|text| text.len());
        let thread = std::thread::Builder::new().stack_size(2 << 20).spawn(work).expect("a thread");
        thread.join().expect("the stack holds")
    };
    assert!(deep("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}".to_owned()).is_err());
    let nested = "{% set ns = namespace(x=[]) %}{% for i in range(400) %}{% set ns.x = [ns.x] %}{% endfor %}";
    assert!(deep(format!("{nested}{{{{ ns.x | tojson }}}}")).is_err());
    assert!(deep(format!("{nested}{{{{ ns.x }}}}")).is_ok());
    let brackets = |n| format!("{{{{ {}1{} }}}}", "(".repeat(n), ")".repeat(n));
    let parsed = std::thread::Builder::new()
        .stack_size(2 << 20)
        .spawn(move || Template::new(&brackets(100_000), special(&[])).map(|_| ()));
    assert!(matches!(parsed.expect("a thread").join().expect("the stack holds"), Err(TemplateError::Syntax(_))));
}

fn prompt_ids(template: &Template, tokenizer: &Tokenizer, messages: &Json) -> Vec<u32> {
    let messages = Message::parse_all(messages).expect("valid messages");
    let chat = Chat { messages: &messages, add_generation_prompt: true, ..Chat::default() };
    tokenizer.encode_segments(&template.render(&chat).expect("renders").segments())
}

#[test]
fn b14_a_template_that_prints_bos_gives_one() {
    let Some(tokenizer) = tokenizer("llama-bpe") else { return };
    let source = data("templates/headers.jinja");
    let template = Template::new(&source, SpecialTexts::of(&tokenizer)).expect("parses");
    let ids = prompt_ids(&template, &tokenizer, &json!([{"role": "user", "content": "Hi"}]));
    assert_eq!(ids[..2], [128000, 128006]);
    assert_eq!(ids.iter().filter(|id| **id == 128000).count(), 1);
    // Without one of its own, the tokenizer's rule adds it.
    let silent = Template::new(&source.replace("{{- bos_token }}", ""), SpecialTexts::of(&tokenizer)).expect("parses");
    assert_eq!(prompt_ids(&silent, &tokenizer, &json!([{"role": "user", "content": "Hi"}])), ids);
    // A typed BOS is text.
    let typed = prompt_ids(&template, &tokenizer, &json!([{"role": "user", "content": "<|begin_of_text|>"}]));
    assert_eq!(typed.iter().filter(|id| **id == 128000).count(), 1);
}

#[test]
fn tools_and_developer_messages_are_offered_where_the_template_has_them() {
    let supports = |name: &str| template(name, &MARKERS).supports_tools();
    assert!(supports("chatml-think.jinja") && supports("channels.jinja"));
    assert!(!supports("headers.jinja"));
    let messages = [Message::new(Role::Developer, "Be brief."), Message::new(Role::User, "u")];
    let text = |name: &str| {
        let chat = Chat { messages: &messages, ..Chat::default() };
        template(name, &MARKERS).render(&chat).expect("renders").text()
    };
    assert!(text("chatml-think.jinja").starts_with("<|im_start|>system\nBe brief."));
    assert!(text("channels.jinja").contains("<|start|>developer<|message|># Instructions\n\nBe brief."));
}

#[test]
fn variables_reach_the_template_and_hide_none_of_its_own() {
    let template = inline("{{ enable_thinking }} {{ messages[0].content }}");
    let vars: Map<String, Json> =
        [("enable_thinking".to_owned(), json!(false)), ("messages".to_owned(), json!("forged"))].into_iter().collect();
    let messages = [Message::new(Role::User, "real")];
    let chat = Chat { messages: &messages, vars: Some(&vars), ..Chat::default() };
    assert_eq!(template.render(&chat).expect("renders").text(), "False real");
}

#[test]
fn b37_a_long_message_renders_quickly() {
    let template = template("chatml-think.jinja", &MARKERS);
    let messages = [Message::new(Role::User, "x<".repeat(256 << 10))];
    let chat = Chat { messages: &messages, ..Chat::default() };
    let start = std::time::Instant::now();
    let prompt = template.render(&chat).expect("renders");
    assert!(start.elapsed() < std::time::Duration::from_secs(1), "{:?}", start.elapsed());
    assert_eq!(prompt.text().len(), (512 << 10) + "<|im_start|>user\n<|im_end|>\n".len());
}
