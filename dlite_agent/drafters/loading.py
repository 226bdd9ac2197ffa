"""Drafters by name, or by the folder of a DLite checkpoint; some checkpoints come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dlite_agent.drafters import baselines, checkpoint
from dlite_agent.drafters.dlite import DLiteConfig, DLiteDrafter
from dlite_agent.drafters.dspark import DSparkDrafter, DSparkModel
from dlite_agent.drafters.history import HistoryConfig
from dlite_agent.drafters.hybrid import HybridDrafter
from dlite_agent.drafters.independent import IndependentDrafter, IndependentModel
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.protocol import Drafter
from dlite_agent.errors import DrafterError

if TYPE_CHECKING:
    from dlite_agent.engine.target import Target

NAMES = ("auto", "null", "lookup", "dlite", "dspark", "independent")
"""`auto` is the best drafter there is for a target: lookup, and DLite with it where one was trained for the target.

`dlite` is DLite alone; `dspark` and `independent` are baselines to measure against. The three need a checkpoint that
was trained for the target.
"""

TRAINED = Path(__file__).resolve().parent / "trained"
"""Folder of the checkpoints that come with the package, one folder each."""


def load_drafter(spec: str, target: Target) -> Drafter:
    """Return the drafter of a name of `NAMES`, or of a folder: lookup with its DLite checkpoint, or its baseline.

    Loading a checkpoint makes the target take the features that it reads. A spec `dlite:FOLDER` drafts with DLite
    alone.

    Raises:
        DrafterError: If the name is unknown, or the checkpoint missing, damaged or of another target.
    """
    if spec == "null":
        return NullDrafter()
    folder = folder_of(spec, target)
    if folder is None:
        return LookupDrafter()
    if baselines.is_baseline(folder):
        return _load_baseline(folder, target)
    dlite = _load_dlite(folder, target)
    return dlite if spec == "dlite" or spec.startswith("dlite:") else HybridDrafter(LookupDrafter(), dlite)


def folder_of(spec: str, target: Target) -> Path | None:
    """Return the checkpoint that a spec means for a target, or None if it needs none.

    Raises:
        DrafterError: If there is none such.
    """
    if spec in ("null", "lookup"):
        return None
    if spec in NAMES:
        found = trained_for(target, kind="dlite" if spec == "auto" else spec)
        if found is None and spec != "auto":
            raise DrafterError(
                f"no {spec} drafter comes with this package for {target.config.model_type} targets of this name and "
                "shape; train one (docs/TRAINING.md) and name its folder"
            )
        return found
    folder = Path(spec.removeprefix("dlite:")).expanduser()
    if not folder.is_dir():
        raise DrafterError(f"no drafter {spec!r}; expected {', '.join(NAMES)}, or the folder of a checkpoint")
    return folder


def layers_read(spec: str, target: Target) -> tuple[int, ...]:
    """Return the target layers whose features a drafter reads; none if it reads none.

    Raises:
        DrafterError: If there is no such drafter.
    """
    folder = folder_of(spec, target)
    if folder is None:
        return ()
    config = baselines.read_config(folder) if baselines.is_baseline(folder) else checkpoint.read_config(folder)
    return config.target_layer_ids


def trained_for(target: Target, *, kind: str = "dlite", folder: Path | None = None) -> Path | None:
    """Return the checkpoint of a kind in `folder`, by default the package's, that was trained for a target, or None.

    The target is known by its name and its shape, not by its bytes: a drafter stays good when the same weights are
    quantized, and what it drafts is verified anyway.

    Raises:
        DrafterFormatError: If a checkpoint that is there is damaged.
    """
    names = _names_of(target)
    for candidate in sorted(path.parent for path in (folder or TRAINED).glob("*/config.json")):
        config: DLiteConfig | HistoryConfig
        found: str
        if baselines.is_baseline(candidate):
            config = baselines.read_config(candidate)
            found, known = config.kind, baselines.read_target_names(candidate)
        else:
            config = checkpoint.read_config(candidate)
            found, known = "dlite", checkpoint.read_target_names(candidate)
        shape = (config.hidden_size, config.vocab_size, config.num_target_layers)
        is_same = shape == (target.hidden_size, target.vocab_size, target.num_layers)
        if found == kind and is_same and not names.isdisjoint(known):
            return candidate
    return None


def _names_of(target: Target) -> set[str]:
    """Return what a target may be called: its folder's name, its hub id."""
    origin = Path(str(getattr(target.config, "_name_or_path", "")))
    cached = [part.removeprefix("models--").replace("--", "/") for part in origin.parts if part.startswith("models--")]
    return {origin.name, str(origin), *cached} - {"", "."}


def _load_dlite(folder: Path, target: Target) -> DLiteDrafter:
    model = checkpoint.load(folder, dtype=target.dtype)
    _fit(model.config, target)
    drafter = DLiteDrafter(model.to(target.device), target.embedding)
    target.calibrate(drafter.model)
    return drafter


def _load_baseline(folder: Path, target: Target) -> DSparkDrafter | IndependentDrafter:
    model = baselines.load(folder, dtype=target.dtype).to(target.device)
    _fit(model.config, target)
    drafter: DSparkDrafter | IndependentDrafter
    if isinstance(model, DSparkModel):
        drafter = DSparkDrafter(model, target.embedding, target.head)
    else:
        assert isinstance(model, IndependentModel)
        drafter = IndependentDrafter(model, target.embedding, target.head)
    for module in (drafter.model, drafter.head):
        target.calibrate(module)
    return drafter


def _fit(config: DLiteConfig | HistoryConfig, target: Target) -> None:
    """Refuse a drafter of another target, and let the target take the features that it reads."""
    checkpoint.check_target(
        config,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
    )
    if config.target_layer_ids and target.layer_ids != config.target_layer_ids:
        target.tap(config.target_layer_ids)
