"""Chat templates of the families: small ones of our own, with each family's markers and its refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from dlite_agent.errors import ConfigError
from dlite_agent.prompting.dialects import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    FUNCTIONGEMMA,
    GEMMA,
    GENERIC,
    GRANITE,
    HERMES,
    LFM2,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN3_CODER,
    Dialect,
    detect_dialect,
)
from dlite_agent.prompting.messages import to_template_messages
from dlite_agent.prompting.parser import StreamParser, ToolCall
from dlite_agent.prompting.template import ChatTemplate, TemplateAbilities

BAR, BLOCK = "\uff5c", "\u2581"


def deepseek(words: str) -> str:
    return f"<{BAR}{words.replace('_', BLOCK)}{BAR}>"


def turns(before: str, after: str, calls: str, result: str, *, tools: str = "") -> str:
    """A template that writes `before`, the content and `after`; `calls` and `result` are in their place."""
    return (
        f"{tools}{{% for m in messages %}}"
        f"{{% if m.role == 'tool' %}}{result}"
        f"{{% elif m.tool_calls %}}{before}{{{{ m.content }}}}{calls}{after}"
        f"{{% else %}}{before}{{{{ m.content }}}}{after}{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )


def each(body: str, between: str = "") -> str:
    separator = f"{{% if not loop.last %}}{between}{{% endif %}}" if between else ""
    return f"{{% for c in m.tool_calls %}}{body}{separator}{{% endfor %}}"


NAME, ARGS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
TOOLS = "{% if tools %}[tools]{{ tools | tojson }}{% endif %}"
CONTENT = "{{ m.content }}"
ALTERNATING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
)

QWEN3_CODER_LIKE = turns(
    "[{{ m.role }}]",
    "\n",
    each(
        f"\n<tool_call>\n<function={NAME}>\n{{% for k, v in c.function.arguments.items() %}}<parameter={{{{ k }}}}>\n"
        "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    ),
    f"[result]{CONTENT}",
    tools=TOOLS,
)
LLAMA3_LIKE = turns(
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n",
    "<|eot_id|>",
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once') }}{% endif %}"
    + each(f'{{{{ \'{{"name": "\' }}}}{NAME}{{{{ \'", "parameters": \' }}}}{ARGS}{{{{ "}}" }}}}'),
    f"<|start_header_id|>ipython<|end_header_id|>\n\n{CONTENT}<|eot_id|>",
    tools=TOOLS,
)
CHECKED_ID = (
    "{% if c.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric with length 9') }}{% endif %}"
)
MISTRAL_LIKE = turns(
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS] ["
    + each(f'{CHECKED_ID}{{{{ (c.function | tojson)[:-1] }}}}, "id": "{{{{ c.id }}}}"{{{{ \'}}\' }}}}', ", ")
    + "]",
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]',
    tools=TOOLS,
)
MISTRAL_ARGS_LIKE = turns(
    "[INST]", "[/INST]", each(f"{CHECKED_ID}[TOOL_CALLS]{NAME}[ARGS]{ARGS}"), f"[TOOL_RESULTS]{CONTENT}", tools=TOOLS
)
LFM2_LIKE = (
    "{% if tools %}<|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}<|tool_response_start|>{{ m.content }}"
    "<|tool_response_end|>{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)
FUNCTIONGEMMA_LIKE = turns(
    "<start_of_turn>{{ m.role }}\n",
    "<end_of_turn>",
    each(
        f"<start_function_call>call:{NAME}{{{{ '{{' }}}}{{% for k, v in c.function.arguments.items() %}}{{{{ k }}}}:"
        "{% if v is string %}<escape>{{ v }}<escape>{% else %}{{ v | tojson }}{% endif %}"
        "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}<end_function_call>"
    ),
    f"<start_function_response>{CONTENT}<end_function_response>",
    tools=TOOLS,
)
DEEPSEEK_V3_LIKE = turns(
    "",
    "",
    deepseek("tool_calls_begin")
    + each(
        f"{deepseek('tool_call_begin')}{{{{ c.type }}}}{deepseek('tool_sep')}{NAME}\n```json\n"
        f"{{{{ '' + c.function.arguments }}}}\n```{deepseek('tool_call_end')}",
        "\n",
    )
    + deepseek("tool_calls_end"),
    f"{deepseek('tool_outputs_begin')}{CONTENT}",
)
DEEPSEEK_V31_LIKE = turns(
    "",
    "",
    deepseek("tool_calls_begin")
    + each(
        f"{deepseek('tool_call_begin')}{NAME}{deepseek('tool_sep')}{{{{ '' + c.function.arguments }}}}"
        f"{deepseek('tool_call_end')}"
    )
    + deepseek("tool_calls_end"),
    f"{deepseek('tool_output_begin')}{CONTENT}",
)
GRANITE_LIKE = turns(
    "<|start_of_role|>{{ m.role }}<|end_of_role|>",
    "<|end_of_text|>",
    "<|tool_call|>[" + each("{{ c.function | tojson }}", ", ") + "]",
    f"<|start_of_role|>tool<|end_of_role|>{CONTENT}",
    tools=TOOLS,
)
SMOLLM3_LIKE = (
    "{% if xml_tools %}<tools>{% for tool in xml_tools[:] %}{{ tool | string }}{% endfor %}</tools> return "
    '<tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)

FAMILIES: list[tuple[Dialect, str, TemplateAbilities]] = [
    (QWEN3_CODER, QWEN3_CODER_LIKE, TemplateAbilities(tools=True, calls=True, results=True)),
    (LLAMA3, LLAMA3_LIKE, TemplateAbilities(tools=True, calls=True, results=True, parallel=False)),
    (MISTRAL, MISTRAL_LIKE, TemplateAbilities(tools=True, calls=True, results=True)),
    (MISTRAL_ARGS, MISTRAL_ARGS_LIKE, TemplateAbilities(tools=True, calls=True, results=True)),
    (LFM2, LFM2_LIKE, TemplateAbilities(tools=True, calls=False, results=True)),
    (FUNCTIONGEMMA, FUNCTIONGEMMA_LIKE, TemplateAbilities(tools=True, calls=True, results=True)),
    (GEMMA, ALTERNATING, TemplateAbilities(tools=False, calls=False, results=False, system=False)),
    (
        DEEPSEEK_V3,
        DEEPSEEK_V3_LIKE,
        TemplateAbilities(tools=False, calls=True, results=True, has_text_arguments=True),
    ),
    (
        DEEPSEEK_V31,
        DEEPSEEK_V31_LIKE,
        TemplateAbilities(tools=False, calls=True, results=True, has_text_arguments=True),
    ),
    (GRANITE, GRANITE_LIKE, TemplateAbilities(tools=True, calls=True, results=True)),
    (
        HERMES,
        SMOLLM3_LIKE,
        TemplateAbilities(tools=True, calls=False, results=False, tools_variable="xml_tools"),
    ),
]
families = pytest.mark.parametrize(("dialect", "source", "abilities"), FAMILIES, ids=[row[0].name for row in FAMILIES])

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALLS: list[dict[str, Any]] = [
    {"name": "get_weather", "args": {"city": 'Paris "1"', "days": 2}, "id": "call_0123456789abcdef"},
    {"name": "get_weather", "args": {"city": "Rome", "days": 3}, "id": "abcDEF123"},
]
CONVERSATION: list[BaseMessage] = [
    SystemMessage("Be brief."),
    HumanMessage("How is the weather?"),
    AIMessage("", tool_calls=CALLS),
    ToolMessage("12 degrees", tool_call_id="call_0123456789abcdef"),
    ToolMessage("20 degrees", tool_call_id="abcDEF123"),
]


@families
def test_a_familys_template_is_known_by_its_markers(
    dialect: Dialect, source: str, abilities: TemplateAbilities
) -> None:
    assert detect_dialect(source) is dialect
    template = ChatTemplate(source)
    assert template.dialect is dialect
    assert template.abilities == abilities


@families
def test_tools_calls_and_results_all_reach_the_model_and_the_calls_parse_back(
    dialect: Dialect, source: str, abilities: TemplateAbilities
) -> None:
    template = ChatTemplate(source)
    rendered = template.render(to_template_messages(CONVERSATION), [TOOL])
    for text in ("Be brief.", "How is the weather?", "Weather of a city.", "12 degrees", "20 degrees"):
        assert rendered.count(text) == 1
    asked = template.render(to_template_messages(CONVERSATION[:2]), [TOOL], add_generation_prompt=False)
    assert rendered.startswith(asked)
    reply = rendered[len(asked) :]
    schemas = {"get_weather": TOOL["function"]["parameters"]}  # type: ignore[index]
    spoken = (
        reply.split("<|end_header_id|>\n\n") if dialect is LLAMA3 else [reply]
    )  # each message is a reply of its own
    found: list[tuple[str, dict[str, Any]]] = []
    for text in spoken:
        parser = StreamParser(dialect, schemas)
        events = parser.feed(text) + parser.close(truncated=False)
        found += [(event.name, event.args) for event in events if isinstance(event, ToolCall)]
    assert found == [(call["name"], call["args"]) for call in CALLS]
    if not abilities.parallel:
        assert reply.index("12 degrees") < reply.index("Rome") < reply.index("20 degrees")


def test_ids_are_made_to_fit_and_still_belong_together() -> None:
    rendered = ChatTemplate(MISTRAL_LIKE).render(to_template_messages(CONVERSATION), [TOOL])
    ids = [part[:9] for part in rendered.split('"id": "')[1:]]
    assert [part[:10] for part in rendered.split('"call_id": "')[1:]] == [f'{call_id}"' for call_id in ids]
    assert ids[1] == "abcDEF123"
    assert ids[0].isalnum()


def test_results_without_their_call_are_kept_when_calls_are_taken_apart() -> None:
    messages = [*CONVERSATION, ToolMessage("30 degrees", tool_call_id="other"), HumanMessage("Thanks")]
    rendered = ChatTemplate(LLAMA3_LIKE).render(to_template_messages(messages), [TOOL])
    for text in ("12 degrees", "20 degrees", "30 degrees", "Thanks"):
        assert rendered.count(text) == 1
    assert rendered.index("20 degrees") < rendered.index("30 degrees") < rendered.index("Thanks")


def test_a_protocol_that_no_template_teaches_is_explained_with_an_example_that_parses() -> None:
    for dialect in (GEMMA, LLAMA3, LFM2, QWEN3_CODER, DEEPSEEK_V31, GENERIC, HERMES):
        text = dialect.format_tools([TOOL])
        assert json.dumps(TOOL) in text
        if dialect in (GENERIC, HERMES):
            assert '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' in text
            continue
        example = text.rsplit("form:\n", 1)[1]
        parser = StreamParser(dialect, {"first_function": {}, "second_function": {}})
        events = parser.feed(example) + parser.close(truncated=False)
        assert [(event.name, event.args) for event in events if isinstance(event, ToolCall)] == [
            ("first_function", {"text": "a value", "number": 2}),
            ("second_function", {}),
        ]


def test_a_dialect_can_be_chosen_by_its_name() -> None:
    assert ChatTemplate(SMOLLM3_LIKE, dialect="llama3").dialect is LLAMA3
    template = ChatTemplate(SMOLLM3_LIKE, bos_token="<s>", variables={"x": 1})
    assert template.speaking("generic").dialect is GENERIC
    assert template.speaking("generic") is template.speaking("generic")
    messages = to_template_messages(CONVERSATION[:2])
    assert template.speaking("hermes").render(messages, [TOOL]) == template.render(messages, [TOOL])
    with pytest.raises(ConfigError, match="'klingon'"):
        ChatTemplate("", dialect="klingon")
    with pytest.raises(ConfigError, match="'klingon'"):
        template.speaking("klingon")


def test_a_system_message_that_the_template_refuses_begins_the_users_first_one() -> None:
    template = ChatTemplate(ALTERNATING)
    rendered = template.render(to_template_messages([SystemMessage("A."), SystemMessage("B."), HumanMessage("hi")]))
    assert rendered == "<start_of_turn>user\nA.\n\nB.\n\nhi<end_of_turn>\n"
    assert template.render(to_template_messages([SystemMessage("A.")])) == "<start_of_turn>user\nA.<end_of_turn>\n"
    assert template.render(to_template_messages([HumanMessage("hi")])) == "<start_of_turn>user\nhi<end_of_turn>\n"
