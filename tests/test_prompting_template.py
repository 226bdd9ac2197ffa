"""Real chat templates render conversations with tools, also those that know nothing of tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from dlite_agent.errors import PromptError
from dlite_agent.prompting.dialects import DIALECTS, GENERIC, HERMES, detect_dialect
from dlite_agent.prompting.messages import message_digest, to_template_messages
from dlite_agent.prompting.parser import StreamParser, ToolCall
from dlite_agent.prompting.template import ChatTemplate, TemplateAbilities

DATA = Path(__file__).parent / "data"
QWEN = (DATA / "qwen2.5.jinja").read_text(encoding="utf-8")
SMOLLM = (DATA / "smollm2.jinja").read_text(encoding="utf-8")
LLAMA_LIKE = (
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}<|python_tag|>{% endif %}"
    "[{{ m.role }}]{{ m.content | trim }}{{ eos_token }}{% endfor %}{{ date_string }}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city, in °C.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLS = [
    {"name": "get_weather", "args": {"city": 'Zürich "1" </tool_call>'}, "id": "call_1"},
    {"name": "get_weather", "args": {"city": "Rome", "more": {"a": [None, True]}}, "id": "call_2"},
]
CONVERSATION = [
    SystemMessage("Be brief."),
    HumanMessage("How is the weather?"),
    AIMessage("I look.", tool_calls=CALLS),
    ToolMessage("12", tool_call_id="call_1"),
    ToolMessage("20", tool_call_id="call_2"),
    HumanMessage("Thanks"),
]

templates = pytest.mark.parametrize("source", [QWEN, SMOLLM, LLAMA_LIKE], ids=["qwen2.5", "smollm2", "unknown"])


def test_the_dialect_is_read_off_the_template() -> None:
    assert detect_dialect(QWEN) is HERMES
    assert detect_dialect(SMOLLM) is GENERIC
    assert detect_dialect(QWEN + "<function=name>") is GENERIC
    assert detect_dialect("") is GENERIC
    assert len({dialect.name for dialect in (*DIALECTS, GENERIC)}) == len(DIALECTS) + 1


def test_probing_finds_what_a_template_renders_by_itself() -> None:
    assert ChatTemplate(QWEN).abilities == TemplateAbilities(tools=True, calls=True, results=True)
    assert ChatTemplate(SMOLLM).abilities == TemplateAbilities(tools=False, calls=False, results=False)
    assert ChatTemplate(SMOLLM, dialect=HERMES).abilities == TemplateAbilities(tools=False, calls=False, results=False)


def test_a_native_template_is_rendered_as_transformers_does() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = to_template_messages(CONVERSATION)
    expected, _ = render_jinja_template([messages], tools=[TOOL], chat_template=QWEN, add_generation_prompt=True)
    rendered = ChatTemplate(QWEN).render(messages, [TOOL])
    assert rendered == expected[0]
    assert rendered.endswith(
        "<tool_response>\n20\n</tool_response><|im_end|>\n<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n"
    )
    closed = ChatTemplate(QWEN).render(messages, [TOOL], add_generation_prompt=False)
    assert rendered == closed + "<|im_start|>assistant\n"


def test_a_template_without_tools_gets_the_same_conversation_written_into_its_messages() -> None:
    """What SmolLM2 reads is, but for the missing `tools` header of Qwen's own wording, what Qwen reads."""
    messages = to_template_messages(CONVERSATION)
    assert ChatTemplate(SMOLLM).render(messages, [TOOL]) == ChatTemplate(QWEN).render(messages, [TOOL])
    without_system = ChatTemplate(SMOLLM).render(messages[1:], [TOOL])
    assert without_system.startswith("<|im_start|>system\nYou are a helpful assistant.\n\n# Tools")


@templates
def test_tools_calls_and_results_all_reach_the_model(source: str) -> None:
    template = ChatTemplate(source)
    rendered = template.render(to_template_messages(CONVERSATION), [TOOL])
    assert json.dumps(TOOL, ensure_ascii=False) in rendered
    for call in CALLS:
        assert template.dialect.format_call(call["name"], call["args"]) in rendered  # type: ignore[arg-type]
    assert "<tool_response>\n12\n</tool_response>\n<tool_response>\n20\n</tool_response>" in rendered


@templates
def test_rendered_calls_parse_back(source: str) -> None:
    template = ChatTemplate(source)
    rendered = template.render(to_template_messages([HumanMessage("hi"), AIMessage("I look.", tool_calls=CALLS)]))
    reply = rendered[rendered.index("I look.") :]
    parser = StreamParser(template.dialect, {"get_weather": {}})
    events = parser.feed(reply) + parser.close(truncated=False)
    assert [(e.name, e.args) for e in events if isinstance(e, ToolCall)] == [(c["name"], c["args"]) for c in CALLS]


@pytest.mark.parametrize("source", [QWEN, SMOLLM])
def test_a_prompt_begins_with_the_last_prompt_and_the_raw_reply(source: str) -> None:
    template = ChatTemplate(source)
    raw = 'I  look.\n\n<tool_call>{"name":"get_weather","arguments":{"city":"Rome"}}</tool_call>'
    calls: list[dict[str, Any]] = [{"name": "get_weather", "args": {"city": "Rome"}, "id": "c"}]
    record = {"raw": raw, "digest": message_digest("I  look.", calls)}
    reply = AIMessage("I  look.", tool_calls=calls, response_metadata={"dlite": record})
    before = to_template_messages([HumanMessage("hi")], result_hint="Go on.")
    after = to_template_messages([HumanMessage("hi"), reply, ToolMessage("5", tool_call_id="c")], result_hint="Go on.")
    first, second = template.render(before, [TOOL]), template.render(after, [TOOL])
    assert second.startswith(first + raw + "<|im_end|>\n")
    assert "5\nGo on.\n</tool_response>" in second
    assert second == template.render(after, [TOOL])


def test_variables_and_token_texts_reach_the_template() -> None:
    template = ChatTemplate(LLAMA_LIKE, bos_token="<s>", eos_token="</s>", variables={"date_string": "1 May"})
    assert template.render([{"role": "user", "content": " hi "}]) == "<s>[user]hi</s>1 May"


def test_rendering_does_not_change_the_callers_messages() -> None:
    messages = to_template_messages(CONVERSATION)
    before = json.dumps(messages)
    ChatTemplate(SMOLLM).render(messages, [TOOL])
    assert json.dumps(messages) == before


def test_a_conversation_the_template_refuses_is_a_typed_error() -> None:
    refusing = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PromptError, match="roles must alternate"):
        refusing.render([{"role": "user", "content": "hi"}])
    with pytest.raises(PromptError, match="at least one"):
        ChatTemplate(QWEN).render([])
    with pytest.raises(PromptError, match="refuses"):
        ChatTemplate("{{ ''.__class__.__mro__ }}").render([{"role": "user", "content": "hi"}])
    with pytest.raises(PromptError, match="refuses"):
        ChatTemplate("{% for %}").render([{"role": "user", "content": "hi"}])


def test_prompting_runs_without_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys\n"
        "from dlite_agent.prompting import encoding, messages, parser, template\n"
        "text = template.ChatTemplate(sys.stdin.read()).render([{'role': 'user', 'content': 'hi'}])\n"
        "assert 'hi' in text and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], input=QWEN, text=True, check=True, timeout=120)


def test_what_no_tokenizer_takes_is_refused() -> None:
    with pytest.raises(PromptError, match="cannot be written"):
        ChatTemplate(SMOLLM).render([{"role": "\ud800", "content": "x"}])


@pytest.mark.parametrize("expression", ["1 // 0", "messages[9].content.x", "messages | first | int + []", "nothing()"])
def test_a_template_that_fails_says_so(expression: str) -> None:
    template = ChatTemplate("{{ " + expression + " }}{{ messages[0].content }}")
    with pytest.raises(PromptError, match="refuses this conversation"):
        template.render([{"role": "user", "content": "x"}])
