"""Drives a running `host serve` with the `openai` package: `pip install openai`, then
`python3 tests/clients/openai_client.py http://127.0.0.1:8080 [KEY]`. It ends with an error at the first wrong answer."""

import json
import sys

import openai

base, key = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "none"
client = openai.OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Hello"}]


def chat(**options):
    return client.chat.completions.create(model=model, messages=messages, **{"temperature": 0, "max_tokens": 16} | options)


whole = chat()
assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 16, whole

chunks = list(chat(stream=True, stream_options={"include_usage": True}))
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert text == whole.choices[0].message.content, (text, whole)
assert chunks[-1].usage.total_tokens == whole.usage.total_tokens

logprobs = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
assert len(logprobs) == 16 and all(t.token == t.top_logprobs[0].token for t in logprobs)
assert b"".join(bytes(t.bytes) for t in logprobs).decode() == text

reply = chat(response_format={"type": "json_object"}, max_tokens=400, temperature=1, seed=3)
if reply.choices[0].finish_reason == "stop":
    assert isinstance(json.loads(reply.choices[0].message.content), dict)

schema = {
    "type": "object",
    "properties": {"name": {"enum": ["David", "Saul"]}, "age": {"type": "integer", "minimum": 30, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
format = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}
for seed in range(3):
    reply = chat(response_format=format, max_tokens=300, temperature=1, seed=seed)
    person = json.loads(reply.choices[0].message.content)
    assert set(person) == {"name", "age"} and 30 <= person["age"] <= 99, person

# Tools, where the server was started with a chat template that shows them.
tools = [{"type": "function", "function": {"name": "find", "strict": True, "parameters": schema}}]
named = {"type": "function", "function": {"name": "find"}}
try:
    chat(tools=tools, max_tokens=1)
except openai.BadRequestError as error:
    assert error.code == "unsupported" and error.param == "tools", error
    print("tools: not offered by this chat template")
else:
    for choice in ("required", named):
        options = dict(tools=tools, tool_choice=choice, parallel_tool_calls=False, max_tokens=300, temperature=1, seed=5)
        whole = chat(**options).choices[0]
        assert whole.finish_reason == "tool_calls", whole
        [call] = whole.message.tool_calls
        assert call.function.name == "find" and json.loads(call.function.arguments)["name"] in ("David", "Saul"), call
        name, arguments, ids, pieces = "", "", [], 0
        for chunk in chat(stream=True, **options):
            for delta in chunk.choices[0].delta.tool_calls or []:
                name += delta.function.name or ""
                arguments += delta.function.arguments
                ids += [delta.id] if delta.id else []
                pieces += 1
        assert (name, arguments) == (call.function.name, call.function.arguments), (name, arguments, call)
        assert len(ids) == 1 and pieces > 2, "the arguments come in pieces"
    answered = messages + [whole.message, {"role": "tool", "tool_call_id": call.id, "content": "He is king."}]
    client.chat.completions.create(model=model, messages=answered, tools=tools, max_tokens=4)
    with client.chat.completions.stream(model=model, messages=messages, **options) as stream:
        final = stream.get_final_completion().choices[0]
        assert final.message.tool_calls[0].function.arguments == arguments, final

assert len(chat(n=3, temperature=1).choices) == 3

completion = client.completions.create(model=model, prompt=["Ge1:1", "fn main"], max_tokens=4)
assert [choice.index for choice in completion.choices] == [0, 1]

vectors = client.embeddings.create(model=model, input=["one", "two"]).data
assert abs(sum(x * x for x in vectors[0].embedding) - 1) < 1e-4

bad_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strnig"}}}
for options, param in [({"top_p": 2}, "top_p"), ({"response_format": bad_schema}, "response_format")]:
    try:
        chat(**options)
    except openai.BadRequestError as error:
        assert error.param == param, error
    else:
        raise AssertionError(f"{options} was taken")

print("ok")
