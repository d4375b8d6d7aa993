"""Writes ../templates.json: what Jinja2, set up as transformers sets it up, makes of the templates here.

Needs jinja2 (3.1.6 was used). Run it after a change to a template or a conversation.
"""

import json
import pathlib

from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = pathlib.Path(__file__).parent


def raise_exception(message):
    raise TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
env.filters["tojson"] = tojson
env.globals["raise_exception"] = raise_exception

golden = json.loads((HERE / "../templates.json").read_text())
for row in golden["rendered"]:
    chat = golden["chats"][row["chat"]]
    row["text"] = env.from_string((HERE / row["template"]).read_text()).render(
        messages=chat["messages"],
        tools=chat.get("tools"),
        add_generation_prompt=chat.get("add_generation_prompt", True),
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        **{"date_string": "DATE", **chat.get("vars", {})},
    )
(HERE / "../templates.json").write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n")
