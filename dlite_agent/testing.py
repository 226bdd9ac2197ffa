"""Public fakes: tiny random targets and drafters, so that code around the engine is tested in milliseconds, offline.

    target = tiny_target("qwen3")
    state = TargetState(target.new_cache())
    tokens = [t for step in decode(target, state, NullDrafter(), Request([1, 2, 3])) for t in step.tokens]

The models are real transformers models with random weights: what they write is noise, but exact noise.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, message_chunk_to_message
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from pydantic import Field
from torch import nn

from dlite_agent.drafters.baselines import new_model
from dlite_agent.drafters.dlite import DLiteConfig, DLiteModel
from dlite_agent.drafters.dspark import DSparkModel
from dlite_agent.drafters.history import HistoryConfig, HistoryModel, Kind
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.protocol import DraftView, Proposal
from dlite_agent.engine.decode import decode
from dlite_agent.engine.families import FAMILIES
from dlite_agent.engine.request import Request
from dlite_agent.engine.sampling import SamplingParams
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Quantization, Target
from dlite_agent.errors import UnsupportedModelError

_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large enough, and not tied, so that the most likely token changes from row to row
    "tie_word_embeddings": False,
    "pad_token_id": None,  # some families' own lie beyond this vocabulary
    "bos_token_id": None,
    "eos_token_id": None,
}
_SLIDING_WINDOW = 8
_LAYER_TYPES = {  # the two kinds a family alternates between
    "gemma3_text": ("sliding_attention", "full_attention"),
    "olmo3": ("sliding_attention", "full_attention"),
    "lfm2": ("conv", "full_attention"),
    "qwen3_5_text": ("linear_attention", "full_attention"),
}
_FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": _SLIDING_WINDOW},
    "mistral": {"sliding_window": _SLIDING_WINDOW},
    "olmo3": {"sliding_window": _SLIDING_WINDOW},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.4},
    "qwen3_5_text": {
        "partial_rotary_factor": 0.5,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}


def tiny_target(
    family: str = "llama",
    seed: int = 0,
    *,
    quantize: Quantization | None = None,
    exact: bool = False,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Target:
    """Make a target with random weights, in memory.

    Args:
        family: One of `engine.families.FAMILIES`. The layers of "mistral" slide over 8 tokens, every other one of
            "gemma3_text" and "olmo3" does, and every other one of "lfm2" and "qwen3_5_text" is recurrent.
        seed: Names the weights.
        quantize: As for `Target`.
        exact: As for `Target`.
        dtype: Of the weights.
        **overrides: Fields of the family's transformers configuration.

    Raises:
        UnsupportedModelError: If the family is unknown.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if family not in FAMILIES:
        raise UnsupportedModelError(f"no tiny target of family {family!r}; expected one of {', '.join(FAMILIES)}")
    config = AutoConfig.for_model(family, **_fields(family, overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        _roughen(model)
    facts = json.dumps([family, seed, quantize, exact, str(dtype), overrides], sort_keys=True, default=str)
    fingerprint = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
    return Target(model, fingerprint=fingerprint, quantize=quantize, exact=exact)


def _fields(family: str, overrides: dict[str, Any]) -> dict[str, Any]:
    fields = _SHAPE | _FAMILY_FIELDS.get(family, {}) | overrides
    if kinds := _LAYER_TYPES.get(family):
        fields = {"layer_types": [kinds[layer % 2] for layer in range(fields["num_hidden_layers"])], **fields}
    return fields


@torch.no_grad()
def _roughen(model: torch.nn.Module) -> None:
    """Move norms and biases away from one and zero, where a mistake in them would not show.

    A delta rule's decay is slowed down: as it is initialized, it forgets everything within two or three rows.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        if name.endswith("A_log"):
            parameter.sub_(4)


def random_dlite(target: Target, *, group: int = 1, num_drafts: int = 7, seed: int = 0, **overrides: Any) -> DLiteModel:
    """Make a DLite drafter with random weights that fits a target; its last vocabulary row is the mask.

    Args:
        target: The target to draft for; its current feature layers are the pivot.
        group: Anchor tokens, 1 or 2.
        num_drafts: Most tokens per draft.
        seed: Names the weights.
        **overrides: Other fields of `DLiteConfig`.
    """
    fields: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": 2 * target.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
        "target_layer_ids": target.layer_ids,
        "block_size": num_drafts + 1,
        "anchor_group_size": group,
        "sequential_rank": 8,
        "mask_token_id": target.vocab_size - 1,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DLiteModel(DLiteConfig(**fields | overrides))
        _roughen(model)
    return model.eval()


def random_baseline(target: Target, kind: Kind, *, num_drafts: int = 7, seed: int = 0) -> HistoryModel:
    """Make a baseline that fits `target`, with random weights; it writes every second token of the vocabulary."""
    reads = kind == "dspark"
    config = HistoryConfig(
        kind=kind,
        hidden_size=target.hidden_size,
        intermediate_size=2 * target.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        target_layer_ids=target.layer_ids if reads else (),
        num_drafts=num_drafts,
        draft_vocab_size=target.vocab_size // 2,
        rank=8 if reads else 0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = new_model(config)
        _roughen(model)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.4)  # so that every part changes what is drafted
        if isinstance(model, DSparkModel):
            nn.init.normal_(model.mask_embedding)
    model.draft_to_target.copy_(torch.arange(config.draft_vocab_size) * 2)
    return model.eval()


class ScriptedDrafter:
    """Proposes given tokens by position: `tokens[i]` is what it drafts at position `start + i` of the text."""

    name = "scripted"

    def __init__(self, tokens: Sequence[int], *, start: int = 0) -> None:
        self.tokens = list(tokens)
        self.start = start

    def propose(self, views: Sequence[DraftView]) -> list[Proposal]:
        """Return the script from each view's end on; nothing before it begins or behind it ends."""
        return [self._propose(view) for view in views]

    def _propose(self, view: DraftView) -> Proposal:
        offset = len(view.ids) + len(view.drafted) - self.start
        return Proposal(self.tokens[offset : offset + view.max_tokens] if offset >= 0 else (), self.name)


class TargetDrafter:
    """Proposes a target's own tokens, from a cache of its own: given the target, every draft is accepted whole."""

    name = "target"

    def __init__(self, target: Target, sampling: SamplingParams | None = None) -> None:
        """Draft as `target` itself would draw under `sampling` (greedily by default)."""
        self.target = target
        self.sampling = sampling or SamplingParams()
        self._state = TargetState(target.new_cache())

    def propose(self, views: Sequence[DraftView]) -> list[Proposal]:
        """Decode the next `view.max_tokens` tokens of each text plainly."""
        return [self._propose(view) for view in views]

    def _propose(self, view: DraftView) -> Proposal:
        request = Request([*view.ids.tolist(), *view.drafted], sampling=self.sampling, max_new_tokens=view.max_tokens)
        steps = decode(self.target, self._state, NullDrafter(), request)
        return Proposal([token for step in steps for token in step.tokens], self.name)


TINY_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Any:
    """Make a transformers tokenizer with one token per byte, ChatML's marks and its template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_of = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(bytes_of)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TINY_CHAT_TEMPLATE
    return tokenizer


def write_tiny_chat_model(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random-weight chat model (one token per byte, ChatML) that `ChatDLite` loads like any other.

    Args:
        folder: Where to; created if need be.
        seed: Names the weights.
        **overrides: Fields of the Llama configuration.

    Returns:
        The folder.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    fields = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096, "eos_token_id": tokenizer.eos_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **(_SHAPE | fields | overrides)))
        _roughen(model)
    model.save_pretrained(folder)
    return folder


class ScriptedChatModel(BaseChatModel):
    """A LangChain chat model that says its script, and its last message again and again after that.

    Attributes:
        script: What it says, call by call; a chunk is what a stream added up to, read the way LangChain reads it.
        prompts: The messages of each call so far.
        choices: The `tool_choice` of each call so far.
    """

    script: list[AIMessage]
    prompts: list[list[BaseMessage]] = Field(default_factory=list)
    choices: list[Any] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], *, tool_choice: Any = None, **kwargs: Any) -> Runnable[Any, AIMessage]:
        """Note the choice; what is said is the script's business."""
        return self.bind(tool_choice=tool_choice)

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        said = self.script[min(len(self.prompts), len(self.script) - 1)].model_copy(deep=True)
        self.prompts.append(messages)
        self.choices.append(kwargs.get("tool_choice"))
        whole = message_chunk_to_message(said) if isinstance(said, AIMessageChunk) else said
        return ChatResult(generations=[ChatGeneration(message=whole)])


def calling(name: str, **args: Any) -> AIMessage:
    """Return a reply that calls one tool, for a script."""
    return AIMessage("", tool_calls=[{"name": name, "args": args, "id": f"call_{uuid.uuid4().hex}"}])
