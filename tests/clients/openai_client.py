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

assert len(chat(n=3, temperature=1).choices) == 3

completion = client.completions.create(model=model, prompt=["Ge1:1", "fn main"], max_tokens=4)
assert [choice.index for choice in completion.choices] == [0, 1]

vectors = client.embeddings.create(model=model, input=["one", "two"]).data
assert abs(sum(x * x for x in vectors[0].embedding) - 1) < 1e-4

for options, param in [({"top_p": 2}, "top_p"), ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools")]:
    try:
        chat(**options)
    except openai.BadRequestError as error:
        assert error.param == param, error
    else:
        raise AssertionError(f"{options} was taken")

print("ok")
