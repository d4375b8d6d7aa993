//! Replies that a grammar restricts: JSON of a schema, and calls of tools in each of the forms that models write.

use serde_json::{Value, json};

use crate::client::Server;

const CHAT: &str = "/v1/chat/completions";

fn user() -> Value {
    json!([{"role": "user", "content": "Go on"}])
}

/// The message of a whole reply and of the same reply streamed, which have to be equal; and why it ended.
fn both(server: &Server, body: &Value) -> (Value, String) {
    let whole = server.ok(CHAT, body);
    let (mut content, mut calls, mut finish) = (String::new(), Vec::<Value>::new(), None);
    for chunk in server.stream(CHAT, body) {
        let choice = &chunk["choices"][0];
        content.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        for delta in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let index = delta["index"].as_u64().expect("an index") as usize;
            let more = delta["function"]["arguments"].as_str().expect("arguments");
            if index == calls.len() {
                assert!(delta["id"].is_string() && delta["type"] == "function", "{delta}");
                calls.push(json!({"name": delta["function"]["name"], "arguments": more}));
            } else {
                assert!(delta.get("id").is_none() && delta["function"].get("name").is_none(), "{delta}");
                let so_far = calls[index]["arguments"].as_str().expect("a text");
                calls[index]["arguments"] = format!("{so_far}{more}").into();
            }
        }
        finish = finish.or(choice["finish_reason"].as_str().map(str::to_owned));
    }
    let message = &whole["choices"][0]["message"];
    assert_eq!(message["content"].as_str().unwrap_or_default(), content, "{body}");
    let functions = message["tool_calls"].as_array().into_iter().flatten().map(|call| call["function"].clone());
    assert_eq!(functions.collect::<Vec<_>>(), calls, "{body}");
    let finish = finish.expect("an end");
    assert_eq!(whole["choices"][0]["finish_reason"], finish);
    (message.clone(), finish)
}

#[test]
fn a_json_object_is_what_the_format_says() {
    let server = Server::start(&[]);
    let mut ended = 0;
    for seed in 0..8 {
        let body = json!({
            "messages": user(), "max_tokens": 300, "temperature": 1, "seed": seed,
            "response_format": {"type": "json_object"},
        });
        let (message, finish) = both(&server, &body);
        let text = message["content"].as_str().expect("a text");
        if finish == "stop" {
            assert!(serde_json::from_str::<Value>(text).is_ok_and(|json| json.is_object()), "{text}");
            ended += 1;
        } else {
            // Cut off by the limit: so far it was the beginning of an object.
            let error = serde_json::from_str::<Value>(text).expect_err("half an object");
            assert!(error.is_eof(), "{error}: {text}");
        }
    }
    assert!(ended > 0, "no reply ended by itself");
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"$ref": "#/$defs/age"},
            "roles": {"type": "array", "items": {"enum": ["king", "prophet"]}, "minItems": 1, "maxItems": 2},
        },
        "required": ["name", "age", "roles"],
        "additionalProperties": false,
        "$defs": {"age": {"type": "integer", "minimum": 30, "maximum": 969}},
    })
}

fn is_person(json: &Value) -> bool {
    let roles = json["roles"].as_array().map(Vec::as_slice).unwrap_or_default();
    json.as_object().is_some_and(|object| object.len() == 3)
        && json["name"].as_str().is_some_and(|name| name.chars().count() <= 8)
        && json["age"].as_i64().is_some_and(|age| (30..=969).contains(&age))
        && (1..=2).contains(&roles.len())
        && roles.iter().all(|role| role == "king" || role == "prophet")
}

#[test]
fn an_answer_is_of_its_schema() {
    let server = Server::start(&[]);
    let format = json!({"type": "json_schema", "json_schema": {"name": "person", "strict": true, "schema": person()}});
    for seed in 0..6 {
        let body =
            json!({"messages": user(), "temperature": 1, "seed": seed, "response_format": format, "max_tokens": 600});
        let (message, finish) = both(&server, &body);
        let json = serde_json::from_str(message["content"].as_str().expect("a text")).expect("JSON");
        assert!(finish == "stop" && is_person(&json), "{json}");
    }
    // Also for several choices, and for completions.
    let body = json!({"prompt": "x", "n": 3, "temperature": 1.5, "response_format": format, "max_tokens": 600});
    for choice in server.ok("/v1/completions", &body)["choices"].as_array().expect("choices") {
        assert!(is_person(&serde_json::from_str(choice["text"].as_str().expect("a text")).expect("JSON")));
    }

    let refused = |format: Value| server.refused(CHAT, &json!({"messages": user(), "response_format": format}), 400);
    for (schema, why) in [
        (json!({"type": "strnig"}), "strnig"),
        (json!({"type": "object", "if": {}}), "if"),
        (json!({"$ref": "#/$defs/none"}), "none"),
    ] {
        let error = refused(json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}));
        assert_eq!(error["param"], "response_format");
        assert!(error["message"].as_str().is_some_and(|message| message.contains(why)), "{error}");
    }
    for (format, param) in [
        (json!({"type": "json_schema"}), "response_format.json_schema"),
        (json!({"type": "json_schema", "json_schema": {}}), "response_format.json_schema.schema"),
        (json!({"type": "json_schema", "json_schema": {"schema": 5}}), "response_format.json_schema.schema"),
        (json!({"type": 5}), "response_format.type"),
        (json!({}), "response_format.type"),
        (json!("json"), "response_format"),
    ] {
        assert_eq!(refused(format)["param"], param);
    }
    server.ok(CHAT, &json!({"messages": user(), "max_tokens": 1}));
}

/// Templates that show tools, in a few lines; the marks in their comments tell what their models write.
const FORMS: [(&str, &str); 3] = [
    ("JSON", "{# <tool_call> #}"),
    ("tags", "{# <tool_call><function=f> #}"),
    ("channels", "{# <|channel|>final<|message|> #}"),
];

fn start(form: &str) -> Server {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("template.jinja");
    let template = format!(
        "{form}{{% if tools %}}Tools: {{{{ tools | tojson }}}}\n{{% endif %}}\
         {{% for m in messages %}}{{{{ m.role }}}}: {{{{ m.content }}}}\n{{% endfor %}}assistant:"
    );
    std::fs::write(&file, template).expect("the file is written");
    Server::start(&["--chat-template", file.to_str().expect("UTF-8")])
}

/// Two tools whose arguments cannot be long.
fn tools() -> Value {
    let rank = json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["n"], "additionalProperties": false});
    json!([
        {"type": "function", "function": {"name": "crown", "description": "Who is it?", "parameters": person_by_word()}},
        {"type": "function", "function": {"name": "rank", "parameters": rank}},
    ])
}

fn person_by_word() -> Value {
    json!({
        "type": "object",
        "properties": {
            "who": {"enum": ["David", "Saul"]},
            "sure": {"type": "boolean"},
        },
        "required": ["who", "sure"],
        "additionalProperties": false,
    })
}

fn check_call(call: &Value) -> String {
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().expect("a text")).expect("JSON");
    let name = call["function"]["name"].as_str().expect("a name");
    let good = match name {
        "crown" => (arguments["who"] == "David" || arguments["who"] == "Saul") && arguments["sure"].is_boolean(),
        _ => name == "rank" && arguments["n"].as_i64().is_some_and(|n| (1..=9).contains(&n)),
    };
    assert!(good, "{call}");
    assert!(call["id"].is_string() && call["type"] == "function", "{call}");
    name.to_owned()
}

#[test]
fn calls_are_made_where_they_are_demanded() {
    for (form, template) in FORMS {
        let server = start(template);
        let chat = |choice: Value, seed: u64, n: u64| {
            json!({"messages": user(), "tools": tools(), "tool_choice": choice, "temperature": 1, "seed": seed,
                   "max_tokens": n, "parallel_tool_calls": false})
        };
        for seed in 0..3 {
            let (message, finish) = both(&server, &chat("required".into(), seed, 2000));
            // A thought or a remark may go on until the limit; everything else ends with a call.
            if finish == "length" && form == "channels" {
                continue;
            }
            assert_eq!(finish, "tool_calls", "{form}: {message}");
            let calls = message["tool_calls"].as_array().expect("calls");
            assert!(calls.len() == 1 && message["content"].is_null(), "{form}: {message}");
            check_call(&calls[0]);

            let named = json!({"type": "function", "function": {"name": "rank"}});
            let (message, finish) = both(&server, &chat(named, seed, 2000));
            if finish == "tool_calls" {
                assert_eq!(check_call(&message["tool_calls"][0]), "rank", "{form}");
            } else {
                assert_eq!((form, finish.as_str()), ("channels", "length"));
            }
        }
        // A call that is cut off says so; streamed and whole are equal all the same.
        for n in [1, 4, 9, 14, 19] {
            assert_eq!(both(&server, &chat("required".into(), 1, n)).1, "length", "{form} after {n} tokens");
        }
    }
}

#[test]
fn several_calls_have_ids_of_their_own() {
    let server = start(FORMS[0].1);
    // The break between two calls, and the end of the text: one is made likely, the other is banned.
    let ids = |text: &str| server.ok("/tokenize", &json!({"content": text, "parse_special": true}))["tokens"].take();
    let (more, eos) = (ids("\n")[0].to_string(), ids("<|endoftext|>")[0].to_string());
    let body = json!({"messages": user(), "tools": tools(), "tool_choice": "required", "temperature": 0,
        "max_tokens": 160, "logit_bias": {more: 5, eos: -100}});
    let (message, _) = both(&server, &body);
    let calls = message["tool_calls"].as_array().expect("calls");
    assert!(calls.len() >= 2, "{message}");
    assert!(calls.windows(2).all(|pair| pair[0]["id"] != pair[1]["id"]), "{message}");
}

#[test]
fn tools_are_shown_and_need_not_be_called() {
    let server = start(FORMS[0].1);
    let chat = |tools: Value, choice: Value| json!({"messages": user(), "tools": tools, "tool_choice": choice, "max_tokens": 4, "temperature": 0});
    let n_prompt = |body: &Value| server.ok(CHAT, body)["usage"]["prompt_tokens"].as_u64().expect("a number");
    let without = n_prompt(&chat(Value::Null, Value::Null));
    assert!(n_prompt(&chat(tools(), Value::Null)) > without + 20);
    assert!(n_prompt(&chat(tools(), "auto".into())) > without + 20);
    assert_eq!(n_prompt(&chat(tools(), "none".into())), without);
    // Text that calls nothing is text, and the same as without a grammar.
    let (message, finish) = both(&server, &chat(tools(), Value::Null));
    assert!(message["content"].is_string() && message.get("tool_calls").is_none() && finish == "length", "{message}");

    let tool = |name: &str| json!([{"type": "function", "function": {"name": name}}]);
    for (tools, choice, param) in [
        (tool("no name"), json!("auto"), "tools[0]"),
        (tool(""), json!("auto"), "tools[0]"),
        (json!([5]), json!("auto"), "tools[0]"),
        (json!([{"type": "oven"}]), json!("auto"), "tools[0]"),
        (json!([tool("a")[0], tool("a")[0]]), json!("auto"), "tools[1]"),
        (json!(5), json!("auto"), "tools"),
        (tool("a"), json!("must"), "tool_choice"),
        (tool("a"), json!({"type": "function", "function": {"name": "b"}}), "tool_choice"),
        (tool("a"), json!({"type": "function"}), "tool_choice"),
        (json!([]), json!("required"), "tool_choice"),
    ] {
        assert_eq!(server.refused(CHAT, &chat(tools.clone(), choice.clone()), 400)["param"], param, "{tools} {choice}");
    }
    let mut bad = tool("a");
    bad[0]["function"]["parameters"] = json!({"type": "string"});
    assert_eq!(server.refused(CHAT, &chat(bad.clone(), Value::Null), 400)["param"], "tools[0].function.parameters");
    bad[0]["function"]["parameters"] = json!({"type": "object", "properties": {"x": {"type": "strnig"}}});
    let error = server.refused(CHAT, &chat(bad, Value::Null), 400);
    assert!(error["param"] == "tools" && error["message"].as_str().is_some_and(|m| m.contains("strnig")), "{error}");
}
