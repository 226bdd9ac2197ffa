"""Thinking is switched on and off where the model's template has a switch for it, and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from dlite_agent import ChatDLite, Settings
from dlite_agent.errors import ConfigError
from dlite_agent.prompting.template import ChatTemplate
from dlite_agent.runtime import close_all
from dlite_agent.testing import TINY_CHAT_TEMPLATE, write_tiny_chat_model

OPENED, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"
SWITCHED = TINY_CHAT_TEMPLATE.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    f"{{{{ {CLOSED!r} }}}}{{% else %}}{{{{ {OPENED!r} }}}}{{% endif %}}{{% endif %}}",
)
MESSAGES = [{"role": "user", "content": "hello"}]


def chat_model(root: Path, template: str) -> ChatDLite:
    folder = write_tiny_chat_model(root / "model")
    (folder / "chat_template.jinja").write_text(template)
    settings = Settings(home=root / "home", redis_url=None, threads=1, offline=True)
    return ChatDLite(model=str(folder), settings=settings, max_tokens=30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatDLite]:
    yield chat_model(tmp_path_factory.mktemp("switched"), SWITCHED)
    close_all()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatDLite]:
    yield chat_model(tmp_path_factory.mktemp("plain"), TINY_CHAT_TEMPLATE)
    close_all()


def is_reasoned(message: Any) -> bool:
    """Whether a reply, all of which is one or the other on random weights, is thinking."""
    has_thought = "reasoning_content" in message.additional_kwargs
    assert has_thought == (not message.content)
    return has_thought


def test_a_call_an_own_setting_and_a_bound_one_switch_thinking(model: ChatDLite) -> None:
    assert is_reasoned(model.invoke("hello"))
    assert is_reasoned(model.invoke("hello", reasoning=True))
    assert not is_reasoned(model.invoke("hello", reasoning=False))
    assert not is_reasoned(model.bind(reasoning=False).invoke("hello"))
    assert not is_reasoned(asyncio.run(model.ainvoke("hello", reasoning=False)))
    silent = model.model_copy(update={"reasoning": False})
    assert not is_reasoned(silent.invoke("hello"))
    assert is_reasoned(silent.invoke("hello", reasoning=True))
    assert silent._identifying_params != model._identifying_params


def test_the_prompt_that_is_counted_is_the_one_that_is_given(model: ChatDLite) -> None:
    silent = model.model_copy(update={"reasoning": False})
    for chat, ending in ((model, OPENED), (silent, CLOSED)):
        reply = chat.invoke("hello")
        assert reply.usage_metadata is not None
        assert chat.get_num_tokens_from_messages([HumanMessage("hello")]) == reply.usage_metadata["input_tokens"]
        assert chat.runtime.render([HumanMessage("hello")], [], reasoning=chat.reasoning).endswith(ending)


def test_a_session_in_which_thinking_is_switched_says_what_a_fresh_one_says(model: ChatDLite) -> None:
    letters = {model.get_token_ids(letter)[0]: 200.0 for letter in "abc"}  # which are encoded as they were generated
    warm: Any = model.bind(temperature=5.0, logit_bias=letters)
    messages: list[Any] = [HumanMessage("hello")]
    for turn, reasoning in enumerate((True, False, True)):
        reply = warm.invoke(messages, session_id="switching", reasoning=reasoning)
        fresh = warm.invoke(messages, session_id=f"fresh {turn}", reasoning=reasoning)
        assert (reply.content, reply.additional_kwargs) == (fresh.content, fresh.additional_kwargs)
        messages += [reply, HumanMessage("and?")]


@pytest.mark.parametrize("reasoning", [True, False])
def test_a_template_without_a_switch_refuses_one_and_the_engine_goes_on(plain: ChatDLite, reasoning: bool) -> None:
    with pytest.raises(ConfigError, match=f"reasoning is {reasoning}.*leave reasoning out"):
        plain.invoke("hello", reasoning=reasoning)
    with pytest.raises(ConfigError, match="leave reasoning out"):
        plain.model_copy(update={"reasoning": reasoning}).get_num_tokens_from_messages([HumanMessage("hello")])
    assert plain.invoke("hello", reasoning=None).content


@pytest.mark.parametrize("variable", ["enable_thinking", "thinking"])
@pytest.mark.parametrize("marks", ["", "<tool_call></tool_call> arguments"], ids=["generic", "hermes"])
def test_the_switch_is_found_by_what_it_changes(variable: str, marks: str) -> None:
    template = ChatTemplate(f"{{# {marks} #}}{SWITCHED.replace('enable_thinking', variable)}")
    assert template.abilities.thinking_variable == variable
    assert template.render(MESSAGES, reasoning=True).endswith(OPENED)
    assert template.render(MESSAGES, reasoning=False).endswith(CLOSED)
    named_only = ChatTemplate(f"{{% set shown = {variable} %}}{TINY_CHAT_TEMPLATE}")
    assert named_only.abilities.thinking_variable is None
