"""From a command's options to a trainer: what the corpus says about the target, the target's embedding, the plan."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dlite_agent.config import Settings
from dlite_agent.drafters.dlite import DLiteModel
from dlite_agent.errors import ConfigError, CorruptModelError
from dlite_agent.models import REGISTRY, resolve
from dlite_agent.provenance import source_commit
from dlite_agent.train.anchors import AnchorStream, frequent_tokens, num_anchors
from dlite_agent.train.config import TrainConfig
from dlite_agent.train.loop import CHECKPOINT, Trainer, new_drafter, read_checkpoint
from dlite_agent.train.options import Plan, RunOptions
from dlite_agent.train.shards import read_about, read_manifest, shard_paths

_EMBEDDING = "embed_tokens.weight"


def prepare(options: RunOptions, settings: Settings) -> Trainer:
    """Set a run up, or set it up again to go on.

    A corpus may have grown since the run began; a run that goes on uses the shards that it began with.

    Raises:
        DLiteError: If the target or a corpus cannot be read or they do not belong together, or the folder holds another
            run.
    """
    config = TrainConfig.parse(options.settings)
    corpus, num_shards = read_about(options.corpus), None
    if options.is_resumed:
        known = read_checkpoint(options.out)["corpus"] or {}
        num_shards = known.get("num_shards")
    elif (options.out / CHECKPOINT).exists():
        raise ConfigError(f"{options.out} holds a run; go on with --resume, or take another folder")
    paths = shard_paths(options.corpus)[:num_shards]
    embedding = read_embedding(resolve(options.target, settings=settings)).to(options.device)
    trainer = Trainer(
        model=_drafter(config, corpus, paths, embedding),
        embedding=embedding,
        stream=_stream(config, paths),
        config=config,
        plan=_plan(options, config, len(paths)),
        options=options,
        held_out=_held_out(options, corpus),
        facts=_facts(options, corpus, len(paths)),
    )
    if options.is_resumed:
        trainer.resume()
    return trainer


def read_embedding(folder: Path) -> torch.Tensor:
    """Return the token embedding `[vocab, d]` of a model folder, fp32, without loading the model.

    Raises:
        CorruptModelError: If no weight file holds one.
    """
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                names = [name for name in file.keys() if name.endswith(_EMBEDDING)]  # noqa: SIM118
                if names:
                    embedding: torch.Tensor = file.get_tensor(names[0]).float()
                    return embedding
        except SafetensorError as error:
            raise CorruptModelError(f"{path} cannot be read ({error}); pull the model again") from error
    raise CorruptModelError(f"no *.safetensors of {folder} holds a tensor named ...{_EMBEDDING}")


def _drafter(config: TrainConfig, corpus: dict[str, Any], paths: list[Path], embedding: torch.Tensor) -> DLiteModel:
    shape = config.drafter(
        hidden_size=corpus["hidden_size"],
        vocab_size=corpus["vocab_size"],
        num_target_layers=corpus["num_target_layers"],
        layer_ids=corpus["feature_layer_ids"],
    )
    if tuple(embedding.shape) != (shape.vocab_size, shape.hidden_size):
        raise ConfigError(
            f"the target's embedding is {list(embedding.shape)}, the corpus was made by a target with "
            f"{[shape.vocab_size, shape.hidden_size]}; name the target that wrote it"
        )
    vocabulary = frequent_tokens(paths, count=shape.draft_vocab_size, vocab_size=shape.vocab_size)
    model = new_drafter(shape, draft_to_target=vocabulary, embedding=embedding.cpu(), seed=config.seed)
    return model.to(embedding.device)


def _stream(config: TrainConfig, paths: list[Path]) -> AnchorStream:
    return AnchorStream(
        paths,
        batch_size=config.batch_size,
        num_drafts=config.num_drafts,
        num_resident=config.num_resident,
        seed=config.seed,
    )


def _plan(options: RunOptions, config: TrainConfig, num_shards: int) -> Plan:
    num_steps = None
    if options.epochs is not None:
        total = options.epochs * num_anchors(options.corpus, num_shards=num_shards)
        num_steps = max(1, math.ceil(total / config.batch_size))
    return Plan(num_steps, options.minutes)


def _held_out(options: RunOptions, corpus: dict[str, Any]) -> list[Path]:
    if options.held_out is None:
        return []
    about = read_about(options.held_out)
    if not about["options"]["is_held_out"]:
        raise ConfigError(f"{options.held_out} is no held-out corpus; make one with `dlite-agent corpus --held-out`")
    for name in ("target_fingerprint", "feature_layer_ids"):
        if about[name] != corpus[name]:
            raise ConfigError(f"{options.held_out} has {name} {about[name]}, the corpus {corpus[name]}")
    return shard_paths(options.held_out)


def _facts(options: RunOptions, corpus: dict[str, Any], num_shards: int) -> dict[str, Any]:
    digests = [entry["sha256"] for entry in read_manifest(options.corpus)[:num_shards]]
    return {
        "target_names": _target_names(options.target),
        "target_fingerprint": corpus["target_fingerprint"],
        "corpus": {"num_shards": num_shards, "last_shard": digests[-1] if digests else None},
        "corpus_options": corpus["options"],
        "num_anchors": num_anchors(options.corpus, num_shards=num_shards),
        "command": shlex.join(["dlite-agent", *sys.argv[1:]]),
        "commit": source_commit(),
        "torch": str(torch.__version__),
    }


def _target_names(target: str) -> list[str]:
    """Return what the target is called wherever it comes from; a folder by its name."""
    if target in REGISTRY:
        return [target, REGISTRY[target].hub_id]
    return [Path(target).name if Path(target).is_dir() else target]
