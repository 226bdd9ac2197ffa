"""Rendering a conversation with the model's own chat template.

Templates differ in what they know. A template of a known dialect renders tools, calls and results itself, as far as
probing shows that it does. What it does not know is written into the messages it does know: the tool list and the
protocol into the system message (or into the user's first one, where the template refuses system messages), calls
into the assistant's text, results into a user message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dlite_agent.errors import ConfigError, DLiteError, PromptError
from dlite_agent.prompting.dialects import Dialect, detect_dialect, named_dialect
from dlite_agent.prompting.rewriting import (
    Message,
    fit_ids,
    inline_calls,
    inline_results,
    inline_tools,
    merge_system,
    split_parallel,
    write_arguments,
)

_PROBE_CALL_ID = "probe0000"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "A probe."}}},
    },
}
_PROBE_SYSTEM = {"role": "system", "content": "probe rules"}
_PROBE_USER = {"role": "user", "content": "probe question"}
_PROBE_CALLS = [
    {"type": "function", "id": call_id, "function": {"name": "probe_tool", "arguments": {"probe_key": value}}}
    for call_id, value in ((_PROBE_CALL_ID, "probe_value"), ("probe0001", "probe_other"))
]
_PROBE_CALL = {"role": "assistant", "content": "", "tool_calls": _PROBE_CALLS[:1]}
_PROBE_RESULT = {"role": "tool", "content": "probe result", "tool_call_id": _PROBE_CALL_ID, "name": "probe_tool"}
_PROBE_ROLE = "probe_role"
_TOOLS_VARIABLES = ("tools", "xml_tools")
"""What templates call the tool list; SmolLM3's has a name of its own."""
_THINKING_VARIABLES = ("enable_thinking", "thinking")
"""What templates call the switch of thinking: Qwen3's and SmolLM3's, DeepSeek's and Granite's."""


@dataclass(frozen=True, slots=True)
class TemplateAbilities:
    """What a chat template renders by itself.

    Attributes:
        tools: The tool list.
        calls: An assistant message's `tool_calls`.
        results: Messages of role `tool`.
        parallel: Several calls in one message.
        system: Messages of role `system`.
        has_text_arguments: Whether a call's arguments must be JSON text, not an object.
        tools_variable: The variable that takes the tool list.
        thinking_variable: The variable that turns thinking on and off, if there is one.
    """

    tools: bool
    calls: bool
    results: bool
    parallel: bool = True
    system: bool = True
    has_text_arguments: bool = False
    tools_variable: str = "tools"
    thinking_variable: str | None = None


class ChatTemplate:
    """A model's chat template, ready to render conversations with tools.

    Args:
        template: Jinja source, as in `chat_template.jinja` or `tokenizer_config.json`.
        bos_token: Text of the begin-of-text token, if the template writes it.
        eos_token: Text of the end token, if the template writes it.
        variables: More variables for the template. Fix `date_string` here for templates that print today's date:
            a prompt that changes at midnight loses its reuse.
        dialect: The tool-call dialect, or its name; detected from the template if None.

    Raises:
        ConfigError: There is no dialect of that name.
    """

    def __init__(
        self,
        template: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        variables: Mapping[str, Any] | None = None,
        dialect: Dialect | str | None = None,
    ) -> None:
        self.template = template
        self.dialect = named_dialect(dialect) if isinstance(dialect, str) else dialect or detect_dialect(template)
        self._speaking: dict[str, ChatTemplate] = {}
        self._variables = {"bos_token": bos_token, "eos_token": eos_token, **(variables or {})}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        reasoning: bool | None = None,
    ) -> str:
        """The prompt text; the same arguments always give the same text.

        Args:
            messages: Template messages, as `prompting.messages.to_template_messages` makes them.
            tools: Tools as OpenAI-style dicts.
            add_generation_prompt: End with the header of the assistant's next message.
            reasoning: Whether the model is to think before it answers; None leaves that to the template.

        Raises:
            ConfigError: `reasoning` is given, and the template has no switch for it.
            PromptError: The template refuses the conversation.
        """
        if not messages:
            raise PromptError("there are no messages to render; expected at least one")
        try:
            return self._render(messages, tools, add_generation_prompt=add_generation_prompt, reasoning=reasoning)
        except DLiteError:
            raise
        except (TypeError, ValueError) as error:
            raise PromptError(f"this conversation cannot be written: {error}; expected text and JSON") from error

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        reasoning: bool | None,
    ) -> str:
        abilities = self.abilities
        conversation: list[Message] = list(messages)
        if abilities.calls and not abilities.parallel:
            conversation = split_parallel(conversation)
        if not abilities.results:
            conversation = inline_results(conversation, self.dialect)
        if not abilities.calls:
            conversation = inline_calls(conversation, self.dialect, tools or ())
        if self.dialect.id_length:
            conversation = fit_ids(conversation, self.dialect.id_length)
        if abilities.has_text_arguments:
            conversation = write_arguments(conversation)
        if tools and not abilities.tools:
            conversation = inline_tools(conversation, tools, self.dialect)
            tools = None
        if not abilities.system:
            conversation = merge_system(conversation)
        return self._apply(
            conversation,
            tools,
            variable=abilities.tools_variable,
            add_generation_prompt=add_generation_prompt,
            switches=self._switches(reasoning),
        )

    def speaking(self, dialect: str) -> ChatTemplate:
        """The same template with a dialect of the caller's choice; it is kept, with what was found out about it.

        Raises:
            ConfigError: There is no dialect of that name.
        """
        if dialect not in self._speaking:
            variables = dict(self._variables)
            bos, eos = variables.pop("bos_token"), variables.pop("eos_token")
            self._speaking[dialect] = ChatTemplate(
                self.template, bos_token=bos, eos_token=eos, variables=variables, dialect=dialect
            )
        return self._speaking[dialect]

    @cached_property
    def abilities(self) -> TemplateAbilities:
        """What the template renders by itself, found out by rendering probes."""
        has_system = "probe rules" in self._probe([_PROBE_SYSTEM, _PROBE_USER])
        if not self.dialect.is_native:
            return TemplateAbilities(
                tools=False, calls=False, results=False, system=has_system, thinking_variable=self._thinking_variable()
            )
        offered = [name for name in _TOOLS_VARIABLES if "probe_tool" in self._probe([_PROBE_USER], name)]
        written: list[Message] = write_arguments([_PROBE_CALL])
        is_called = "probe_value" in self._probe([_PROBE_USER, _PROBE_CALL])
        is_called_with_text = not is_called and "probe_value" in self._probe([_PROBE_USER, *written])
        several: list[Message] = [_PROBE_USER, {**_PROBE_CALL, "tool_calls": _PROBE_CALLS}]
        both = self._probe(write_arguments(several) if is_called_with_text else several)
        is_parallel = not (is_called or is_called_with_text) or ("probe_value" in both and "probe_other" in both)
        return TemplateAbilities(
            tools=bool(offered),
            calls=is_called or is_called_with_text,
            results=self._knows_tool_role(written[0] if is_called_with_text else _PROBE_CALL),
            parallel=is_parallel,
            system=has_system,
            has_text_arguments=is_called_with_text,
            tools_variable=[*offered, *_TOOLS_VARIABLES][0],
            thinking_variable=self._thinking_variable(),
        )

    def _switches(self, reasoning: bool | None) -> dict[str, bool]:
        """The variables of what is switched on or off."""
        if reasoning is None:
            return {}
        variable = self.abilities.thinking_variable
        if variable is None:
            raise ConfigError(
                f"reasoning is {reasoning}, but the model's chat template has no switch for it; leave reasoning out"
            )
        return {variable: reasoning}

    def _thinking_variable(self) -> str | None:
        """The variable on which the prompt of a reply depends, if there is one."""
        for name in _THINKING_VARIABLES:
            on, off = (self._probe([_PROBE_USER], switches={name: is_on}) for is_on in (True, False))
            if on != off:
                return name
        return None

    def _knows_tool_role(self, call: Message) -> bool:
        """Whether role `tool` is rendered in another way than a role the template has never heard of."""
        before: list[Message] = [_PROBE_USER, call]
        rendered = self._probe([*before, _PROBE_RESULT])
        stranger = self._probe([*before, {**_PROBE_RESULT, "role": _PROBE_ROLE}])
        return "probe result" in rendered and stranger.replace(_PROBE_ROLE, "tool") != rendered

    def _probe(
        self,
        messages: Sequence[Message],
        tools_variable: str | None = None,
        *,
        switches: Mapping[str, bool] | None = None,
    ) -> str:
        """What the template makes of messages, with a tool if there is a variable for it; nothing if it refuses.

        With switches, the header of the reply is there, too.
        """
        tools = [_PROBE_TOOL] if tools_variable else None
        try:
            return self._apply(
                messages,
                tools,
                variable=tools_variable or "tools",
                add_generation_prompt=switches is not None,
                switches=switches or {},
            )
        except PromptError:
            return ""

    def _apply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        variable: str,
        add_generation_prompt: bool,
        switches: Mapping[str, bool],
    ) -> str:
        from jinja2 import TemplateError  # these two take most of a second to import
        from transformers.utils.chat_template_utils import render_jinja_template

        given: list[Any] | None = [dict(tool) for tool in tools] if tools else None
        others: dict[str, Any] = {**self._variables, **switches} | ({} if variable == "tools" else {variable: given})
        try:
            rendered, _ = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=given if variable == "tools" else None,
                chat_template=self.template,
                add_generation_prompt=add_generation_prompt,
                **others,
            )
        except (TemplateError, TypeError, ArithmeticError, AttributeError, LookupError) as error:
            raise PromptError(f"the model's chat template refuses this conversation: {error}") from error
        text: str = rendered[0]
        text.encode()
        return text
