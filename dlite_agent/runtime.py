"""What the chat models of a process share: one target per model, its drafter, tokenizer, scheduler and sessions."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.messages import BaseMessage

from dlite_agent import lifetime
from dlite_agent.config import Settings
from dlite_agent.constraints import GrammarFactory
from dlite_agent.drafters.loading import layers_read, load_drafter
from dlite_agent.drafters.protocol import Drafter
from dlite_agent.engine.draft_length import AdaptiveLength, PassCost
from dlite_agent.engine.scheduler import Scheduler
from dlite_agent.engine.target import Quantization, Target
from dlite_agent.errors import CorruptModelError
from dlite_agent.jobs import JobRunner
from dlite_agent.models import ModelProfile, profile_for, progress_bars, resolve
from dlite_agent.prompting.encoding import PromptEncoder
from dlite_agent.prompting.messages import to_template_messages
from dlite_agent.prompting.template import ChatTemplate
from dlite_agent.session_keeper import SessionKeeper

if TYPE_CHECKING:
    from dlite_agent.sessions.store import SessionStore


@dataclass(frozen=True, slots=True)
class Runtime:
    """Everything a call needs, loaded once."""

    name: str
    target: Target
    drafter: Drafter
    encoder: PromptEncoder
    template: ChatTemplate
    grammars: GrammarFactory
    scheduler: Scheduler
    jobs: JobRunner
    keeper: SessionKeeper
    profile: ModelProfile
    end_ids: frozenset[int]

    def render(
        self, messages: Sequence[BaseMessage], tools: Sequence[Mapping[str, Any]], *, reasoning: bool | None = None
    ) -> str:
        """Return the prompt text of a conversation, as the model is given it.

        Raises:
            ConfigError: `reasoning` is given, and the model's template has no switch for it.
            PromptError: The conversation cannot be rendered.
        """
        profile = self.profile
        converted = to_template_messages(
            messages,
            result_hint=profile.result_hint,
            error_hint=profile.error_hint,
            dialect=self.template.dialect.name,
        )
        return self.template.render(converted, tools, reasoning=reasoning)


_loaded: dict[tuple[tuple[str, str | None, Settings], str, SessionStore | None], Runtime] = {}
_loading = threading.Lock()


def shared_runtime(
    model: str,
    *,
    drafter: str,
    quantize: Quantization | Literal["auto"] | None,
    store: SessionStore | None,
    settings: Settings,
) -> Runtime:
    """Return the process's runtime of a model, drafter and store, loading it the first time.

    Raises:
        DLiteError: If the model or the drafter cannot be found or used; nothing is kept then. Also if the interpreter
            exits, or this process was forked from one that loaded a model.
    """
    chosen = _usual_quantization(model, settings) if quantize == "auto" else quantize
    weights = (model, chosen, settings)
    key = (weights, drafter, store)
    with lifetime.awaited_at_exit(), _loading:
        lifetime.check_life()
        if key not in _loaded:
            sharing = next((r for (w, _, _), r in _loaded.items() if w == weights), None)
            if sharing is not None and layers_read(drafter, sharing.target) in ((), sharing.target.layer_ids):
                loaded = replace(
                    sharing,
                    drafter=load_drafter(drafter, sharing.target),
                    keeper=SessionKeeper(sharing.target, store, durability=settings.durability),
                )
            else:
                loaded = _load(model, drafter=drafter, quantize=chosen, store=store, settings=settings)
            _loaded[key] = loaded
        return _loaded[key]


def _usual_quantization(model: str, settings: Settings) -> Quantization | None:
    """Return what the model's profile says; it speaks of float32 on a CPU."""
    return profile_for(model).quantize if (settings.device, settings.dtype) == ("cpu", "float32") else None


def close_all() -> None:
    """Stop every engine of the process, store what waits, and forget the weights; not in a forked child."""
    if lifetime.is_forked():
        return
    with _loading:
        for runtime in _loaded.values():
            runtime.scheduler.close()
            runtime.jobs.close()
            runtime.keeper.close()
        _loaded.clear()


def _load(
    model: str,
    *,
    drafter: str,
    quantize: Quantization | None,
    store: SessionStore | None,
    settings: Settings,
) -> Runtime:
    import torch

    torch.set_num_threads(settings.threads)
    with progress_bars() as progress:
        folder = resolve(model, settings=settings, progress=progress)
    lifetime.check_life()  # a download may have taken long
    tokenizer = _load_tokenizer(folder)
    calibration = settings.home / "calibration"
    target = Target.load(
        folder,
        dtype=getattr(torch, settings.dtype),
        quantize=quantize,
        exact=settings.exact,
        device=settings.device,
        cache_dir=calibration,
    )
    end_ids = _end_ids(target, tokenizer)
    return Runtime(
        name=model,
        target=target,
        drafter=load_drafter(drafter, target),
        encoder=PromptEncoder(tokenizer),
        template=ChatTemplate(
            tokenizer.chat_template or "",
            bos_token=tokenizer.bos_token or "",
            eos_token=tokenizer.eos_token or "",
        ),
        grammars=GrammarFactory(tokenizer, vocab_size=target.vocab_size, eos_ids=sorted(end_ids)),
        scheduler=Scheduler(target, planner=AdaptiveLength(PassCost.of(target, folder=calibration))),
        jobs=JobRunner(),
        keeper=SessionKeeper(target, store, durability=settings.durability),
        profile=profile_for(model),
        end_ids=end_ids,
    )


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise CorruptModelError(f"{folder} has no readable tokenizer ({error}); pull the model again") from error
    if not tokenizer.chat_template:
        raise CorruptModelError(f"{folder} has no chat template; use an instruction-tuned model")
    return tokenizer


def _end_ids(target: Target, tokenizer: Any) -> frozenset[int]:
    """Collect the ids that end a reply, from the generation configuration and the tokenizer."""
    configured = target.model.generation_config.eos_token_id if target.model.generation_config else None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)
