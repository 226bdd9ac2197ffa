"""Rendering a conversation with the model's own chat template.

Templates differ in what they know. A template of a known dialect renders tools, calls and results itself, as far as
probing shows that it does. What it does not know is written into the messages it does know: the tool list and the
protocol into the system message, calls into the assistant's text, results into a user message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dlite_agent.errors import PromptError
from dlite_agent.prompting.dialects import Dialect, detect_dialect

Message = Mapping[str, Any]

_DEFAULT_SYSTEM = "You are a helpful assistant."
_PROBE_CALL_ID = "probe0000"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "A probe."}}},
    },
}
_PROBE_USER = {"role": "user", "content": "probe question"}
_PROBE_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "id": _PROBE_CALL_ID,
            "function": {"name": "probe_tool", "arguments": {"probe_key": "probe_value"}},
        }
    ],
}
_PROBE_RESULT = {"role": "tool", "content": "probe result", "tool_call_id": _PROBE_CALL_ID, "name": "probe_tool"}
_PROBE_ROLE = "probe_role"


@dataclass(frozen=True, slots=True)
class TemplateAbilities:
    """What a chat template renders by itself.

    Attributes:
        tools: The tool list.
        calls: An assistant message's `tool_calls`.
        results: Messages of role `tool`.
    """

    tools: bool
    calls: bool
    results: bool


class ChatTemplate:
    """A model's chat template, ready to render conversations with tools.

    Args:
        template: Jinja source, as in `chat_template.jinja` or `tokenizer_config.json`.
        bos_token: Text of the begin-of-text token, if the template writes it.
        eos_token: Text of the end token, if the template writes it.
        variables: More variables for the template. Fix `date_string` here for templates that print today's date:
            a prompt that changes at midnight loses its reuse.
        dialect: The tool-call dialect; detected from the template if None.
    """

    def __init__(
        self,
        template: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        variables: Mapping[str, Any] | None = None,
        dialect: Dialect | None = None,
    ) -> None:
        self.template = template
        self.dialect = dialect or detect_dialect(template)
        self._variables = {"bos_token": bos_token, "eos_token": eos_token, **(variables or {})}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text; the same arguments always give the same text.

        Args:
            messages: Template messages, as `prompting.messages.to_template_messages` makes them.
            tools: Tools as OpenAI-style dicts.
            add_generation_prompt: End with the header of the assistant's next message.

        Raises:
            PromptError: The template refuses the conversation.
        """
        if not messages:
            raise PromptError("there are no messages to render; expected at least one")
        conversation: list[Message] = list(messages)
        if not self.abilities.results:
            conversation = _inline_results(conversation, self.dialect)
        if not self.abilities.calls:
            conversation = [_inline_calls(message, self.dialect) for message in conversation]
        if tools and not self.abilities.tools:
            conversation = _inline_tools(conversation, tools, self.dialect)
            tools = None
        return self._apply(conversation, tools, add_generation_prompt=add_generation_prompt)

    @cached_property
    def abilities(self) -> TemplateAbilities:
        """What the template renders by itself, found out by rendering probes."""
        if not self.dialect.is_native:
            return TemplateAbilities(tools=False, calls=False, results=False)
        return TemplateAbilities(
            tools="probe_tool" in self._probe([_PROBE_USER], [_PROBE_TOOL]),
            calls="probe_value" in self._probe([_PROBE_USER, _PROBE_CALL]),
            results=self._knows_tool_role(),
        )

    def _knows_tool_role(self) -> bool:
        """Whether role `tool` is rendered in another way than a role the template has never heard of."""
        before: list[Message] = [_PROBE_USER, _PROBE_CALL]
        rendered = self._probe([*before, _PROBE_RESULT])
        stranger = self._probe([*before, {**_PROBE_RESULT, "role": _PROBE_ROLE}])
        return "probe result" in rendered and stranger.replace(_PROBE_ROLE, "tool") != rendered

    def _probe(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        try:
            return self._apply(messages, tools, add_generation_prompt=False)
        except PromptError:
            return ""

    def _apply(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, add_generation_prompt: bool
    ) -> str:
        from jinja2 import TemplateError  # these two take most of a second to import
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, _ = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=self.template,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (TemplateError, TypeError) as error:
            raise PromptError(f"the model's chat template refuses this conversation: {error}") from error
        text: str = rendered[0]
        return text


def _inline_tools(messages: list[Message], tools: Sequence[Mapping[str, Any]], dialect: Dialect) -> list[Message]:
    has_system = messages[0]["role"] == "system"
    preface = messages[0]["content"] if has_system else _DEFAULT_SYSTEM
    system = {"role": "system", "content": f"{preface}\n\n{dialect.format_tools(tools)}"}
    return [system, *messages[1:]] if has_system else [system, *messages]


def _inline_calls(message: Message, dialect: Dialect) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    parts = [message["content"]] if message["content"] else []
    parts += [dialect.format_call(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return {"role": message["role"], "content": "\n".join(parts)}


def _inline_results(messages: list[Message], dialect: Dialect) -> list[Message]:
    """Each run of tool messages becomes one user message."""
    inlined: list[Message] = []
    is_run = False
    for message in messages:
        if message["role"] != "tool":
            inlined.append(message)
            is_run = False
            continue
        result = dialect.format_result(message["content"])
        if is_run:
            result = f"{inlined.pop()['content']}\n{result}"
        inlined.append({"role": "user", "content": result})
        is_run = True
    return inlined
