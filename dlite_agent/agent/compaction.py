"""Compaction at a token budget that keeps what is computed.

LangChain's `SummarizationMiddleware` replaces the start of a conversation, so that all of the next prompt is computed
again. Here the longest start that fits stays as it is, and what lies between it and the newest messages is summarized:
the rows of that start are reused, and they are reused again after the next compaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from typing import Any

from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage, RemoveMessage, ToolMessage
from langchain_core.messages.utils import count_tokens_approximately

from dlite_agent.agent.plan import plan_text
from dlite_agent.agent.reports import report
from dlite_agent.agent.turns import is_summary
from dlite_agent.chat_model import ChatDLite
from dlite_agent.errors import ConfigError, PromptError

Counter = Callable[[Sequence[BaseMessage]], int]

SUMMARY_PROMPT = (
    "Summarize this part of a conversation between a person and an assistant with tools. Keep what was asked, what was "
    "found out, names, numbers and file paths, and what is left to do. Write the summary only.\n\n"
    "<messages>\n{messages}\n</messages>"
)


@dataclass(frozen=True, slots=True)
class Bill:
    """What a compaction did to the prompt, in tokens of the messages (system message and tools not counted).

    Attributes:
        num_before: The conversation before.
        num_after: The conversation after.
        num_kept: Its start that is as it was; these rows are reused.
        num_summarized: What the summary stands for; it was the prompt of the summary.
        num_summary: The summary.
        num_recomputed: What the next call computes again: the summary and the newest messages.
    """

    num_before: int
    num_after: int
    num_kept: int
    num_summarized: int
    num_summary: int
    num_recomputed: int


class PrefixCompaction(SummarizationMiddleware[Any, Any]):
    """Summarizes the middle of a conversation that has outgrown its budget.

    The plan in the graph's state, if there is one, is written behind the summary. Each compaction is a report
    "compaction" with the fields of `Bill`.
    """

    def __init__(
        self,
        model: BaseChatModel,
        *,
        max_tokens: int,
        target_tokens: int | None = None,
        keep_tokens: int | None = None,
        summary_tokens: int = 200,
        token_counter: Counter | None = None,
        summary_prompt: str = SUMMARY_PROMPT,
        summarizer: Any = None,
    ) -> None:
        """Set the budget.

        Args:
            model: Writes the summaries, and counts tokens if it is a `ChatDLite`.
            max_tokens: Compact a conversation of more tokens than these.
            target_tokens: Tokens it should have after that; half of `max_tokens` by default. Fewer means that it has to
                be done less often, and that less is reused.
            keep_tokens: Newest tokens that stay as they are; a quarter of the target by default.
            summary_tokens: Room that is left for the summary.
            token_counter: Counts the tokens of messages; estimated for other models than `ChatDLite` by default.
            summary_prompt: Asks for a summary; has a place for `{messages}`.
            summarizer: Writes the summaries instead of the model, as for `SummarizationMiddleware`.

        Raises:
            ConfigError: The numbers leave no room.
        """
        target = max_tokens // 2 if target_tokens is None else target_tokens
        keep = target // 4 if keep_tokens is None else keep_tokens
        if keep < 1 or summary_tokens < 0:
            got = f"{keep} and {summary_tokens}"
            raise ConfigError(f"keep_tokens and summary_tokens are {got}; expected at least 1 and 0")
        if not keep + summary_tokens < target < max_tokens:
            got = f"{keep + summary_tokens}, {target}, {max_tokens}"
            raise ConfigError(
                f"keep_tokens + summary_tokens, target_tokens and max_tokens are {got}; expected them to grow"
            )
        self.count = token_counter or _counter_of(model)
        self.max_tokens = max_tokens
        self.room = target - keep - summary_tokens
        counter: Any = self.count
        super().__init__(
            model,
            trigger=("messages", 1),  # this class decides when
            keep=("tokens", keep),
            token_counter=counter,
            summary_prompt=summary_prompt,
            trim_tokens_to_summarize=None,
            summarizer=summarizer,
        )

    def before_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Compact a conversation that is above its budget."""
        head = self._head(state["messages"])
        if head is None:
            return None
        rest: Any = {**state, "messages": state["messages"][head:]}
        return self._joined(state, runtime, head, super().before_model(rest, runtime))

    async def abefore_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Do the same asynchronously."""
        head = self._head(state["messages"])
        if head is None:
            return None
        rest: Any = {**state, "messages": state["messages"][head:]}
        return self._joined(state, runtime, head, await super().abefore_model(rest, runtime))

    def _head(self, messages: Sequence[BaseMessage]) -> int | None:
        """Return how many messages at the start stay, or None if there is nothing to do.

        An earlier summary is not among them: it becomes part of the next.
        """
        if not messages or self.count(messages) <= self.max_tokens:
            return None
        start = list(takewhile(lambda message: not is_summary(message), messages))
        ends = [i for i, m in enumerate(messages[: len(start) + 1]) if i and not isinstance(m, ToolMessage)]
        low, high = 0, len(ends)
        while low < high:  # find how many of the ends fit
            middle = (low + high) // 2
            if self.count(messages[: ends[middle]]) <= self.room:
                low = middle + 1
            else:
                high = middle
        return ends[low - 1] if low else 0

    def _joined(self, state: Any, runtime: Any, head: int, update: dict[str, Any] | None) -> dict[str, Any] | None:
        """Put the start of the conversation back in front, and say what that cost."""
        if update is None:
            return None
        remove, summary, *newest = update["messages"]
        assert isinstance(remove, RemoveMessage)
        assert isinstance(summary, HumanMessage)
        if state.get("todos"):
            text = f"{summary.text}\n\nThe plan:\n{plan_text(state['todos'])}"
            summary = summary.model_copy(update={"content": text})
        before, kept = state["messages"], state["messages"][:head]
        after = [*kept, summary, *newest]
        num_kept = self.count(kept) if kept else 0
        num_after = self.count(after)
        num_with_summary = self.count([*kept, summary])
        bill = Bill(
            num_before=self.count(before),
            num_after=num_after,
            num_kept=num_kept,
            num_summarized=self.count(before[: len(before) - len(newest)]) - num_kept,
            num_summary=num_with_summary - num_kept,
            num_recomputed=num_after - num_kept,
        )
        report(runtime, "compaction", **asdict(bill))
        return {**update, "messages": [remove, *after]}


def _counter_of(model: BaseChatModel) -> Counter:
    return partial(_count_exactly, model) if isinstance(model, ChatDLite) else count_tokens_approximately


def _count_exactly(model: ChatDLite, messages: Sequence[BaseMessage]) -> int:
    """Count what the template makes of messages; some templates take no part of a conversation by itself."""
    try:
        return model.get_num_tokens_from_messages(list(messages))
    except PromptError:
        return count_tokens_approximately(messages)
