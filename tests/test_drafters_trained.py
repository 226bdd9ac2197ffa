"""The drafters that come with the package: small, whole, of known origin, and trained on nothing that is measured."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dlite_agent.drafters import baselines, checkpoint
from dlite_agent.drafters.history import KINDS
from dlite_agent.drafters.loading import TRAINED
from dlite_agent.model_registry import REGISTRY
from dlite_agent.train.split import held_out_groups, read_groups, read_listed_ids

WORKLOADS = Path(__file__).resolve().parents[2] / "shared" / "workloads"
MAX_BYTES = 25_000_000
FOLDERS = sorted(TRAINED.iterdir())


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def manifest(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]


def test_smollm2_and_the_default_model_have_one_and_smollm2_what_it_is_measured_against() -> None:
    smollm2 = {f"smollm2-135m-{kind}" for kind in ("dlite", *KINDS)}
    assert {*smollm2, "qwen2.5-coder-1.5b-dlite"} <= {folder.name for folder in FOLDERS}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_weights_are_bfloat16_of_bounded_size_and_finite(folder: Path) -> None:
    path = folder / "model.safetensors"
    assert path.stat().st_size <= MAX_BYTES
    tensors = load_file(path)
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    assert {tensor.dtype for tensor in floats.values()} == {torch.bfloat16}
    assert all(bool(torch.isfinite(tensor).all()) for tensor in floats.values())
    is_baseline = baselines.is_baseline(folder)
    model = baselines.load(folder) if is_baseline else checkpoint.load(folder)
    names = baselines.read_target_names(folder) if is_baseline else checkpoint.read_target_names(folder)
    assert len(model.state_dict()) == len(tensors)
    assert folder.name.startswith(names[0])
    assert names == (names[0], REGISTRY[names[0]].hub_id)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_drafter_says_how_it_was_made(folder: Path) -> None:
    training, shards = read(folder, "training.json"), manifest(folder)
    shards = shards[: training["corpus"]["num_shards"]]
    assert training["command"].startswith("dlite-agent train --target ")
    assert "/root" not in training["command"] and " /" not in training["command"]
    assert len(training["commit"]) == 40
    assert training["corpus"] == {"num_shards": len(shards), "last_shard": shards[-1]["sha256"]}
    assert training["num_anchors"] == sum(shard["num_tokens"] - shard["num_answers"] for shard in shards)
    assert training["target_fingerprint"] == read(folder, "corpus.json")["target_fingerprint"]
    with (folder / "log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert max(float(row["held_out_tau"]) for row in rows) > 1
    assert float(rows[-1]["seconds"]) <= 60 * training["plan"]["minutes"] + 60


@pytest.mark.skipif(not WORKLOADS.is_dir(), reason="the shared workloads are not beside this clone")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_no_held_out_session_was_learned(folder: Path) -> None:
    groups = read_groups(WORKLOADS)
    held_out = held_out_groups(groups, read_listed_ids(WORKLOADS))
    learned = {groups[name] for shard in manifest(folder) for name in shard["sessions"]}
    assert learned
    assert not learned & held_out
