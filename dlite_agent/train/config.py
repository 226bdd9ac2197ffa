"""What a training run is: the drafter's shape, the losses, the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from dlite_agent.drafters.dlite import AGENT_V1, DLiteConfig
from dlite_agent.drafters.history import KINDS, HistoryConfig
from dlite_agent.errors import ConfigError

if TYPE_CHECKING:
    import torch

_PRECISIONS = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Options of a run; every one can be set as `--config name=value`.

    Attributes:
        kind: "dlite"; "teacher" for the teacher of one; or a baseline: "dspark" or "independent".
        num_drafts: K, tokens per draft.
        group: G, anchor tokens.
        num_layers: Layers of the drafter.
        num_heads: Attention heads.
        num_kv_heads: Key/value heads.
        head_dim: Width of a head.
        intermediate_size: Width of the MLP; 0 for 8/3 of the target's hidden size, in multiples of 64.
        rank: r, width of the sequential head.
        draft_vocab_size: V_d, tokens the drafter can write.
        has_confidence: Train a confidence head.
        has_mask_embedding: Learn the mask instead of taking row 0 of the embedding.
        has_target_head: Whether the sequential head begins as the target's own, cut to its rank, or at random.
        batch_size: Anchors per step.
        learning_rate: Highest, after the warm-up.
        warm_up: Share of the run in which it rises; then it falls along a cosine to `final_rate` of it.
        final_rate: Share of the learning rate that is left at the end.
        weight_decay: AdamW's.
        clip: Largest norm of a gradient.
        position_decay: Position k weighs exp(-(k - 1) / position_decay).
        w_ce: Weight of the cross-entropy with the target's likeliest token.
        w_tv: Weight of the total variation distance to the target's distribution.
        w_confidence: Weight of the confidence head's loss; it moves nothing but that head.
        off_path_weight: Weight of positions behind a sampled token that was not the likeliest one.
        feature_noise: Deviation of the noise on the target's hidden states, as a share of each row's root mean square.
        precision: Of the products: "float32", "bfloat16" (weights stay float32), or "auto": bfloat16 on CUDA only.
        scheduled_sampling: Share of previous tokens that are the head's own at the end of the run; it rises from 0 over
            the second half.
        window: W, rows before the pivot that a teacher sees.
        distill: Share of a run with a teacher in which it alone is listened to, the head copied from it and frozen.
        transition: Share behind that in which the target takes over.
        num_resident: Shards in memory at once, among which anchors are shuffled.
        seed: Of weights, order and sampling.
    """

    kind: str = "dlite"
    num_drafts: int = 7
    group: int = 2
    num_layers: int = 2
    num_heads: int = 8
    num_kv_heads: int = 8
    head_dim: int = 64
    intermediate_size: int = 0
    rank: int = 128
    draft_vocab_size: int = 8192
    has_confidence: bool = True
    has_mask_embedding: bool = True
    has_target_head: bool = True
    batch_size: int = 128
    learning_rate: float = 6e-4
    warm_up: float = 0.04
    final_rate: float = 0.0
    weight_decay: float = 0.0
    clip: float = 1.0
    position_decay: float = 4.0
    w_ce: float = 1.0
    w_tv: float = 1.0
    w_confidence: float = 0.1
    off_path_weight: float = 1.0
    feature_noise: float = 0.0
    precision: str = "auto"
    scheduled_sampling: float = 0.2
    window: int = 32
    distill: float = 0.3
    transition: float = 0.2
    num_resident: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in (kinds := ("dlite", "teacher", *KINDS)):
            raise ConfigError(f"kind is {self.kind!r}; expected one of {', '.join(kinds)}")
        for name in ("batch_size", "num_resident", "num_drafts", "draft_vocab_size", "window"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least 1")
        for name in ("warm_up", "final_rate", "scheduled_sampling", "distill", "transition"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 0 to 1")
        if self.precision not in _PRECISIONS:
            raise ConfigError(f"precision is {self.precision!r}; expected one of {', '.join(_PRECISIONS)}")
        if not self.feature_noise >= 0:
            raise ConfigError(f"feature_noise is {self.feature_noise}; expected 0 or more")
        for name in ("learning_rate", "clip", "position_decay"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a positive number")

    def is_half(self, device: torch.device) -> bool:
        """Whether products are made in bfloat16 on a device."""
        return self.precision == "bfloat16" or (self.precision == "auto" and device.type == "cuda")

    @classmethod
    def parse(cls, settings: Sequence[str]) -> TrainConfig:
        """Read `name=value` settings.

        Raises:
            ConfigError: If a name is unknown, or a value of another type or one that cannot work.
        """
        kinds = {field.name: type(field.default) for field in fields(cls)}
        values: dict[str, Any] = {}
        for setting in settings:
            name, _, text = setting.partition("=")
            if name not in kinds:
                raise ConfigError(f"no option {setting!r}; expected name=value with a name of {', '.join(kinds)}")
            values[name] = _read(name, text, kinds[name])
        return cls(**values)

    def shape(
        self, *, hidden_size: int, vocab_size: int, num_target_layers: int, layer_ids: Sequence[int]
    ) -> DLiteConfig | HistoryConfig:
        """Return the shape of the drafter for a target."""
        shared: dict[str, Any] = {
            "hidden_size": hidden_size,
            "intermediate_size": self.intermediate_size or round(hidden_size * 8 / 3 / 64) * 64 or 64,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": vocab_size,
            "num_target_layers": num_target_layers,
            "target_layer_ids": tuple(layer_ids),
            "draft_vocab_size": min(self.draft_vocab_size, vocab_size),
        }
        if self.kind == "dspark":
            return HistoryConfig(**shared, kind="dspark", num_drafts=self.num_drafts, rank=self.rank)
        if self.kind == "independent":
            shared["target_layer_ids"] = ()
            return HistoryConfig(**shared, kind="independent", num_drafts=self.num_drafts, rank=0)
        return DLiteConfig(
            **shared,
            block_size=self.num_drafts + 1,
            anchor_group_size=self.group,
            sequential_rank=self.rank,
            mask_token_id=0,
            rope_theta=10_000.0,
            version=AGENT_V1,
            has_confidence=self.has_confidence,
            has_mask_embedding=self.has_mask_embedding,
        )


def _read(name: str, text: str, kind: type) -> bool | int | float | str:
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        value: int | float | str = kind(text)
        return value
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{name} is {text!r}; expected {'true or false' if kind is bool else kind.__name__}"
        ) from error
