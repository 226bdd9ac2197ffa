"""What is installed here and what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from dlite_agent.config import Settings
from dlite_agent.errors import SessionError


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: What it is.
        state: How it is, or what to do.
        is_fine: Whether it can be used as it is.
        is_needed: Whether nothing works without it.
    """

    what: str
    state: str
    is_fine: bool = True
    is_needed: bool = False


def examine(settings: Settings) -> list[Finding]:
    """Look at packages, server, models, threads and calibration; nothing is started or changed."""
    return [*_packages(), _server(settings), *_models(settings), *_compute(settings)]


def _packages() -> Iterator[Finding]:
    for name in ("dlite-agent", "torch", "transformers", "langchain-core", "langgraph", "llguidance", "redis"):
        try:
            yield Finding(name, version(name), is_needed=True)
        except PackageNotFoundError:
            yield Finding(name, f"missing: `pip install {name}`", is_fine=False, is_needed=True)


def _server(settings: Settings) -> Finding:
    from dlite_agent.sessions.embedded import find_server
    from dlite_agent.sessions.embedded import version as server_version

    if settings.redis_url is not None:
        return _external_server(settings)
    try:
        binary = find_server()
        return Finding("embedded server", f"{server_version(binary)}, data in {settings.server_dir}")
    except SessionError as error:
        return Finding("embedded server", str(error), is_fine=False)


def _external_server(settings: Settings) -> Finding:
    from dlite_agent.sessions.client import server_version
    from dlite_agent.sessions.embedded import connect

    try:
        return Finding("server at REDIS_URL", server_version(connect(settings)))
    except (SessionError, ValueError) as error:
        return Finding("server at REDIS_URL", str(error), is_fine=False, is_needed=True)


def _models(settings: Settings) -> Iterator[Finding]:
    from dlite_agent.models import REGISTRY, installed

    there = {model.name: model for model in installed(settings=settings)}
    for name in REGISTRY:
        model = there.get(name)
        if model is None:
            yield Finding(f"model {name}", f"not here: `dlite-agent pull {name}`", is_fine=False)
        elif model.problem:
            yield Finding(f"model {name}", model.problem, is_fine=False)
        else:
            yield Finding(f"model {name}", f"{model.num_bytes / 2**30:.1f} GiB in {model.path}")


def _compute(settings: Settings) -> Iterator[Finding]:
    import torch

    from dlite_agent.engine.row_tables import table_path

    torch.set_num_threads(settings.threads)
    yield Finding("threads", f"{settings.threads}, {torch.backends.cpu.get_cpu_capability()}")
    path = table_path(settings.home / "calibration", torch.float32)
    if path.is_file():
        yield Finding("small-row products", f"calibrated, {path}")
    else:
        yield Finding("small-row products", "not calibrated yet: the first load does it", is_fine=False)
