"""The target model: one forward pass over new rows, with the hidden states a drafter asks for.

Features of layer l are the output of decoder layer l, and of the last layer the output of the final norm. They are
taken by hooks on just those modules and just the rows wanted: asking transformers for all hidden states of a
10k-token prefill would cost a gigabyte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from dlite_agent.drafters.pivot import pivot_layer_ids
from dlite_agent.engine import attention, int8
from dlite_agent.engine.cache import SlabCache
from dlite_agent.engine.linear import RowTable, calibrate
from dlite_agent.errors import ConfigError, CorruptModelError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Quantization = Literal["int8"]
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text")
_EXACT_ROPE = ("default", "linear", "llama3", "yarn")
_DEFAULT_NUM_FEATURES = 5
_LAYOUT = 1


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What one forward pass gives.

    Attributes:
        logits: `[num_logits, vocab]`, of the last rows.
        features: `[num_features, layers, hidden]`, of the last rows.
    """

    logits: torch.Tensor
    features: torch.Tensor


class _Tap:
    """Keeps the last rows of one module's output."""

    def __init__(self, module: nn.Module) -> None:
        self.num_rows = 1
        self.rows: torch.Tensor | None = None
        self.remove = module.register_forward_hook(self._keep).remove

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self.rows = hidden[0, -self.num_rows :].clone()


class Target:
    """A causal language model prepared for speculative decoding; holds no state of any session."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        fingerprint: str,
        quantize: Quantization | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        """Take over a transformers model.

        Args:
            model: A causal LM of one of `FAMILIES`, in evaluation mode.
            fingerprint: Names everything that decides the KV bytes; see `fingerprint_of`.
            quantize: "int8" for int8 weights (see `engine.int8`), or None.
            cache_dir: Where calibration and weight digests are kept, or None to measure now.

        Raises:
            UnsupportedModelError: If the family was not shown to be exact.
        """
        _refuse_inexact(model.config)
        attention.register()
        model.set_attn_implementation(_attention_name(quantize))
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        self.fingerprint = fingerprint
        self.num_layers: int = model.config.num_hidden_layers
        self.hidden_size: int = model.config.hidden_size
        self.vocab_size: int = model.config.vocab_size
        self.max_positions: int = model.config.max_position_embeddings
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.layer_ids: tuple[int, ...] = ()
        self._taps: list[_Tap] = []
        self.tap(pivot_layer_ids(self.num_layers, min(_DEFAULT_NUM_FEATURES, self.num_layers)))
        if quantize == "int8":
            int8.quantize(model)
        self.row_tables: dict[tuple[int, int], RowTable] = calibrate(model, folder=cache_dir)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        quantize: Quantization | None = None,
        cache_dir: Path | None = None,
    ) -> Target:
        """Load a model folder (config.json, safetensors).

        Raises:
            UnsupportedModelError: If the family was not shown to be exact.
            CorruptModelError: If the folder cannot be read as a model.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            config = AutoConfig.from_pretrained(folder)
        except Exception as error:  # whatever a damaged file makes of transformers' validation
            raise CorruptModelError(f"{folder} has no readable config.json ({error}); pull the model again") from error
        config = getattr(config, "text_config", config)
        _refuse_inexact(config)
        try:
            with _no_progress_bars():
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=dtype, config=config, use_safetensors=True, output_loading_info=True
                )
        except Exception as error:  # transformers and safetensors raise many types here, bare Exception among them
            raise CorruptModelError(f"{folder} cannot be loaded ({error}); remove it and pull it again") from error
        model, loading = loaded
        if wrong := sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]])):
            raise CorruptModelError(f"{folder} lacks weights its config.json asks for ({wrong[0]}, ...); pull it again")
        fingerprint = fingerprint_of(folder, config, dtype=dtype, quantize=quantize, digests_dir=cache_dir)
        return cls(model, fingerprint=fingerprint, quantize=quantize, cache_dir=cache_dir)

    @property
    def embedding(self) -> torch.Tensor:
        """The token embedding, `[vocab, hidden]`; frozen, shared with drafters."""
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def tap(self, layer_ids: Sequence[int]) -> None:
        """Take the features of these layers from now on.

        Raises:
            ConfigError: If a layer does not exist.
        """
        modules = [self._module_of(layer) for layer in layer_ids]
        for tap in self._taps:
            tap.remove()
        self._taps = [_Tap(module) for module in modules]
        self.layer_ids = tuple(layer_ids)

    def new_cache(self) -> SlabCache:
        """Return an empty cache for one session."""
        return SlabCache(self.num_layers, device=self.device)

    @torch.inference_mode()
    def forward(
        self, ids: Sequence[int], cache: SlabCache, *, num_logits: int = 1, num_features: int = 1
    ) -> TargetOutput:
        """Run the target over new tokens behind the rows of `cache`, which grows by `len(ids)`; not at all on failure.

        Args:
            ids: New tokens, at least one.
            cache: The session's cache; written in place.
            num_logits: Logits wanted, of the last rows.
            num_features: Features wanted, of the last rows.
        """
        for tap in self._taps:
            tap.num_rows = num_features
        rows = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        num_rows = cache.num_rows
        try:
            output = self.model(input_ids=rows, cache=cache, use_cache=True, logits_to_keep=num_logits)
        except BaseException:
            cache.crop_to(num_rows)  # the first layers may have written
            raise
        features = torch.stack([tap.rows for tap in self._taps if tap.rows is not None], dim=1)
        for tap in self._taps:
            tap.rows = None
        return TargetOutput(output.logits[0], features)

    def _module_of(self, layer: int) -> nn.Module:
        if not 0 <= layer < self.num_layers:
            raise ConfigError(f"feature layer {layer}; expected 0..{self.num_layers - 1}")
        decoder = self.model.get_decoder()
        layers: Any = decoder.layers
        module = decoder.norm if layer == self.num_layers - 1 else layers[layer]
        assert isinstance(module, nn.Module)
        return module


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers quiet: whoever loads a target shows progress in its own way."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()


def _refuse_inexact(config: Any) -> None:
    """Refuse what was not shown to give the same tokens after a crop."""
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} was not shown to be exact under speculation; "
            f"expected one of {', '.join(FAMILIES)}"
        )
    parameters = getattr(config, "rope_parameters", None) or {}
    variants = [parameters] if "rope_type" in parameters else [v for v in parameters.values() if isinstance(v, dict)]
    for variant in variants:
        if variant.get("rope_type", "default") not in _EXACT_ROPE:
            raise UnsupportedModelError(
                f"RoPE type {variant['rope_type']!r} changes old keys as the text grows; expected one of {_EXACT_ROPE}"
            )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError("bidirectional attention cannot be decoded token by token; use a causal model")


def _attention_name(quantize: Quantization | None) -> str:
    return attention.NAME if quantize is None else attention.ROWWISE_NAME


def fingerprint_of(
    folder: Path,
    config: Any,
    *,
    dtype: torch.dtype,
    quantize: Quantization | None = None,
    digests_dir: Path | None = None,
) -> str:
    """Return a digest of everything that decides the bytes of a KV block: weights, configuration, dtype, layout."""
    digest = hashlib.blake2b(digest_size=16)
    facts = {
        "layout": _LAYOUT,
        "dtype": str(dtype),
        "quantize": quantize,
        "attention": _attention_name(quantize),
        "config": {k: v for k, v in config.to_dict().items() if k not in ("transformers_version", "_name_or_path")},
    }
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for weights in sorted(folder.glob("*.safetensors")):
        digest.update(_weights_digest(weights, digests_dir).encode())
    return digest.hexdigest()


def _weights_digest(path: Path, digests_dir: Path | None) -> str:
    """Digest a whole weight file; remembered by path, size and time of change, since it reads gigabytes."""
    stat = path.stat()
    remembered = None
    if digests_dir is not None:
        name = hashlib.blake2b(
            f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode(), digest_size=16
        ).hexdigest()
        remembered = digests_dir / f"weights-{name}"
        if remembered.is_file() and len(known := remembered.read_text()) == 64:
            return known
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
    if remembered is not None:
        remembered.parent.mkdir(parents=True, exist_ok=True)
        remembered.write_text(digest)
    return digest
