"""Several processes that train one drafter together, started by torchrun: each takes its share of every step."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed, nn

from dlite_agent.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of a run.

    Attributes:
        rank: Its number; 0 speaks and writes.
        count: How many there are.
        device: Where it computes.
    """

    rank: int = 0
    count: int = 1
    device: str = "cpu"

    @property
    def is_first(self) -> bool:
        """Whether this one speaks and writes."""
        return self.rank == 0

    def average_gradients(self, model: nn.Module) -> None:
        """Give all processes the mean of their gradients; one that has none for a parameter counts as zeros."""
        if self.count == 1:
            return
        for parameter in model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                distributed.all_reduce(parameter.grad)
                parameter.grad /= self.count

    def agree(self, values: Sequence[float]) -> list[float]:
        """Return the first process's values."""
        if self.count == 1:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.broadcast(shared, src=0)
        return shared.tolist()


@contextmanager
def join_ranks(device: str) -> Iterator[Ranks]:
    """Join the processes that torchrun started, if it did.

    Args:
        device: "cpu", or "cuda" for one device per process.

    Raises:
        ConfigError: If torchrun's environment is not whole.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Ranks(device=device)
        return
    try:
        rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    except (KeyError, ValueError) as error:
        raise ConfigError(f"WORLD_SIZE is {count}, but {error}; start the command with torchrun") from error
    own = f"cuda:{local}" if device == "cuda" else device
    if own != device:
        torch.cuda.set_device(own)
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield Ranks(rank, count, own)
        distributed.barrier()  # one that leaves early can take the others down
    finally:
        distributed.destroy_process_group()
