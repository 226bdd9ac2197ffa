"""ChatDLite: a LangChain chat model over a local target with DLite speculation and sessions that persist.

Everything a call does is one generator (`dlite_agent.reply`) on a thread of its own; `invoke`, `stream` and their
asynchronous twins only carry its chunks to the caller. The passes of all calls are the engine's, which batches them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig, ensure_config
from pydantic import ConfigDict, Field

from dlite_agent import lifetime
from dlite_agent.call_options import (
    SETTINGS,
    GenerationSettings,
    Session,
    check_options,
    choose_tool,
    refuse_several,
    resolve_options,
)
from dlite_agent.capabilities import context_length, text_profile
from dlite_agent.config import Settings
from dlite_agent.delivery import chunks_of, deliver
from dlite_agent.errors import ConfigError
from dlite_agent.reply import PROVIDER, Call
from dlite_agent.sessions.keys import without_task_ids
from dlite_agent.structured import Method, structured_output
from dlite_agent.tool_schemas import Tool, format_tools

if TYPE_CHECKING:
    from langchain_core.language_models.chat_models import _ChatModelBinding
    from langchain_core.language_models.model_profile import ModelProfile

    from dlite_agent.runtime import Runtime

_CHANGES_NO_TEXT = ("max_draft",)


class ChatDLite(BaseChatModel, GenerationSettings):
    """A local model for LangChain and LangGraph whose sessions survive their process.

    The text is exactly the target model's own: token-identical to plain decoding, greedy or seeded.

    Example:
        >>> model = ChatDLite(model="qwen2.5-coder-1.5b", session_store="auto")
        >>> model.bind_tools([search]).invoke("...", config={"configurable": {"thread_id": "42"}})

    Every setting of `GenerationSettings` may be given here, bound, or given to one call. A call's option that is
    unknown or cannot work is a `ConfigError`.

    Attributes:
        model: A registry name (`dlite-agent models`), a local folder or a hub id.
        drafter: "auto", "lookup", "null" (plain decoding) or the folder of a DLite checkpoint.
        quantize: "int8" for int8 weights (a target of its own, several times faster on a CPU), None for float32,
            "auto" for what the registry says of the model.
        stop: Strings that end a reply, unless a call names its own.
        streaming: True: `invoke` tells callbacks of each chunk; False, given expressly: `stream` gives one chunk.
        dialect: How the model writes tool calls, by a name of `prompting.dialects.DIALECTS`; "auto" reads it off the
            chat template.
        session_store: Where sessions persist: None (RAM only), "auto" (`REDIS_URL`, else the embedded server), a Redis
            URL, or a `SessionStore`.
        settings: Folders, threads and server address.
        on_prefill: Told (rows done, rows to do) after every prefill chunk, on the engine's thread.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    model: str
    drafter: str = "auto"
    quantize: Literal["auto", "int8"] | None = "auto"
    stop: str | list[str] | None = None
    streaming: bool = False
    dialect: str = "auto"
    session_store: Any = Field(default=None, exclude=True)
    settings: Settings = Field(default_factory=Settings, exclude=True)
    on_prefill: Callable[[int, int], None] | None = Field(default=None, exclude=True)
    cache: Any = Field(default=False, exclude=True)

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Say that `dumpd` and `load` work; settings and the session store belong to the process and are left out.

        `load` wants to be told: `load(dumped, allowed_objects=[ChatDLite], valid_namespaces=["dlite_agent"])`.
        """
        return True

    @property
    def _llm_type(self) -> str:
        return "dlite-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What decides the text of a reply; the drafter does not, unless verification is by rejection."""
        drafting = ("drafter", *_CHANGES_NO_TEXT) if self.verification == "rejection" else ()
        settings = (name for name in SETTINGS if name not in _CHANGES_NO_TEXT)
        named = ("model", "quantize", "dialect", "stop", *settings, *drafting)
        weights = {"dtype": self.settings.dtype, "exact": self.settings.exact}
        return {name: getattr(self, name) for name in named} | weights

    def _resolve_model_profile(self) -> ModelProfile:
        profile = text_profile()
        length = context_length(self.model, self.settings)
        if length is not None:
            profile["max_input_tokens"] = length - 1
        return profile

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = PROVIDER
        return params

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """Return the key of a call in LangChain's cache; it has what decides the text, which is not all serialized."""
        return f"{super()._get_llm_string(stop=stop, **kwargs)}---{self._identifying_params}"

    def bind(self, **kwargs: Any) -> _ChatModelBinding:
        """Bind options to every call.

        Raises:
            ConfigError: An option is unknown or cannot work.
        """
        check_options(self, kwargs)
        return super().bind(**kwargs)

    def bind_tools(
        self, tools: Sequence[Tool], *, tool_choice: str | dict[str, Any] | bool | None = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Offer tools to the model.

        Args:
            tools: Functions, pydantic classes, LangChain tools or OpenAI-style dicts.
            tool_choice: None or "auto" (the model decides), "none" (it is shown the tools, and cannot begin a call),
                "any", True or "required" (some call is made), or the name of a tool, plain or as an OpenAI-style dict
                (that tool is called).
            kwargs: Bound to every call. `parallel_tool_calls=False` allows one call per reply. `strict` changes
                nothing: calls are always held to their tool's schema.

        Raises:
            ConfigError: If `tool_choice` names no tool of `tools`, or an option is unknown or cannot work.
        """
        formatted = format_tools(tools)
        choice = choose_tool(tool_choice, [tool["function"]["name"] for tool in formatted])
        return self.bind(tools=formatted, tool_choice=choice, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        include_raw: bool = False,
        method: Method = "function_calling",
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a runnable whose replies are instances of a schema, held to it by a grammar.

        Args:
            schema: A pydantic class (replies are its instances), a TypedDict, a JSON schema or an OpenAI-style tool
                (replies are dicts); None under "json_mode" for any JSON object.
            include_raw: Return {"raw": message, "parsed": ..., "parsing_error": ...} and raise no parsing error.
            method: "function_calling" shows the schema to the model, as a tool that it has to call. "json_schema" and
                "json_mode" show it nothing and hold the text of the reply to the schema: describe it in the prompt.
            kwargs: Bound to every call.

        Raises:
            ConfigError: The schema is none, the method is unknown, or an option cannot work.
            UnsupportedSchemaError: When called: the grammar cannot hold a feature of the schema.
            IncompleteReplyError: When called: the reply reached `max_tokens` before it was whole.
        """
        return structured_output(self, schema, method=method, include_raw=include_raw, options=kwargs)

    def invoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, *, stop: Any = None, **kwargs: Any
    ) -> AIMessage:
        """Answer in the session that the config's `thread_id` names, or that `session_id=` does."""
        return super().invoke(input, config, stop=stop, **_identified(config, kwargs))

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, *, stop: Any = None, **kwargs: Any
    ) -> AIMessage:
        """Do as `invoke`; cancelling it stops decoding within one step."""
        return await super().ainvoke(input, config, stop=stop, **_identified(config, kwargs))

    def stream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, *, stop: Any = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        """Do as `invoke`, chunk by chunk; closing it stops decoding within one step."""
        refuse_several(self, kwargs)
        yield from super().stream(input, config, stop=stop, **_identified(config, kwargs))

    async def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, *, stop: Any = None, **kwargs: Any
    ) -> AsyncIterator[AIMessageChunk]:
        """Do as `stream`."""
        refuse_several(self, kwargs)
        async for chunk in super().astream(input, config, stop=stop, **_identified(config, kwargs)):
            yield chunk

    def get_token_ids(self, text: str) -> list[int]:
        """Return the target's own tokens of a text."""
        return self.runtime.encoder.encode(text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Tool] | None = None) -> int:
        """Return how many tokens the model is given for a conversation and its tools, template and all.

        A call outside a session is given just as many. In a session the ids that were generated stand, which may be
        more or fewer than their text would be encoded to.

        Raises:
            UnsupportedContentError: A message holds what the model cannot read.
            ConfigError: Something in `tools` is no tool.
        """
        runtime = self.runtime
        text = runtime.render(messages, format_tools(tools or ()), reasoning=self.reasoning)
        return len(runtime.encoder.encode(text))

    def warm_up(self) -> None:
        """Load the weights now instead of at the first call."""
        _ = self.runtime

    def _streaming_disabled(self, **kwargs: Any) -> bool:
        return super()._streaming_disabled(**kwargs) or check_options(self, kwargs).n > 1

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        calls = self._calls(messages, stop, kwargs)
        return _result(generate_from_stream(chunks_of(self._loaded, call)) for call in reversed(calls))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        calls = self._calls(messages, stop, kwargs)
        replies = []
        for call in reversed(calls):
            async with await deliver(self._loaded, call) as chunks:
                replies.append([chunk async for chunk in chunks])
        return _result(generate_from_stream(iter(chunks)) for chunks in replies)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        yield from chunks_of(self._loaded, self._only_call(messages, stop, kwargs))

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with await deliver(self._loaded, self._only_call(messages, stop, kwargs)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _loaded(self) -> Runtime:
        with lifetime.awaited_at_exit():  # loading imports torch
            return self.runtime

    @property
    def runtime(self) -> Runtime:
        """The engine and what belongs to it, shared by the process's models of the same weights."""
        from dlite_agent.runtime import shared_runtime  # torch and transformers load here, not at import

        store = _open_store(self.session_store, self.settings)
        loaded = shared_runtime(
            self.model, drafter=self.drafter, quantize=self.quantize, store=store, settings=self.settings
        )
        if self.profile is not None:
            self.profile.setdefault("max_input_tokens", loaded.target.max_positions - 1)
        return loaded if self.dialect == "auto" else replace(loaded, template=loaded.template.speaking(self.dialect))

    def _calls(self, messages: list[BaseMessage], stop: Any, kwargs: dict[str, Any]) -> list[Call]:
        """Collect what one call asks for, once for each of its replies."""
        session = _identified(None, kwargs)["session"]
        options = resolve_options(self, kwargs, stop=self.stop if stop is None else stop, session=session)
        return [Call(tuple(messages), options, choice, self.on_prefill) for choice in range(options.settings.n)]

    def _only_call(self, messages: list[BaseMessage], stop: Any, kwargs: dict[str, Any]) -> Call:
        refuse_several(self, kwargs)
        return self._calls(messages, stop, kwargs)[0]


def _result(replies: Iterable[ChatResult]) -> ChatResult:
    """Return the result of several replies to one call, made last one first.

    So the first, which is the one that a conversation goes on with, is what the session has in memory at the end.
    """
    generations = [generation for reply in replies for generation in reply.generations]
    return ChatResult(generations=generations[::-1])


def _identified(config: RunnableConfig | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Add `session`, the thread and namespace a call belongs to, unless it is there.

    The config must be read at entry: what a runnable passes on to its model's inner methods does not carry it. Per-step
    task ids are left out of the namespace.
    """
    if "session" in kwargs:
        return kwargs
    if kwargs.get("session_id") is not None:
        return {**kwargs, "session": Session(str(kwargs["session_id"]))}
    configurable = ensure_config(config).get("configurable") or {}
    thread_id = configurable.get("thread_id")
    if thread_id is None:
        return {**kwargs, "session": Session(None)}
    namespace = without_task_ids(str(configurable.get("checkpoint_ns") or ""))
    return {**kwargs, "session": Session(str(thread_id), namespace)}


def _open_store(spec: Any, settings: Settings) -> Any:
    """Return the session store of a spec; stores made from one spec are made once per process."""
    from dlite_agent.sessions.opening import open_store
    from dlite_agent.sessions.store import SessionStore

    if spec is None or isinstance(spec, SessionStore):
        return spec
    if not isinstance(spec, str):
        raise ConfigError(f"session_store is a {type(spec).__name__}; expected None, 'auto', a URL or a SessionStore")
    return open_store(spec, settings)
