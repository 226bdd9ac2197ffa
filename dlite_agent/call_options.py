"""What a call may ask for: every option is used or refused by name, and none is ignored.

The settings that a model has and a call may change are fields of one class, `GenerationSettings`: their bounds and
defaults live there once, for the constructor, for `bind` and for each call.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from dlite_agent.errors import ConfigError
from dlite_agent.structured import response_schema
from dlite_agent.tool_schemas import format_tools, tool_names


class GenerationSettings(BaseModel):
    """How a reply is generated; a model's own, or those of one call.

    Attributes:
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the fewest tokens that together have this probability.
        min_p: Keep tokens at least so many times as likely as the likeliest; 0 keeps all.
        seed: Names the sampling noise; the same seed gives the same text with any drafter.
        repetition_penalty: Makes tokens of the prompt and of the reply so far less likely; 1 is off.
        presence_penalty: Subtracted from the logits of tokens of the reply so far.
        frequency_penalty: Subtracted as often as a token is in the reply so far.
        logit_bias: Added to the logits of tokens, by id.
        bad_words: Texts that the reply must not hold, in the tokens they are encoded to by themselves and behind a
            space; a text that is spelled with other tokens is not kept out.
        min_tokens: The reply does not end by itself before so many tokens, unless a grammar allows nothing else.
        logprobs: Whether `response_metadata["logprobs"]` holds the log-probability of each token of the reply, in
            OpenAI's form: of the target's own logits, before any option here changes them. Streamed, each chunk has
            those of its text, which add up as chunks do; the events of version "v3" keep the last chunk's only.
        top_logprobs: For so many of the likeliest tokens at each place, too; needs `logprobs`.
        n: Replies per call of `generate`, each with a seed of its own; `invoke` returns the first.
        verification: "exact": the text for a seed is the same with any drafter. "rejection": its distribution is the
            target's, and more of each draft is kept, but the text depends on the drafts. Greedy, they are the same.
        reasoning: Whether the model thinks before it answers, where its chat template has a switch for that (Qwen3,
            SmolLM3, DeepSeek V3.1, Granite 3); elsewhere True and False are a `ConfigError` of the call. None: as the
            template does by itself.
        max_tokens: Upper bound of tokens per reply.
        max_draft: Longest draft that is verified at once; how long each is, is decided by what it promises and costs.
    """

    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int = 0
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    presence_penalty: float = Field(default=0.0, ge=-100, le=100)
    frequency_penalty: float = Field(default=0.0, ge=-100, le=100)
    logit_bias: dict[int, float] = Field(default_factory=dict)
    bad_words: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    min_tokens: int = Field(default=0, ge=0)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    n: int = Field(default=1, ge=1, le=128)
    verification: Literal["exact", "rejection"] = "exact"
    reasoning: bool | None = None
    max_tokens: int = Field(default=1024, ge=1)
    max_draft: int = Field(default=15, ge=0, le=31)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs} while logprobs is off; set logprobs=True, too")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}; expected at most max_tokens, {self.max_tokens}")
        return self


SETTINGS = tuple(GenerationSettings.model_fields)
_REQUESTS = ("tools", "tool_choice", "parallel_tool_calls", "strict", "response_format", "stop", "session_id", "stream")
_PASSED_THROUGH = ("session", "ls_structured_output_format", "structured_output_format")


class Session(NamedTuple):
    """What a call belongs to; the model's own methods pass it on to its inner ones, as `session`.

    Attributes:
        thread_id: The thread, or None for a call that belongs to none (it is not stored).
        namespace: Checkpoint namespace inside the thread.
    """

    thread_id: str | None
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What one call asks for, checked.

    Attributes:
        settings: How its reply is generated.
        tools: Tools as OpenAI-style dicts.
        tool_choice: "auto", "none", "any" or a tool's name.
        is_parallel: Whether a reply may hold several tool calls.
        schema: JSON schema that a reply which calls no tool is held to, or None.
        stops: Strings that end the reply.
        thread_id: The session's thread, or None for a call that belongs to none (it is not stored).
        namespace: Checkpoint namespace inside the thread.
    """

    settings: GenerationSettings
    tools: tuple[dict[str, Any], ...]
    tool_choice: str
    is_parallel: bool
    schema: Mapping[str, Any] | None
    stops: tuple[str, ...]
    thread_id: str | None
    namespace: str

    @property
    def offered_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that may be called."""
        return () if self.tool_choice == "none" else self.tools


def check_options(own: GenerationSettings, options: Mapping[str, Any]) -> GenerationSettings:
    """Refuse options that cannot work; returns the settings they make of a model's own.

    Args:
        own: The model's settings; they stand where an option is None or not given.
        options: Keyword arguments of a call or of `bind`.

    Raises:
        ConfigError: An option is unknown, has the wrong type or is out of its bounds.
    """
    for name in options:
        if name not in (*SETTINGS, *_REQUESTS, *_PASSED_THROUGH):
            raise ConfigError(_unknown(name))
    if not isinstance(options.get("session", Session(None)), Session):
        raise ConfigError(_unknown("session"))
    for name in ("parallel_tool_calls", "strict", "stream"):
        if not isinstance(options.get(name), bool | None):
            raise ConfigError(f"{name} is {options[name]!r}; expected True, False or None")
    _stops(options.get("stop"))
    response_schema(options.get("response_format"))
    given = {name: options[name] for name in SETTINGS if options.get(name) is not None}
    if given.get("logprobs") is False:
        given.setdefault("top_logprobs", 0)
    try:
        return GenerationSettings.model_validate({name: getattr(own, name) for name in SETTINGS} | given)
    except ValidationError as error:
        raise _refusal(error) from error


def refuse_several(own: GenerationSettings, options: Mapping[str, Any]) -> None:
    """Refuse to stream several replies, which LangChain would take for one.

    Raises:
        ConfigError: `n` is above 1, or as `check_options`.
    """
    num_replies = check_options(own, options).n
    if num_replies > 1:
        raise ConfigError(f"n is {num_replies}, but a stream is one reply; call `generate` instead, or set n=1")


def resolve_options(own: GenerationSettings, options: Mapping[str, Any], *, stop: Any, session: Session) -> CallOptions:
    """Return what a call asks for.

    Args:
        own: The model's settings.
        options: Keyword arguments of the call, those that were bound among them.
        stop: The call's stop strings.
        session: What it belongs to.

    Raises:
        ConfigError: As `check_options`; or `tool_choice` names no tool, or two tools have the same name.
    """
    tools = tuple(format_tools(options.get("tools") or ()))
    parallel = options.get("parallel_tool_calls")
    return CallOptions(
        settings=check_options(own, options),
        tools=tools,
        tool_choice=choose_tool(options.get("tool_choice"), tool_names(tools)),
        is_parallel=parallel is not False,
        schema=response_schema(options.get("response_format")),
        stops=_stops(stop),
        thread_id=session.thread_id,
        namespace=session.namespace,
    )


def choose_tool(choice: Any, names: Sequence[str]) -> str:
    """Reduce LangChain's ways of choosing a tool to "auto", "none", "any" or a name.

    Raises:
        ConfigError: The choice is none of these, or a call is wanted and there are no tools.
    """
    if isinstance(choice, dict):
        named = choice.get("function", choice)
        choice = named.get("name", choice.get("type")) if isinstance(named, dict) else None
        choice = choice or "an incomplete dict"
    if choice is None or choice is False or choice == "auto":
        return "auto"
    if choice == "none" or choice in names:
        return str(choice)
    if choice is True or choice in ("any", "required"):
        if names:
            return "any"
        raise ConfigError(f"tool_choice is {choice!r} but there are no tools; bind some, or leave tool_choice out")
    expected = ", ".join(["auto", "none", "any", *map(repr, names)])
    raise ConfigError(f"tool_choice is {choice!r}; expected {expected}")


def _stops(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(stops, Sequence) or not all(isinstance(text, str) and text for text in stops):
        raise ConfigError(f"stop is {stop!r}; expected a text or a list of texts, none of them empty")
    return tuple(stops)


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, (*SETTINGS, *_REQUESTS), n=1)
    guess = f"; did you mean {close[0]}?" if close else "."
    return f"{name} is no option of a call{guess} There are: {', '.join(sorted((*SETTINGS, *_REQUESTS)))}"


def _refusal(error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return ConfigError(message)
    return ConfigError(f"{'.'.join(str(part) for part in first['loc'])} is {first['input']!r}: {message}")
