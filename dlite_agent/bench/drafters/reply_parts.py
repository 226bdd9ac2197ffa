"""Which tokens of a reply are a tool call's and which are prose.

The product's own parser decides: what it gives out as text is prose. If the reply holds a call, a token is the call's
when it begins behind that text: white space before the call, tags, fences, the JSON object, further calls, and what
follows them (which is dropped). A call that the reply's end cut off counts as well. Replies without a call are prose
from end to end, also where a text protocol of the prompt's own asks for actions. An end token belongs to what it ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dlite_agent.bench.prompts import Kind
from dlite_agent.prompting.encoding import Detokenizer
from dlite_agent.prompting.parser import StreamParser, TextDelta

if TYPE_CHECKING:
    from dlite_agent.runtime import Runtime


def token_kinds(tokens: Sequence[int], runtime: Runtime, tools: Sequence[Mapping[str, Any]]) -> list[Kind]:
    """Return what each token of a reply is part of.

    Args:
        tokens: The reply, its end token included if it has one.
        runtime: Gives the encoder, the dialect and the end tokens.
        tools: OpenAI-style tool dicts that were offered.
    """
    functions = [tool["function"] for tool in tools]
    schemas = {function["name"]: function.get("parameters") or {"type": "object"} for function in functions}
    parser, detokenizer = StreamParser(runtime.template.dialect, schemas), Detokenizer(runtime.encoder)
    is_ended = bool(tokens) and tokens[-1] in runtime.end_ids
    starts, length, events = [], 0, []
    for token in tokens[: len(tokens) - is_ended]:
        starts.append(length)
        text = detokenizer.push(token)
        length += len(text)
        events += parser.feed(text)
    events += parser.feed(detokenizer.flush())
    events += parser.close(truncated=not is_ended)
    shown = [event.text for event in events if isinstance(event, TextDelta) and not event.is_thinking]
    num_shown = parser.num_thought + sum(map(len, shown))
    has_call = any(not isinstance(event, TextDelta) for event in events)
    kinds: list[Kind] = ["tool" if has_call and start >= num_shown else "prose" for start in starts]
    if is_ended:
        kinds.append(kinds[-1] if kinds else "prose")
    return kinds
