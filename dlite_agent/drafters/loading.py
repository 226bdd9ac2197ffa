"""Drafters by name, or by the folder of a DLite checkpoint; some checkpoints come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dlite_agent.drafters import checkpoint
from dlite_agent.drafters.dlite import DLiteDrafter
from dlite_agent.drafters.hybrid import HybridDrafter
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.protocol import Drafter
from dlite_agent.errors import DrafterError

if TYPE_CHECKING:
    from dlite_agent.engine.target import Target

NAMES = ("auto", "null", "lookup")
"""`auto` is the best drafter there is for a target: lookup, and DLite with it where one was trained for the target."""

TRAINED = Path(__file__).resolve().parent / "trained"
"""Folder of the checkpoints that come with the package, one folder each."""


def load_drafter(spec: str, target: Target) -> Drafter:
    """Return the drafter of a name of `NAMES`, or lookup and DLite together for a checkpoint folder.

    Loading a DLite checkpoint makes the target take the features that it reads. A spec `dlite:FOLDER` drafts with the
    checkpoint alone.

    Raises:
        DrafterError: If the name is unknown, or the checkpoint damaged or of another target.
    """
    if spec == "null":
        return NullDrafter()
    if spec == "lookup":
        return LookupDrafter()
    if spec == "auto":
        trained = trained_for(target)
        return LookupDrafter() if trained is None else HybridDrafter(LookupDrafter(), _load(trained, target))
    is_alone = spec.startswith("dlite:")
    folder = Path(spec.removeprefix("dlite:")).expanduser()
    if not folder.is_dir():
        raise DrafterError(f"no drafter {spec!r}; expected {', '.join(NAMES)}, or the folder of a DLite checkpoint")
    dlite = _load(folder, target)
    return dlite if is_alone else HybridDrafter(LookupDrafter(), dlite)


def trained_for(target: Target, *, folder: Path = TRAINED) -> Path | None:
    """Return the checkpoint in `folder` that was trained for a target, or None.

    The target is known by its name and its shape, not by its bytes: a drafter stays good when the same weights are
    quantized, and what it drafts is verified anyway.

    Raises:
        DrafterFormatError: If a checkpoint that is there is damaged.
    """
    names = _names_of(target)
    for candidate in sorted(path.parent for path in folder.glob("*/config.json")):
        if names.isdisjoint(checkpoint.read_target_names(candidate)):
            continue
        config = checkpoint.read_config(candidate)
        shape = (config.hidden_size, config.vocab_size, config.num_target_layers)
        if shape == (target.hidden_size, target.vocab_size, target.num_layers):
            return candidate
    return None


def _names_of(target: Target) -> set[str]:
    """Return what a target may be called: its folder's name, its hub id."""
    origin = Path(str(getattr(target.config, "_name_or_path", "")))
    cached = [part.removeprefix("models--").replace("--", "/") for part in origin.parts if part.startswith("models--")]
    return {origin.name, str(origin), *cached} - {"", "."}


def _load(folder: Path, target: Target) -> DLiteDrafter:
    model = checkpoint.load(folder, dtype=target.dtype)
    checkpoint.check_target(
        model.config,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
    )
    if target.layer_ids != model.config.target_layer_ids:
        target.tap(model.config.target_layer_ids)
    return DLiteDrafter(model.to(target.device), target.embedding)
