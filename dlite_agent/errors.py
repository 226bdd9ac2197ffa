"""Every error this package raises on purpose.

    DLiteError
    |-- ConfigError                 a setting has a value that cannot work
    |-- ModelError
    |   |-- UnknownModelError       the name is in no registry, folder or hub
    |   |-- DownloadError           a file could not be fetched (network, disk)
    |   |-- DigestError             a file is not the one that was pinned
    |   |-- CorruptModelError       a model file cannot be read
    |   `-- UnsupportedModelError   a model family that was not shown to be exact
    |-- DrafterError
    |   |-- DrafterFormatError      a checkpoint that is not in a known format
    |   `-- DrafterMismatchError    a checkpoint made for another target
    |-- EngineBusyError             too many texts wait for the engine
    |-- ContextLengthError          the prompt leaves no room in the model's context
    |-- PromptError
    |   `-- UnsupportedContentError message content the target cannot read (images, audio)
    |-- GrammarError
    |   `-- UnsupportedSchemaError  a JSON schema feature the grammar cannot hold
    |-- SessionError
    |   |-- StoreUnavailableError   Redis does not answer
    |   |-- StoreFullError          Redis or its disk has no room
    |   |-- FencedError             another worker has taken the session over
    |   |-- RecordError             a stored record is damaged, foreign or too large
    |   |-- UnknownSessionError     there is no such session or snapshot
    |   |-- SessionExistsError      the name of a new session is taken
    |   |-- SessionFileError        an exported session is damaged, truncated or not readable
    |   |   `-- ForeignFileError    an exported session of another tenant, secret, target or version
    |   `-- ServerStartError        the embedded server did not start
    `-- MissingDependencyError      an optional extra is not installed

A message says what was got, what was expected and what to do. The command line prints it as one line.
"""

from __future__ import annotations


class DLiteError(Exception):
    """Base of all errors of this package; catching it catches nothing else."""


class ConfigError(DLiteError, ValueError):
    """A setting has a value that cannot work."""


class ModelError(DLiteError):
    """A target model cannot be found, fetched, read or used."""


class UnknownModelError(ModelError, LookupError):
    """The model name is in no registry, is no folder and is no hub id."""


class DownloadError(ModelError):
    """A model file could not be fetched or written."""


class DigestError(ModelError):
    """A file's SHA-256 is not the pinned one."""


class CorruptModelError(ModelError):
    """A model file is truncated or cannot be parsed."""


class UnsupportedModelError(ModelError):
    """The model family was not shown to be exact under speculation."""


class DrafterError(DLiteError):
    """A drafter cannot be loaded or used."""


class DrafterFormatError(DrafterError):
    """A drafter checkpoint is not in a format this version reads."""


class DrafterMismatchError(DrafterError):
    """A drafter checkpoint was made for another target."""


class EngineBusyError(DLiteError):
    """Too many texts wait for the engine already."""


class ContextLengthError(DLiteError, ValueError):
    """The prompt leaves no room in the model's context."""


class PromptError(DLiteError, ValueError):
    """A conversation cannot be rendered for the model."""


class UnsupportedContentError(PromptError):
    """A message holds content the target cannot read."""


class GrammarError(DLiteError, ValueError):
    """A grammar cannot be compiled or was broken."""


class UnsupportedSchemaError(GrammarError):
    """A JSON schema feature the grammar cannot hold."""


class SessionError(DLiteError):
    """Session state cannot be stored or read."""


class StoreUnavailableError(SessionError, ConnectionError):
    """The Redis server does not answer."""


class StoreFullError(SessionError):
    """The Redis server or its disk has no room."""


class FencedError(SessionError):
    """Another worker has taken this session over."""


class RecordError(SessionError, ValueError):
    """A stored record is damaged, foreign or too large."""


class UnstorableValueError(SessionError, TypeError):
    """A value of a graph's state cannot be written to a checkpoint."""


class UnknownSessionError(SessionError, LookupError):
    """There is no session or snapshot of this name."""


class SessionExistsError(SessionError):
    """A new session would take the name of one that exists."""


class ThreadInUseError(SessionError):
    """Another run on this machine talks on the thread."""


class SessionFileError(SessionError, ValueError):
    """A file that should hold an exported session is damaged, truncated or not readable."""


class ForeignFileError(SessionFileError):
    """An exported session is of another tenant, secret, target or version."""


class ServerStartError(SessionError):
    """The embedded server did not start."""


class MissingDependencyError(DLiteError, ImportError):
    """An optional dependency is not installed."""
