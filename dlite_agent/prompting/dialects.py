"""How a model family writes tool calls: one row of a table per dialect, found from the chat template or by name.

A new family is a new row in `DIALECTS`: markers around the calls, and the form of one call (see `prompting.forms`).
Templates that no row knows get `GENERIC`: the Hermes protocol, explained to the model in the system message (see
`prompting.template`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlite_agent.errors import ConfigError
from dlite_agent.prompting.escaped import EscapedForm
from dlite_agent.prompting.forms import Call, CallForm, JsonForm, NamedForm
from dlite_agent.prompting.parameter_tags import ParameterTagsForm
from dlite_agent.prompting.pythonic import PythonicForm
from dlite_agent.prompting.schemas import Schema

_JSON = JsonForm()


@dataclass(frozen=True, slots=True)
class Dialect:
    """The written form of tool calls. A block of calls is `begin` call (`between` call)* `end`.

    Attributes:
        name: What the dialect is called.
        form: How one call is written.
        call_open: Text that starts a block of calls.
        call_close: Text that ends it; empty where nothing does.
        begin: What is written before the first call. It starts with `call_open`, or is empty where calls are written
            as bare JSON and `call_open` is only understood.
        between: What is written between two calls.
        end: What is written behind the last.
        is_block: Whether a block can hold several calls one after another, without an opener for each.
        is_bare: Whether bare JSON of a bound tool at the beginning of a reply is a call in any case; else it is one
            if its arguments validate.
        fences: Wrappers that small models put around a bare JSON call instead of the tags; an opener that starts with
            another one comes first.
        marks: Texts that a chat template of this dialect contains, all of them; empty for a dialect that no template
            teaches.
        other_marks: Another set of marks that will do as well, if there are any.
        foreign_marks: Texts that say it is another dialect after all.
        thinking: The tags around what a model thinks before it answers; there are no calls in it.
        result: What stands around a tool's result where the template knows no tool role.
        id_length: Length of the ids of calls, of letters and digits, where templates insist on one.
    """

    name: str
    form: CallForm = _JSON
    call_open: str = "<tool_call>"
    call_close: str = "</tool_call>"
    begin: str = "<tool_call>\n"
    between: str = "\n</tool_call>\n<tool_call>\n"
    end: str = "\n</tool_call>"
    is_block: bool = True
    is_bare: bool = False
    fences: tuple[tuple[str, str], ...] = (("```json", "```"), ("```", "```"), ("<tools>", "</tools>"))
    marks: tuple[str, ...] = ()
    other_marks: tuple[str, ...] = ()
    foreign_marks: tuple[str, ...] = ()
    thinking: tuple[str, str] = ("<think>", "</think>")
    result: tuple[str, str] = ("<tool_response>\n", "\n</tool_response>")
    id_length: int | None = None

    @property
    def is_native(self) -> bool:
        """Whether chat templates of this dialect are written for it, so that it is worth asking what they render."""
        return bool(self.marks)

    @property
    def bare_form(self) -> JsonForm:
        """The form of bare JSON calls, which models of every dialect write at times."""
        return self.form if isinstance(self.form, JsonForm) else _JSON

    @property
    def markers(self) -> frozenset[str]:
        """Texts for which a tokenizer may have special tokens that are nevertheless part of a reply's text."""
        return frozenset(text for text in (self.call_open, self.call_close, *self.thinking, *self.form.markers) if text)

    def write(self, calls: Sequence[Call], schemas: Mapping[str, Schema] | None = None) -> str:
        """Calls, given as names and arguments, as the model would write them.

        Args:
            calls: At least one.
            schemas: Schemas of the tools' arguments, for dialects in which a value is written after its type.

        Raises:
            PromptError: The dialect has no way to write a name or a value.
        """
        written = [self.form.write(name, args, (schemas or {}).get(name, {})) for name, args in calls]
        return f"{self.begin}{self.between.join(written)}{self.end}"

    def format_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """One call as the model would write it; raises as `write` does."""
        return self.write([(name, dict(arguments))])

    def format_result(self, text: str) -> str:
        """One tool result as part of a user message, for templates that know no tool role."""
        return f"{self.result[0]}{text}{self.result[1]}"

    def format_tools(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The tool list and the protocol, as text for the system message."""
        signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{signatures}\n</tools>\n\n{self._protocol()}"
        )

    def is_thinking(self, prompt: str) -> bool:
        """Whether a prompt ends within the thinking of the reply that it asks for."""
        begun, ended = (prompt.rfind(tag) for tag in self.thinking)
        return begun > ended and not prompt[begun + len(self.thinking[0]) :].strip()

    def _protocol(self) -> str:
        if self.form == _JSON and self.begin.startswith("<tool_call>"):
            call = '{"name": <function-name>, "arguments": <args-json-object>}'
            return (
                "For each function call, return a json object with function name and arguments within "
                f"{self.call_open}{self.call_close} XML tags:\n{self.call_open}\n{call}\n{self.call_close}"
            )
        one = ("first_function", {"text": "a value", "number": 2})
        return (
            f"To call a function, write the call in this form:\n{self.write([one])}\n"
            f"Several calls together have this form:\n{self.write([one, ('second_function', {})])}"
        )


def _deepseek(words: str) -> str:
    """DeepSeek's special tokens have a full-width bar and a block where others have a bar and an underscore."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


HERMES = Dialect(name="hermes", marks=("<tool_call>", "</tool_call>", "arguments"), foreign_marks=("<function=",))
"""Qwen2.5, Qwen3, SmolLM3, Granite 4 and many others; SmolLM2's list within the tags is understood too."""

QWEN3_CODER = Dialect(name="qwen3-coder", form=ParameterTagsForm(), marks=("<tool_call>", "<function=", "<parameter="))

LLAMA3 = Dialect(
    name="llama3",
    form=JsonForm(arguments_key="parameters", other_arguments_key="arguments"),
    call_open="<|python_tag|>",
    call_close="",
    begin="",
    between="; ",
    end="",
    is_bare=True,
    marks=("<|start_header_id|>", '"parameters": '),
)

MISTRAL = Dialect(
    name="mistral",
    call_open="[TOOL_CALLS]",
    call_close="",
    begin="[TOOL_CALLS] [",
    between=", ",
    end="]",
    marks=("[TOOL_CALLS]",),
    foreign_marks=("[ARGS]",),
    thinking=("[THINK]", "[/THINK]"),
    id_length=9,
)

MISTRAL_ARGS = Dialect(
    name="mistral-args",
    form=NamedForm(before="", between="[ARGS]", after=""),
    call_open="[TOOL_CALLS]",
    call_close="",
    begin="[TOOL_CALLS]",
    between="[TOOL_CALLS]",
    end="",
    is_block=False,
    marks=("[TOOL_CALLS]", "[ARGS]"),
    thinking=("[THINK]", "[/THINK]"),
    id_length=9,
)

LFM2 = Dialect(
    name="lfm2",
    form=PythonicForm(is_listed=True),
    call_open="<|tool_call_start|>",
    call_close="<|tool_call_end|>",
    begin="<|tool_call_start|>[",
    between=", ",
    end="]<|tool_call_end|>",
    marks=("<|tool_list_start|>",),
    other_marks=("<|tool_call_start|>",),
    result=("<|tool_response_start|>", "<|tool_response_end|>"),
)

FUNCTIONGEMMA = Dialect(
    name="functiongemma",
    form=EscapedForm(),
    call_open="<start_function_call>",
    call_close="<end_function_call>",
    begin="<start_function_call>",
    between="<end_function_call><start_function_call>",
    end="<end_function_call>",
    marks=("<start_function_call>",),
)

GEMMA = Dialect(
    name="gemma",
    form=PythonicForm(is_listed=False),
    call_open="```tool_code",
    call_close="```",
    begin="```tool_code\n",
    between="\n",
    end="\n```",
    marks=("<start_of_turn>", "<end_of_turn>"),
    foreign_marks=("<tool_call>", "<start_function_call>"),
    result=("```tool_output\n", "\n```"),
)
"""Gemma 1 to 3. Their templates know nothing of tools; the fences are what Gemma was trained to answer in."""

DEEPSEEK_V3 = Dialect(
    name="deepseek-v3",
    form=NamedForm(
        before=f"{_deepseek('tool call begin')}function{_deepseek('tool sep')}",
        between="\n```json\n",
        after=f"\n```{_deepseek('tool call end')}",
    ),
    call_open=_deepseek("tool calls begin"),
    call_close=_deepseek("tool calls end"),
    begin=_deepseek("tool calls begin"),
    between="\n",
    end=_deepseek("tool calls end"),
    marks=(_deepseek("tool calls begin"), "```json"),
)
"""DeepSeek V3 and R1."""

DEEPSEEK_V31 = Dialect(
    name="deepseek-v3.1",
    form=NamedForm(
        before=_deepseek("tool call begin"), between=_deepseek("tool sep"), after=_deepseek("tool call end")
    ),
    call_open=_deepseek("tool calls begin"),
    call_close=_deepseek("tool calls end"),
    begin=_deepseek("tool calls begin"),
    between="",
    end=_deepseek("tool calls end"),
    marks=(_deepseek("tool calls begin"),),
    foreign_marks=("```json",),
)

GRANITE = Dialect(
    name="granite",
    call_open="<|tool_call|>",
    call_close="",
    begin="<|tool_call|>[",
    between=", ",
    end="]",
    marks=("<|tool_call|>", "<|start_of_role|>"),
)

GENERIC = Dialect(name="generic")
"""The protocol of Hermes for templates that teach none: tool list and protocol go into the system message."""

DIALECTS: tuple[Dialect, ...] = (
    HERMES,
    QWEN3_CODER,
    MISTRAL,
    MISTRAL_ARGS,
    LFM2,
    FUNCTIONGEMMA,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GRANITE,
    LLAMA3,
    GEMMA,
)
"""The dialects that templates teach; the first whose marks fit is taken."""


def detect_dialect(template: str) -> Dialect:
    """The dialect that a chat template teaches, or `GENERIC` where no row of the table knows it."""
    for dialect in DIALECTS:
        sets = [marks for marks in (dialect.marks, dialect.other_marks) if marks]
        is_taught = any(all(mark in template for mark in marks) for marks in sets)
        if is_taught and not any(mark in template for mark in dialect.foreign_marks):
            return dialect
    return GENERIC


def named_dialect(name: str) -> Dialect:
    """The dialect of a name.

    Raises:
        ConfigError: There is none.
    """
    for dialect in (*DIALECTS, GENERIC):
        if dialect.name == name:
            return dialect
    names = ", ".join(dialect.name for dialect in (*DIALECTS, GENERIC))
    raise ConfigError(f"the tool-call dialect is {name!r}; expected one of {names}")
