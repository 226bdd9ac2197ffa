"""One call, from messages to the chunks of a reply; it runs on a thread of its own and leaves the passes to the engine.

session -> prompt text -> ids (stored ids kept where the text agrees) -> stored rows fetched -> decode
        -> text -> tool calls and text events -> chunks -> commit -> the last chunk with usage and statistics
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk

from dlite_agent.call_options import CallOptions
from dlite_agent.errors import ContextLengthError, PromptError
from dlite_agent.logprobs import TokenTrail, openai_entry
from dlite_agent.prompting.messages import METADATA_KEY, message_digest
from dlite_agent.prompting.parser import Event, InvalidToolCall, StreamParser, TextDelta, ToolCall
from dlite_agent.prompting.stops import StopFilter
from dlite_agent.sessions.keys import SessionName
from dlite_agent.structured import answer_constraint

if TYPE_CHECKING:
    from dlite_agent.engine.constraint import TokenConstraint
    from dlite_agent.engine.request import Step
    from dlite_agent.engine.sampling import SamplingParams
    from dlite_agent.jobs import Job
    from dlite_agent.live_session import LiveSession
    from dlite_agent.prompting.encoding import Detokenizer
    from dlite_agent.runtime import Runtime
    from dlite_agent.session_keeper import Committed, Reuse

PROVIDER = "dlite"
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
    "min_tokens",
    "verification",
)
_ANONYMOUS = "anonymous"
_OWN_TOKENS = ("prefill", "bonus")  # sources of tokens that nobody drafted


class PromptTooLongError(ContextLengthError, ContextOverflowError):
    """The prompt leaves no room in the model's context; LangChain's error and this package's in one."""


@dataclass(frozen=True, slots=True)
class Call:
    """What one call asks for.

    Attributes:
        messages: The conversation.
        options: What the call asks for.
        choice: Which of several replies to the same call this is; each has a seed of its own.
        on_prefill: Told (rows done, rows to do) after every prefill chunk, on the engine's thread.
    """

    messages: tuple[BaseMessage, ...]
    options: CallOptions
    choice: int = 0
    on_prefill: Callable[[int, int], None] | None = None

    @property
    def session_key(self) -> str:
        """The session's name."""
        return _ANONYMOUS if self.session_name is None else self.session_name.sid

    @property
    def session_name(self) -> SessionName | None:
        """What people call the session."""
        options = self.options
        return None if options.thread_id is None else SessionName(options.thread_id, options.namespace)

    @property
    def snapshot_id(self) -> str | None:
        """The snapshot that the newest message of this session's own model names, if any."""
        for message in reversed(self.messages):
            record = message.response_metadata.get(METADATA_KEY) if isinstance(message, AIMessage) else None
            if isinstance(record, Mapping) and record.get("session") == self.session_key and "snapshot" in record:
                return record["snapshot"] if isinstance(record["snapshot"], str) else None
        return None


@dataclass(slots=True)
class _Tally:
    """Counts over the steps of one reply."""

    num_generated: int = 0
    num_passes: int = 0
    num_reused: int = 0
    num_prefilled: int = 0
    num_proposed: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0

    def add(self, step: Step) -> None:
        if step.num_prefilled:
            self.num_reused, self.num_prefilled = step.num_reused, step.num_prefilled
            self.prefill_seconds = step.target_seconds
            return
        self.num_passes += 1
        self.num_proposed += step.num_proposed
        self.draft_seconds += step.draft_seconds
        self.target_seconds += step.target_seconds

    def count(self, source: str) -> None:
        """Count a token of the reply, and what it came from."""
        self.num_generated += 1
        self.sources[source] += 1

    def as_dict(self, reuse: Reuse, committed: Committed | None) -> dict[str, Any]:
        """Return plain integers, which survive LangChain's merging of chunks."""
        accepted = {name: count for name, count in sorted(self.sources.items()) if name not in _OWN_TOKENS}
        return {
            "reused_ram": self.num_reused - reuse.from_store,
            "reused_store": reuse.from_store,
            "blocks_lost": reuse.blocks_lost,
            "prefilled": self.num_prefilled,
            "generated": self.num_generated,
            "passes": self.num_passes,
            "proposed": self.num_proposed,
            "accepted": accepted,
            "prefill_us": round(self.prefill_seconds * 1e6),
            "draft_us": round(self.draft_seconds * 1e6),
            "target_us": round(self.target_seconds * 1e6),
            "stored_bytes": 0 if committed is None else committed.num_bytes,
        }


def stream_reply(runtime: Runtime, call: Call, job: Job[Any]) -> Iterator[ChatGenerationChunk]:
    """Yield the chunks of one reply; usage and statistics come once, on the last.

    Raises:
        PromptTooLongError: If the prompt leaves no room in the model's context; nothing was computed.
        DLiteError: If the conversation, the tools or the session store cannot be used.
    """
    is_stored = call.options.thread_id is not None
    live = runtime.keeper.checkout(
        call.session_key, is_stored=is_stored, snapshot_id=call.snapshot_id, name=call.session_name
    )
    try:
        yield from _Reply(runtime, call, live).chunks(job)
    except ContextLengthError as error:
        raise PromptTooLongError(str(error)) from error
    finally:
        runtime.keeper.checkin(call.session_key, live)


class _Reply:
    def __init__(self, runtime: Runtime, call: Call, live: LiveSession) -> None:
        self._runtime = runtime
        self._call = call
        self._options = call.options
        self._live = live
        self._tally = _Tally()
        self._text: list[str] = []
        self._calls: list[ToolCall] = []
        self._num_blocks = 0
        self._is_thinking = False  # whether the prompt has opened the model's thinking
        self._trail = TokenTrail()
        self._logprobs: list[dict[str, Any]] = []  # not delivered yet
        self._id = f"lc_run--{uuid.uuid4()}"

    def chunks(self, job: Job[Any]) -> Iterator[ChatGenerationChunk]:
        runtime, prompt = self._runtime, self._prompt_ids()
        reuse = runtime.keeper.restore(self._live, np.asarray(prompt, dtype=np.int32))
        parser = StreamParser(
            runtime.template.dialect, _parameters(self._options.offered_tools), is_thinking=self._is_thinking
        )
        stops = StopFilter(self._options.stops)
        raw = ""
        with closing(self._pieces(prompt, job)) as pieces:
            for texts in pieces:
                passed = ""
                for text in texts:
                    passed += stops.feed(text)
                    if stops.is_stopped:
                        break
                raw += passed
                self._logprobs += self._trail.take(len(raw))
                yield from self._chunks_of(parser.feed(passed))
                if stops.is_stopped:
                    break
        if job.is_cancelled:
            return
        self._live.state.truncate(len(prompt) + self._tally.num_generated)  # the engine may be a step ahead
        finish_reason = self._finish_reason(stops)
        rest = stops.flush()
        raw += rest
        self._logprobs += self._trail.take(len(raw), is_end=True)
        yield from self._chunks_of(parser.feed(rest) + parser.close(truncated=finish_reason == "length"))
        committed = runtime.keeper.commit(self._live)
        usage = self._usage(len(prompt), num_thought=self._trail.count(parser.num_thought))
        yield self._last_chunk(raw, finish_reason, usage, reuse=reuse, committed=committed)

    def _prompt_ids(self) -> list[int]:
        runtime = self._runtime
        text = runtime.render(self._call.messages, self._options.tools, reasoning=self._options.settings.reasoning)
        self._is_thinking = runtime.template.dialect.is_thinking(text)
        known = self._live.known_ids.tolist() if self._options.thread_id is not None else []
        ids = runtime.encoder.encode(text, known)  # without a session, the messages alone decide the ids
        if not ids:
            raise PromptError("the model's chat template makes nothing of this conversation; expected some text")
        return ids

    def _constraint(self) -> TokenConstraint | None:
        options, dialect, grammars = self._options, self._runtime.template.dialect, self._runtime.grammars
        tools = options.offered_tools
        if options.schema is not None and options.tool_choice in ("auto", "none"):
            return answer_constraint(
                grammars,
                options.schema,
                tools=tools,
                dialect=dialect,
                is_parallel=options.is_parallel,
                is_thinking=self._is_thinking,
            )
        if not tools:
            return grammars.no_call(dialect=dialect, is_thinking=self._is_thinking) if options.tools else None
        constraint: TokenConstraint = grammars.tool_call(
            tools,
            choice=options.tool_choice,
            dialect=dialect,
            parallel=options.is_parallel,
            is_thinking=self._is_thinking,
        )
        return constraint

    def _sampling(self) -> SamplingParams:
        from dlite_agent.engine.sampling import SamplingParams, choice_params

        settings, encoder = self._options.settings, self._runtime.encoder
        words = dict.fromkeys(tuple(encoder.encode(form)) for word in settings.bad_words for form in (word, f" {word}"))
        params = SamplingParams(
            **{name: getattr(settings, name) for name in _SAMPLING},
            bad_words=tuple(words),
            top_logprobs=settings.top_logprobs if settings.logprobs else None,
        )
        return choice_params(params, self._call.choice)

    def _pieces(self, prompt: list[int], job: Job[Any]) -> Generator[Iterator[str]]:
        """Decode; yield the texts of each step's tokens. A token counts as generated once its text is asked for."""
        from dlite_agent.engine.request import Request
        from dlite_agent.prompting.encoding import Detokenizer

        runtime = self._runtime
        request = Request(
            prompt_ids=prompt,
            sampling=self._sampling(),
            max_new_tokens=self._options.settings.max_tokens,
            end_ids=runtime.end_ids,
            constraint=self._constraint(),
            max_draft=self._options.settings.max_draft,
            is_cancelled=lambda: job.is_cancelled,
            on_prefill=self._call.on_prefill or (lambda done, total: None),
        )
        detokenizer = Detokenizer(runtime.encoder)
        with closing(runtime.scheduler.decode(self._live.state, runtime.drafter, request)) as steps:
            for step in steps:
                self._tally.add(step)
                runtime.keeper.break_even.computed(step.num_prefilled, step.target_seconds)
                yield self._texts(step, detokenizer)
        rest = detokenizer.flush()
        self._trail.close(rest)
        yield iter((rest,))

    def _texts(self, step: Step, detokenizer: Detokenizer) -> Iterator[str]:
        token_bytes = self._runtime.encoder.token_bytes
        for index, token in enumerate(step.tokens):
            self._tally.count(step.sources[index])
            if token not in self._runtime.end_ids:
                text = detokenizer.push(token)
                self._trail.add(text, openai_entry(step.logprobs[index], token_bytes) if step.logprobs else None)
                yield text

    def _finish_reason(self, stops: StopFilter) -> str:
        if stops.is_stopped:
            return "stop"
        ended = int(self._live.state.ids[-1]) in self._runtime.end_ids
        if not ended:
            return "length"
        return "tool_calls" if self._calls else "stop"

    def _chunks_of(self, events: list[Event]) -> Iterator[ChatGenerationChunk]:
        for event in events:
            if isinstance(event, TextDelta) and event.is_thinking:
                self._num_blocks = max(self._num_blocks, 1)
                thought = {"reasoning_content": event.text}
                yield self._chunk(AIMessageChunk(content="", id=self._id, additional_kwargs=thought))
            elif isinstance(event, TextDelta):
                self._num_blocks += not self._text
                self._text.append(event.text)
                yield self._chunk(AIMessageChunk(content=event.text, id=self._id))
            else:
                yield self._chunk(self._call_message(event))
                self._num_blocks += 1

    def _call_message(self, event: ToolCall | InvalidToolCall) -> AIMessageChunk:
        """Make the one chunk of a whole call.

        The arguments of an invalid call start with the opening tag: LangChain would otherwise complete truncated JSON
        on its own and hand out half a call as a valid one.
        """
        if isinstance(event, ToolCall):
            self._calls.append(event)
            args = json.dumps(event.args, ensure_ascii=False)
        else:
            args = f"{self._runtime.template.dialect.call_open}{event.raw}"
        part = tool_call_chunk(name=event.name, args=args, id=f"call_{uuid.uuid4().hex}", index=self._num_blocks)
        return AIMessageChunk(content="", id=self._id, tool_call_chunks=[part])

    def _usage(self, num_prompt: int, *, num_thought: int) -> UsageMetadata:
        tally = self._tally
        usage = UsageMetadata(
            input_tokens=num_prompt,
            output_tokens=tally.num_generated,
            total_tokens=num_prompt + tally.num_generated,
            input_token_details=InputTokenDetails(cache_read=tally.num_reused),
        )
        if num_thought:
            usage["output_token_details"] = OutputTokenDetails(reasoning=num_thought)
        return usage

    def _last_chunk(
        self, raw: str, finish_reason: str, usage: UsageMetadata, *, reuse: Reuse, committed: Committed | None
    ) -> ChatGenerationChunk:
        calls = [{"name": call.name, "args": call.args} for call in self._calls]
        record: dict[str, Any] = {
            "raw": raw,
            "digest": message_digest("".join(self._text), calls),
            "dialect": self._runtime.template.dialect.name,
            "stats": self._tally.as_dict(reuse, committed),
        }
        if self._call.session_name is not None:
            record["session"] = self._call.session_key
        if committed is not None:
            record["snapshot"] = committed.snapshot_id
        metadata = {
            "model_name": self._runtime.name,
            "model_provider": PROVIDER,
            "finish_reason": finish_reason,
            METADATA_KEY: record,
        }
        message = AIMessageChunk(
            content="", id=self._id, chunk_position="last", usage_metadata=usage, response_metadata=metadata
        )
        chunk = self._chunk(message)
        chunk.generation_info = {**(chunk.generation_info or {}), "finish_reason": finish_reason}
        return chunk

    def _chunk(self, message: AIMessageChunk) -> ChatGenerationChunk:
        """Make a chunk that takes along the log-probabilities that are due."""
        if not self._logprobs:
            return ChatGenerationChunk(message=message)
        due, self._logprobs = {"logprobs": {"content": self._logprobs}}, []
        message.response_metadata = {**message.response_metadata, **due}
        return ChatGenerationChunk(message=message, generation_info=due)


def _parameters(tools: tuple[dict[str, Any], ...]) -> dict[str, Mapping[str, Any]]:
    """Return the schema of each tool's arguments by the tool's name."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters") or {"type": "object"} for function in functions}
