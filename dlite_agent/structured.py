"""Structured output: what a reply is held to, and how it is read back.

The grammar sees to it that a whole reply parses and validates. What it cannot see to is that the reply becomes whole
within `max_tokens`: one that was cut is refused, never completed by guessing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from dlite_agent.errors import ConfigError, DLiteError, UnsupportedSchemaError

if TYPE_CHECKING:
    from dlite_agent.constraints import GrammarFactory
    from dlite_agent.engine.constraint import TokenConstraint
    from dlite_agent.prompting.dialects import Dialect

Method = Literal["function_calling", "json_schema", "json_mode"]
_METHODS = ("function_calling", "json_schema", "json_mode")
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_SCHEMA_KEYS = frozenset({"properties", "anyOf", "oneOf", "allOf", "$ref", "$defs", "enum", "const", "items", "title"})
_SCHEMA_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})


class IncompleteReplyError(DLiteError, OutputParserException):
    """A structured reply was cut before it was whole; LangChain's parser error and this package's in one."""


def response_schema(response_format: Any) -> Mapping[str, Any] | None:
    """Return the JSON schema that a `response_format` stands for, None for free text.

    Args:
        response_format: None; OpenAI's {"type": "text"}, {"type": "json_object"} or {"type": "json_schema",
            "json_schema": {"name": ..., "schema": ...}}; or a JSON schema, a pydantic class or a TypedDict.

    Raises:
        ConfigError: It is none of these.
    """
    if response_format is None:
        return None
    if isinstance(response_format, type):
        return _schema_of(response_format)
    if isinstance(response_format, Mapping):
        kind = response_format.get("type")
        if kind == "text":
            return None
        if kind == "json_object":
            return _ANY_OBJECT
        if kind == "json_schema":
            named = response_format.get("json_schema", response_format)
            schema = named.get("schema") if isinstance(named, Mapping) else None
            if isinstance(schema, Mapping):
                return schema
        elif kind in _SCHEMA_TYPES or _SCHEMA_KEYS & response_format.keys():
            return response_format
    raise ConfigError(
        f"response_format is {response_format!r}; expected a type of text, json_object or json_schema (with a "
        "json_schema.schema), a JSON schema, a pydantic class or a TypedDict"
    )


def structured_output(
    model: BaseChatModel,
    schema: Any,
    *,
    method: Method,
    include_raw: bool,
    options: Mapping[str, Any],
) -> Runnable[Any, Any]:
    """Return the runnable behind `ChatDLite.with_structured_output`.

    Raises:
        ConfigError: The method is unknown, the schema is no schema, or an option cannot work.
    """
    if method not in _METHODS:
        raise ConfigError(f"method is {method!r}; expected {', '.join(_METHODS)}")
    if taken := sorted({"tools", "tool_choice", "parallel_tool_calls", "response_format"} & options.keys()):
        raise ConfigError(f"with_structured_output sets {taken[0]} itself; to combine tools with it, bind them instead")
    if schema is None and method != "json_mode":
        raise ConfigError(f"method {method} got no schema; give one, or use json_mode for any JSON object")
    traced = {} if schema is None else {"ls_structured_output_format": {"kwargs": {"method": method}, "schema": schema}}
    if method == "function_calling":
        tools: list[Any] = [schema]
        bound = model.bind_tools(tools, tool_choice=_tool_name(schema), parallel_tool_calls=False, **traced, **options)
    else:
        wanted = _ANY_OBJECT if schema is None else _schema_of(schema)
        held = {"type": "json_schema", "json_schema": {"name": wanted.get("title", "answer"), "schema": wanted}}
        bound = model.bind(response_format=held, **traced, **options)
    reader = _reader(schema, method)
    checked: Runnable[Any, Any] = RunnableGenerator(_whole, _awhole) | reader
    if not include_raw:
        return bound | checked
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | checked, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _reader(schema: Any, method: Method) -> Runnable[Any, Any]:
    """Return what makes an instance of the schema of a whole reply."""
    if method == "function_calling":
        if _is_pydantic(schema):
            return PydanticToolsParser(tools=[schema], first_tool_only=True)
        return JsonOutputKeyToolsParser(key_name=_tool_name(schema), first_tool_only=True)
    return PydanticOutputParser(pydantic_object=schema) if _is_pydantic(schema) else JsonOutputParser()


def answer_constraint(
    grammars: GrammarFactory,
    schema: Mapping[str, Any],
    *,
    tools: Sequence[Mapping[str, Any]],
    dialect: Dialect,
    is_parallel: bool,
    is_thinking: bool,
) -> TokenConstraint:
    """Hold a reply to JSON of a schema or, if there are tools, to calls of these instead.

    Where the dialect writes calls as bare JSON, there is one call in a reply at most. Thinking that the prompt has
    opened is closed at once.

    Raises:
        UnsupportedSchemaError: A schema has a feature that a grammar cannot hold; the message has its path.
    """
    from dlite_agent.prompting.grammars import CallGrammars
    from dlite_agent.prompting.rules import json_rule, quoted
    from dlite_agent.prompting.schema_limits import refuse_unheld
    from dlite_agent.prompting.schemas import tool_parameters

    first = quoted(f"\n{dialect.thinking[1]}\n\n") if is_thinking else ""
    parameters = tool_parameters(tools)
    schemas = {"": schema, **parameters}
    refuse_unheld(schemas)
    if tools and dialect.is_bare:  # two grammars that begin alike would shadow each other in the lexer
        schema = _call_or_answer(schema, parameters, dialect)
    parts = [f"start: {first} answer", f"answer: {json_rule(schema)}"]
    if tools and not dialect.is_bare:
        calls = CallGrammars(parameters, dialect, parallel=is_parallel).forced()
        parts = [f"start: {first} (calls | answer)", parts[1], calls.replace("start:", "calls:", 1)]
    return grammars.lark("\n".join(parts), schemas)


def _call_or_answer(
    schema: Mapping[str, Any], parameters: Mapping[str, Mapping[str, Any]], dialect: Dialect
) -> dict[str, Any]:
    """Return the schema of an answer or of one call as bare JSON; definitions move to its root, where they are found.

    Raises:
        UnsupportedSchemaError: Two schemas define the same name differently.
    """
    form = dialect.bare_form
    keys = (form.name_key, form.arguments_key)
    parts: list[dict[str, Any]] = [dict(part) for part in (schema, *parameters.values())]
    shared: dict[str, dict[str, Any]] = {}
    for part in parts:
        for group in ("$defs", "definitions"):
            for name, definition in part.pop(group, {}).items():
                if shared.setdefault(group, {}).setdefault(name, definition) != definition:
                    raise UnsupportedSchemaError(
                        f"unsupported at {group}.{name}: the answer and the tools define it differently; rename one"
                    )
    calls = [
        {"type": "object", "properties": dict(zip(keys, ({"const": name}, inner), strict=True)), "required": [*keys]}
        for name, inner in zip(parameters, parts[1:], strict=True)
    ]
    return {**shared, "anyOf": [*calls, parts[0]]}


def _is_pydantic(schema: Any) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def _schema_of(schema: Any) -> Mapping[str, Any]:
    """Return the JSON schema of a pydantic class, a TypedDict or a dict."""
    if isinstance(schema, Mapping) and not {"function", "parameters"} & schema.keys():
        wanted = response_schema(schema)
        return _ANY_OBJECT if wanted is None else wanted
    try:
        return _described(schema)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{schema!r} has no JSON schema ({error}); give a pydantic class or a TypedDict") from error


def _described(schema: Any) -> Mapping[str, Any]:
    if _is_pydantic(schema) and hasattr(schema, "model_json_schema"):
        described: dict[str, Any] = schema.model_json_schema()
        return described
    return convert_to_json_schema(schema)


def _tool_name(schema: Any) -> str:
    try:
        return str(convert_to_openai_tool(schema)["function"]["name"])
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"{schema!r} is no tool ({error}); give a pydantic class, a TypedDict without NotRequired, or a JSON "
            "schema with a title and a description, or use method='json_schema'"
        ) from error


def _whole(messages: Iterator[BaseMessage]) -> Iterator[BaseMessage]:
    check = _WholenessCheck()
    for message in messages:
        yield check.take(message)
    check.end()


async def _awhole(messages: AsyncIterator[BaseMessage]) -> AsyncIterator[BaseMessage]:
    check = _WholenessCheck()
    async for message in messages:
        yield check.take(message)
    check.end()


class _WholenessCheck:
    """Raises `IncompleteReplyError` for a reply, in one message or in chunks, that is neither calls nor JSON.

    LangChain's parsers would complete cut JSON by guessing, and make None of a call that is not there.
    """

    def __init__(self) -> None:
        self._text = ""
        self._has_call = False

    def take(self, message: BaseMessage) -> BaseMessage:
        """Look at a message, or at the next chunk of one, and return it."""
        assert isinstance(message, AIMessage)
        self._text += message.text
        self._has_call = self._has_call or bool(message.tool_calls)
        if message.response_metadata.get("finish_reason") == "length":
            raise self._error("was cut at its length limit; raise max_tokens")
        if message.invalid_tool_calls:
            raise self._error("holds a call that was cut; raise max_tokens, or leave out the stop strings")
        return message

    def end(self) -> None:
        """Look at the whole."""
        if self._has_call:
            return
        try:
            json.loads(self._text)
        except ValueError as error:
            raise self._error(f"is no JSON ({error}); leave out the stop strings") from error

    def _error(self, problem: str) -> IncompleteReplyError:
        return IncompleteReplyError(f"the structured reply {problem}", llm_output=self._text)
