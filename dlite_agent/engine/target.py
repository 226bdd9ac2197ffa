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
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from dlite_agent.drafters.pivot import pivot_layer_ids
from dlite_agent.engine import attention, int8
from dlite_agent.engine.cache import SlabCache
from dlite_agent.engine.families import refuse_inexact
from dlite_agent.engine.lean import make_lean
from dlite_agent.engine.linear import calibrate
from dlite_agent.engine.packed import PackedCache, Segment
from dlite_agent.engine.products import RowTable
from dlite_agent.engine.recurrent import RECURRENT_LAYER_TYPES, RecurrentCache
from dlite_agent.engine.row_tables import write_calibration
from dlite_agent.engine.rowwise import RowMode, separate_rows
from dlite_agent.errors import ConfigError, CorruptModelError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Quantization = Literal["int8"]
_DEFAULT_NUM_FEATURES = 5
_LAYOUT = 3


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
    """Keeps the wanted rows of one module's output."""

    def __init__(self, module: nn.Module) -> None:
        self.wanted: slice | torch.Tensor = slice(-1, None)
        self.rows: torch.Tensor | None = None
        self.remove = module.register_forward_hook(self._keep).remove

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self.rows = hidden[0, self.wanted].clone()


class Target:
    """A causal language model prepared for speculative decoding; holds no state of any session."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        fingerprint: str,
        quantize: Quantization | None = None,
        exact: bool = False,
        cache_dir: Path | None = None,
    ) -> None:
        """Take over a transformers model.

        Args:
            model: A causal LM of one of `families.FAMILIES`, in evaluation mode.
            fingerprint: Names everything that decides the KV bytes; see `fingerprint_of`.
            quantize: "int8" for int8 weights (see `engine.int8`), or None.
            exact: Give a row the very same logits in plain, verify and packed passes. int8 weights always do.
            cache_dir: Where calibration and weight digests are kept, or None to measure now.

        Raises:
            UnsupportedModelError: If the family was not shown to be exact, or not by this machine's kernels.
        """
        self.is_exact = exact or quantize is not None
        refuse_inexact(model.config, is_rowwise=self.is_exact)
        if self.is_exact and model.dtype != torch.float32:
            raise UnsupportedModelError(
                f"int8 weights and exact=True give a row the same bits everywhere in float32, not in {model.dtype}; "
                "load it in float32, or without quantize and exact"
            )
        attention.register()
        model.set_attn_implementation(_attention_name(is_exact=self.is_exact))
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        self.fingerprint = fingerprint
        self.num_layers: int = model.config.num_hidden_layers
        self.hidden_size: int = model.config.hidden_size
        self.vocab_size: int = model.config.vocab_size
        self.max_positions: int = model.config.max_position_embeddings
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._cache_dir = cache_dir
        self.layer_ids: tuple[int, ...] = ()
        self._taps: list[_Tap] = []
        if quantize == "int8":
            int8.quantize(model)
        mode = None
        if self.is_exact:
            mode = RowMode()
            mode.watch(model)
            separate_rows(model, mode)
        self.row_tables: dict[tuple[int, int], RowTable] = calibrate(
            model, folder=cache_dir, mode=mode, shared=model.get_output_embeddings()
        )
        make_lean(model)
        self.tap(pivot_layer_ids(self.num_layers, min(_DEFAULT_NUM_FEATURES, self.num_layers)))

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        quantize: Quantization | None = None,
        exact: bool = False,
        device: str = "cpu",
        cache_dir: Path | None = None,
    ) -> Target:
        """Load a model folder (config.json, safetensors) onto a device; the other options are those of `Target`.

        Raises:
            ConfigError: If this machine has no such device.
            UnsupportedModelError: If the family was not shown to be exact, or not by this machine's kernels.
            CorruptModelError: If the folder cannot be read as a model.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        _check_device(device)
        try:
            config = AutoConfig.from_pretrained(folder)
        except Exception as error:  # whatever a damaged file makes of transformers' validation
            raise CorruptModelError(f"{folder} has no readable config.json ({error}); pull the model again") from error
        refuse_inexact(config, is_rowwise=exact or quantize is not None)
        config = getattr(config, "text_config", None) or config
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
        fingerprint = fingerprint_of(folder, config, dtype=dtype, quantize=quantize, exact=exact, digests_dir=cache_dir)
        return cls(model.to(device), fingerprint=fingerprint, quantize=quantize, exact=exact, cache_dir=cache_dir)

    @property
    def embedding(self) -> torch.Tensor:
        """The token embedding, `[vocab, hidden]`; frozen, shared with drafters."""
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, torch.Tensor)
        return weight

    @property
    def head(self) -> torch.Tensor:
        """The output rows, `[vocab, hidden]`; frozen, shared with drafters.

        Raises:
            ConfigError: If they are there as int8 only.
        """
        weight = getattr(self.model.get_output_embeddings(), "weight", None)
        if isinstance(weight, torch.Tensor) and weight.is_floating_point():
            return weight
        if self.config.tie_word_embeddings:
            return self.embedding
        raise ConfigError("this drafter needs the target's output rows, which are int8 only; load with quantize=None")

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

    def calibrate(self, module: nn.Module) -> None:
        """Let the linears inside a module, a drafter's say, multiply few rows as fast as this machine can."""
        calibrate(module, folder=self._cache_dir)

    @property
    def is_packable(self) -> bool:
        """Whether rows of several sessions can share a pass: a recurrent layer would run from one into the next."""
        return not self._has_recurrent_layers

    @property
    def is_restorable(self) -> bool:
        """Whether a session's KV rows alone bring it back; a recurrent layer's state is not among them."""
        return not self._has_recurrent_layers

    def new_cache(self) -> SlabCache:
        """Return an empty cache for one session; with recurrent layers, one that goes back to checkpoints."""
        if self._has_recurrent_layers:
            return RecurrentCache(self.config.layer_types, device=self.device)
        return SlabCache(self.num_layers, device=self.device)

    @property
    def _has_recurrent_layers(self) -> bool:
        return not RECURRENT_LAYER_TYPES.isdisjoint(getattr(self.config, "layer_types", None) or ())

    def forward(
        self, ids: Sequence[int], cache: SlabCache, *, num_logits: int = 1, num_features: int = 1
    ) -> TargetOutput:
        """Run the target over new tokens behind the rows of one cache; see `forward_many`."""
        return self.forward_many([Segment(ids, cache, num_logits, num_features)])[0]

    @torch.inference_mode()
    def forward_many(self, segments: Sequence[Segment]) -> list[TargetOutput]:
        """Run the target once over the new tokens of several sessions, packed into one row of tokens.

        Each cache grows by its segment's rows; on failure each is where it was, one with checkpoints at or before.
        Families that cannot be packed are run one by one.
        """
        before = [segment.cache.num_rows for segment in segments]
        try:
            if len(segments) > 1 and self.is_packable:
                return self._forward_packed(segments)
            return [self._forward_one(segment) for segment in segments]
        except BaseException:
            for segment, num_rows in zip(segments, before, strict=True):
                segment.cache.crop_to(num_rows)  # the first layers may have written
            raise
        finally:
            attention.forget_masks()

    def _forward_one(self, segment: Segment) -> TargetOutput:
        logits, features = self._run(
            segment.ids,
            cache=segment.cache,
            logits_to_keep=segment.num_logits,
            features_to_keep=slice(-segment.num_features, None),
        )
        return TargetOutput(logits, features)

    def _forward_packed(self, segments: Sequence[Segment]) -> list[TargetOutput]:
        starts = [segment.cache.num_rows for segment in segments]
        positions = [start + i for start, s in zip(starts, segments, strict=True) for i in range(s.num_rows)]
        stops = list(accumulate(segment.num_rows for segment in segments))
        wanted_logits = [range(stop - s.num_logits, stop) for stop, s in zip(stops, segments, strict=True)]
        wanted_features = [range(stop - s.num_features, stop) for stop, s in zip(stops, segments, strict=True)]
        logits, features = self._run(
            [token for segment in segments for token in segment.ids],
            cache=PackedCache(segments, self.num_layers),
            logits_to_keep=self._index(wanted_logits),
            features_to_keep=self._index(wanted_features),
            position_ids=torch.tensor([positions], device=self.device),
            segments=segments,
        )
        each_logits = torch.split(logits, [s.num_logits for s in segments])
        each_features = torch.split(features, [s.num_features for s in segments])
        return [TargetOutput(*pair) for pair in zip(each_logits, each_features, strict=True)]

    def _run(
        self,
        ids: Sequence[int],
        *,
        cache: Any,
        logits_to_keep: int | torch.Tensor,
        features_to_keep: slice | torch.Tensor,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of the model; returns logits `[rows, vocab]` and features `[rows, layers, hidden]`."""
        for tap in self._taps:
            tap.wanted = features_to_keep
        rows = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        output = self.model(input_ids=rows, cache=cache, use_cache=True, logits_to_keep=logits_to_keep, **kwargs)
        features = torch.stack([tap.rows for tap in self._taps if tap.rows is not None], dim=1)
        for tap in self._taps:
            tap.rows = None
        return output.logits[0], features

    def _index(self, ranges: Sequence[range]) -> torch.Tensor:
        return torch.tensor([row for wanted in ranges for row in wanted], device=self.device)

    def _module_of(self, layer: int) -> nn.Module:
        if not 0 <= layer < self.num_layers:
            raise ConfigError(f"feature layer {layer}; expected 0..{self.num_layers - 1}")
        decoder: Any = self.model.get_decoder()
        final_norm = decoder.embedding_norm if self.config.model_type == "lfm2" else decoder.norm
        module = final_norm if layer == self.num_layers - 1 else decoder.layers[layer]
        assert isinstance(module, nn.Module)
        return module


def _check_device(device: str) -> None:
    """Allocate a number there: the one test that all kinds of devices understand."""
    try:
        torch.zeros(1, device=device).add_(1).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"device {device!r} cannot be used ({first_line}); expected cpu, cuda or mps") from error


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


def _attention_name(*, is_exact: bool) -> str:
    return attention.ROWWISE_NAME if is_exact else attention.NAME


def fingerprint_of(
    folder: Path,
    config: Any,
    *,
    dtype: torch.dtype,
    quantize: Quantization | None = None,
    exact: bool = False,
    digests_dir: Path | None = None,
) -> str:
    """Return a digest of everything that decides the bytes of a KV block: weights, configuration, dtype, layout."""
    digest = hashlib.blake2b(digest_size=16)
    facts: dict[str, Any] = {
        "layout": _LAYOUT,
        "dtype": str(dtype),
        "quantize": int8.VERSION if quantize == "int8" else quantize,
        "attention": _attention_name(is_exact=exact or quantize is not None),
        "config": {k: v for k, v in config.to_dict().items() if k not in ("transformers_version", "_name_or_path")},
    }
    if exact and quantize is None:
        facts["exact"] = True  # int8 always is
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
        write_calibration(remembered, digest)
    return digest
