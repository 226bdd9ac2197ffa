"""Drafters by name, or by the folder of a DLite checkpoint."""

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
"""`auto` is the best drafter there is for a target: lookup, until one is trained for it."""


def load_drafter(spec: str, target: Target) -> Drafter:
    """Return the drafter of a name of `NAMES`, or lookup and DLite together for a checkpoint folder.

    Loading a DLite checkpoint makes the target take the features that it reads. A spec `dlite:FOLDER` drafts with the
    checkpoint alone.

    Raises:
        DrafterError: If the name is unknown, or the checkpoint damaged or of another target.
    """
    if spec == "null":
        return NullDrafter()
    if spec in ("auto", "lookup"):
        return LookupDrafter()
    is_alone = spec.startswith("dlite:")
    folder = Path(spec.removeprefix("dlite:")).expanduser()
    if not folder.is_dir():
        raise DrafterError(f"no drafter {spec!r}; expected {', '.join(NAMES)}, or the folder of a DLite checkpoint")
    model = checkpoint.load(folder, dtype=target.dtype)
    checkpoint.check_target(
        model.config,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
    )
    target.tap(model.config.target_layer_ids)
    dlite = DLiteDrafter(model.to(target.device), target.embedding)
    return dlite if is_alone else HybridDrafter(LookupDrafter(), dlite)
