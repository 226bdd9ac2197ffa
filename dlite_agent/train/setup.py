"""From a command's options to a trainer: what the corpus says about the target, the target's embedding, the plan."""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dlite_agent.config import Settings
from dlite_agent.drafters.baselines import new_model
from dlite_agent.drafters.dlite import DLiteConfig, DLiteModel
from dlite_agent.drafters.dspark import DSparkModel
from dlite_agent.drafters.history import HistoryConfig, HistoryModel
from dlite_agent.drafters.independent import IndependentModel
from dlite_agent.errors import ConfigError, CorruptModelError
from dlite_agent.models import REGISTRY, resolve
from dlite_agent.provenance import source_commit
from dlite_agent.train.anchors import AnchorStream, frequent_tokens, num_anchors
from dlite_agent.train.config import TrainConfig
from dlite_agent.train.contexts import ContextReader
from dlite_agent.train.loop import CHECKPOINT, Trainer, read_checkpoint
from dlite_agent.train.options import Plan, RunOptions
from dlite_agent.train.ranks import Ranks
from dlite_agent.train.shards import context_paths, read_about, read_manifest, shard_paths
from dlite_agent.train.students import (
    DLiteStudent,
    DSparkStudent,
    IndependentStudent,
    Student,
    TeacherStudent,
    head_of_target,
    start_afresh,
    temper,
)
from dlite_agent.train.teacher import Teacher


def prepare(options: RunOptions, settings: Settings, ranks: Ranks | None = None) -> Trainer:
    """Set a run up, or set it up again to go on.

    A corpus may have grown since the run began; a run that goes on uses the shards that it began with.

    Raises:
        DLiteError: If the target or a corpus cannot be read or they do not belong together, or the folder holds another
            run.
    """
    ranks = ranks or Ranks(device=options.device)
    config = TrainConfig.parse(options.settings)
    corpus, num_shards = read_about(options.corpus), None
    if options.is_resumed:
        known = read_checkpoint(options.out)["corpus"] or {}
        num_shards = known.get("num_shards")
    elif (options.out / CHECKPOINT).exists():
        raise ConfigError(f"{options.out} holds a run; go on with --resume, or take another folder")
    paths = shard_paths(options.corpus)[:num_shards]
    folder = resolve(options.target, settings=settings)
    student = _student(config, corpus, paths, folder, ranks.device)
    teacher = None if options.teacher is None else _teacher(options, student)
    held_out = _held_out(options, corpus)
    trainer = Trainer(
        student=student,
        stream=_stream(config, options.corpus, paths, teacher or student),
        config=config,
        plan=_plan(options, config, len(paths), ranks.count),
        options=options,
        held_out=held_out,
        held_out_reader=_reader(options.held_out, student) if options.held_out else None,
        teacher=teacher,
        ranks=ranks,
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
    embedding = _read_tensor(folder, "embed_tokens.weight")
    if embedding is None:
        raise CorruptModelError(f"no *.safetensors of {folder} holds a tensor named ...embed_tokens.weight")
    return embedding


def _read_tensor(folder: Path, ending: str) -> torch.Tensor | None:
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                names = [name for name in file.keys() if name.endswith(ending)]  # noqa: SIM118
                if names:
                    tensor: torch.Tensor = file.get_tensor(names[0]).float()
                    return tensor
        except SafetensorError as error:
            raise CorruptModelError(f"{path} cannot be read ({error}); pull the model again") from error
    return None


def _student(config: TrainConfig, corpus: dict[str, Any], paths: list[Path], folder: Path, device: str) -> Student:
    """Return a drafter with fresh weights, on its device."""
    embedding = read_embedding(folder)
    shape = config.shape(
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
    model = _model(config, shape)
    vocabulary = frequent_tokens(paths, count=shape.draft_vocab_size, vocab_size=shape.vocab_size)
    start_afresh(model, draft_to_target=vocabulary, mask=embedding.mean(dim=0), seed=config.seed)
    tensor = _read_tensor(folder, "lm_head.weight")
    head = embedding if tensor is None else tensor
    if isinstance(model, HistoryModel):
        temper(model, head)
    elif config.has_target_head:
        head_of_target(model.net if isinstance(model, Teacher) else model, embedding, head)
    model, embedding, head = model.to(device), embedding.to(device), head.to(device)
    if isinstance(model, Teacher):
        return TeacherStudent(model, embedding)
    if isinstance(model, DLiteModel):
        return DLiteStudent(model, embedding)
    if isinstance(model, DSparkModel):
        return DSparkStudent(model, embedding, head)
    assert isinstance(model, IndependentModel)
    return IndependentStudent(model, embedding, head)


def _model(config: TrainConfig, shape: DLiteConfig | HistoryConfig) -> DLiteModel | HistoryModel | Teacher:
    if isinstance(shape, HistoryConfig):
        return new_model(shape)
    return Teacher(shape, window=config.window) if config.kind == "teacher" else DLiteModel(shape)


def _teacher(options: RunOptions, student: Student) -> TeacherStudent:
    """Return the teacher to listen to, and give the student its head.

    Raises:
        ConfigError: If it cannot teach this student.
    """
    assert options.teacher is not None
    if not isinstance(student, DLiteStudent):
        raise ConfigError("only a drafter of kind dlite can have a teacher; leave --teacher out")
    try:
        known = TrainConfig(**json.loads((options.teacher / "training.json").read_text())["config"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{options.teacher} holds no training run ({error!r}); expected that of a teacher") from error
    own = student.model.config
    shape = known.shape(
        hidden_size=own.hidden_size,
        vocab_size=own.vocab_size,
        num_target_layers=own.num_target_layers,
        layer_ids=own.target_layer_ids,
    )
    if known.kind != "teacher" or not isinstance(shape, DLiteConfig):
        raise ConfigError(f"{options.teacher} holds a drafter of kind {known.kind}; expected a teacher")
    model = Teacher(shape, window=known.window).to(student.draft_to_target.device)
    model.read(options.teacher)
    try:
        student.model.sequential_head.load_state_dict(model.net.sequential_head.state_dict())
    except RuntimeError as error:
        raise ConfigError(
            f"{options.teacher} has a head of another shape; train with its rank and vocabulary"
        ) from error
    student.model.draft_to_target.copy_(model.net.draft_to_target)
    return TeacherStudent(model.eval().requires_grad_(False), student.embedding)


def _reader(folder: Path, student: Student) -> ContextReader | None:
    """Return where the prompts of a corpus are, if they are read."""
    return ContextReader(context_paths(folder)) if student.reads_texts else None


def _stream(config: TrainConfig, folder: Path, paths: list[Path], student: Student) -> AnchorStream:
    return AnchorStream(
        paths,
        batch_size=config.batch_size,
        num_drafts=student.num_taught,
        num_resident=config.num_resident,
        seed=config.seed,
        reader=_reader(folder, student),
        look_back=student.look_back,
    )


def _plan(options: RunOptions, config: TrainConfig, num_shards: int, num_ranks: int) -> Plan:
    num_steps = None
    if options.epochs is not None:
        total = options.epochs * num_anchors(options.corpus, num_shards=num_shards)
        num_steps = max(1, math.ceil(total / (config.batch_size * num_ranks)))
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
        "teacher": None if options.teacher is None else str(options.teacher),
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
