"""ChatDLite: a LangChain chat model over a local target with DLite speculation and sessions that persist.

Everything a call does is one generator (`dlite_agent.reply`) on a thread of its own; `invoke`, `stream` and their
asynchronous twins only carry its chunks to the caller. The passes of all calls are the engine's, which batches them.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig, ensure_config
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, Field

from dlite_agent.config import Settings
from dlite_agent.errors import ConfigError
from dlite_agent.jobs import Job
from dlite_agent.reply import PROVIDER, Call, stream_reply

if TYPE_CHECKING:
    from dlite_agent.runtime import Runtime

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)
_MAX_PENDING = 8  # chunks that a caller may be behind
_PER_CALL = (*_SAMPLING, "max_tokens", "max_draft")

Tool = dict[str, Any] | type | Callable[..., Any] | BaseTool


class ChatDLite(BaseChatModel):
    """A local model for LangChain and LangGraph whose sessions survive their process.

    The text is exactly the target model's own: token-identical to plain decoding, greedy or seeded.

    Example:
        >>> model = ChatDLite(model="qwen2.5-coder-1.5b", session_store="auto")
        >>> model.bind_tools([search]).invoke("...", config={"configurable": {"thread_id": "42"}})

    Attributes:
        model: A registry name (`dlite-agent models`), a local folder or a hub id.
        drafter: "auto", "lookup", "null" (plain decoding) or the folder of a DLite checkpoint.
        quantize: "int8" for int8 weights (a target of its own, several times faster on a CPU), None for float32,
            "auto" for what the registry says of the model.
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the fewest tokens that together have this probability.
        min_p: Keep tokens at least so many times as likely as the likeliest; 0 keeps all.
        seed: Names the sampling noise; the same seed gives the same text with any drafter.
        repetition_penalty: Makes tokens of the prompt and of the reply so far less likely; 1 is off.
        presence_penalty: Subtracted from the logits of tokens of the reply so far.
        frequency_penalty: Subtracted as often as a token is in the reply so far.
        logit_bias: Added to the logits of tokens, by id.
        max_tokens: Upper bound of tokens per reply.
        max_draft: Longest draft that is verified at once; how long each is, is decided by what it promises and costs.
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
    temperature: float = Field(default=0.0, ge=0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int = 0
    repetition_penalty: float = Field(default=1.0, gt=0)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = Field(default_factory=dict)
    max_tokens: int = Field(default=1024, ge=1)
    max_draft: int = Field(default=15, ge=0, le=31)
    dialect: str = "auto"
    session_store: Any = Field(default=None, exclude=True)
    settings: Settings = Field(default_factory=Settings, exclude=True)
    on_prefill: Callable[[int, int], None] | None = Field(default=None, exclude=True)
    cache: Any = Field(default=False, exclude=True)

    @property
    def _llm_type(self) -> str:
        return "dlite-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What decides the text of a reply; the drafter does not."""
        return {name: getattr(self, name) for name in ("model", "quantize", "dialect", *_SAMPLING, "max_tokens")}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = PROVIDER
        params["ls_model_name"] = self.model
        return params

    def bind_tools(
        self, tools: Sequence[Tool], *, tool_choice: str | dict[str, Any] | bool | None = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Offer tools to the model.

        Args:
            tools: Functions, pydantic classes, LangChain tools or OpenAI-style dicts.
            tool_choice: None or "auto" (the model decides), "none", "any", True or "required" (some call is made), or
                the name of a tool, plain or as an OpenAI-style dict (that tool is called).
            kwargs: Bound to every call.

        Raises:
            ConfigError: If `tool_choice` names no tool of `tools`.
        """
        formatted = [convert_to_openai_tool(tool) for tool in tools]
        choice = _tool_choice(tool_choice, [tool["function"]["name"] for tool in formatted])
        return super().bind(tools=formatted, tool_choice=choice, **kwargs)

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
        yield from super().stream(input, config, stop=stop, **_identified(config, kwargs))

    async def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, *, stop: Any = None, **kwargs: Any
    ) -> AsyncIterator[AIMessageChunk]:
        """Do as `stream`."""
        async for chunk in super().astream(input, config, stop=stop, **_identified(config, kwargs)):
            yield chunk

    def get_token_ids(self, text: str) -> list[int]:
        """Return the target's own tokens of a text."""
        return self.runtime.encoder.encode(text)

    def warm_up(self) -> None:
        """Load the weights now instead of at the first call."""
        _ = self.runtime

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, run_manager, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        chunks = [chunk async for chunk in self._astream(messages, stop, run_manager, **kwargs)]
        return generate_from_stream(iter(chunks))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._call(messages, stop, run_manager, kwargs)
        events: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()
        job = self._submit(self.runtime, call, lambda kind, value: events.put((kind, value)))
        kind = "item"
        try:
            while kind == "item":
                kind, value = events.get()
                job.taken()
                if kind != "done":
                    yield _chunk(value)
        finally:
            job.cancel()
            while kind == "item":  # the session is free once the job has ended
                kind, _ = events.get()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = self._call(messages, stop, run_manager, kwargs)
        loop = asyncio.get_running_loop()
        runtime = await loop.run_in_executor(None, lambda: self.runtime)
        events: asyncio.Queue[tuple[str, object]] = asyncio.Queue()

        def deliver(kind: str, value: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, (kind, value))

        job = self._submit(runtime, call, deliver)
        kind = "item"
        try:
            while kind == "item":
                kind, value = await events.get()
                job.taken()
                if kind != "done":
                    yield _chunk(value)
        finally:
            job.cancel()
            while kind == "item":  # the session is free once the job has ended
                kind, _ = await events.get()

    @property
    def runtime(self) -> Runtime:
        """The engine and what belongs to it, shared by the process's models of the same weights."""
        from dlite_agent.runtime import shared_runtime  # torch and transformers load here, not at import

        store = _open_store(self.session_store, self.settings)
        loaded = shared_runtime(
            self.model, drafter=self.drafter, quantize=self.quantize, store=store, settings=self.settings
        )
        return loaded if self.dialect == "auto" else replace(loaded, template=loaded.template.speaking(self.dialect))

    @staticmethod
    def _submit(runtime: Runtime, call: Call, deliver: Callable[[str, object], None]) -> Job[ChatGenerationChunk]:
        job: Job[ChatGenerationChunk] = Job(
            lambda job: stream_reply(runtime, call, job), deliver, max_pending=_MAX_PENDING
        )
        runtime.jobs.submit(job)
        return job

    def _call(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None,
        kwargs: dict[str, Any],
    ) -> Call:
        """Collect what one call asks for; settings bound to the call go before those of the model."""
        thread_id, namespace = _identified(None, kwargs)["session"]
        given = {name: getattr(self, name) if kwargs.get(name) is None else kwargs[name] for name in _PER_CALL}
        return Call(
            messages=tuple(messages),
            tools=tuple(kwargs.get("tools") or ()),
            tool_choice=kwargs.get("tool_choice") or "auto",
            stops=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            thread_id=thread_id,
            namespace=namespace,
            sampling={name: given[name] for name in _SAMPLING},
            max_tokens=given["max_tokens"],
            max_draft=given["max_draft"],
            on_prefill=self.on_prefill,
        )


def _tool_choice(choice: str | dict[str, Any] | bool | None, names: Sequence[str]) -> str:
    """Reduce LangChain's ways of choosing a tool to "auto", "none", "any" or a name."""
    if choice is None or choice is False or choice == "auto":
        return "auto"
    if choice is True or choice in ("any", "required"):
        return "any"
    name = choice.get("function", choice).get("name") if isinstance(choice, dict) else choice
    if name == "none" or name in names:
        return str(name)
    raise ConfigError(f"tool_choice is {choice!r}; expected auto, none, any or one of {', '.join(names)}")


def _identified(config: RunnableConfig | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Add `session`, the thread and namespace a call belongs to, unless it is there.

    The config must be read at entry: what a runnable passes on to its model's inner methods does not carry it. Per-step
    task ids are left out of the namespace.
    """
    if "session" in kwargs:
        return kwargs
    if kwargs.get("session_id") is not None:
        return {**kwargs, "session": (str(kwargs["session_id"]), "")}
    configurable = ensure_config(config).get("configurable") or {}
    thread_id = configurable.get("thread_id")
    if thread_id is None:
        return {**kwargs, "session": (None, "")}
    namespace = str(configurable.get("checkpoint_ns") or "")
    return {**kwargs, "session": (str(thread_id), "|".join(part.split(":")[0] for part in namespace.split("|")))}


def _open_store(spec: Any, settings: Settings) -> Any:
    """Return the session store of a spec; stores made from one spec are made once per process."""
    from dlite_agent.sessions.opening import open_store
    from dlite_agent.sessions.store import SessionStore

    if spec is None or isinstance(spec, SessionStore):
        return spec
    if not isinstance(spec, str):
        raise ConfigError(f"session_store is a {type(spec).__name__}; expected None, 'auto', a URL or a SessionStore")
    return open_store(spec, settings)


def _chunk(value: object) -> ChatGenerationChunk:
    """Return a delivered chunk, or raise a delivered error."""
    if isinstance(value, BaseException):
        raise value
    assert isinstance(value, ChatGenerationChunk)
    return value
