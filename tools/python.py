"""Running a model's Python programs, each in a confined process of its own."""

from __future__ import annotations

from pathlib import Path

from langchain_core.tools import BaseTool, ToolException
from pydantic import BaseModel, Field

from dlite_agent.errors import ConfigError
from dlite_agent.tools.factory import make_tool, shorten
from dlite_agent.tools.process import Limits, explain, require_confinement, run_confined

MAX_CODE_CHARS = 100_000
MAX_RESULT_CHARS = 8_000


class RunPythonArgs(BaseModel):
    """Arguments of `run_python`."""

    code: str = Field(description="The program, for example print(sum(range(10)))")


def python_tool(
    folder: Path | None = None, *, limits: Limits | None = None, is_confinement_required: bool = True
) -> BaseTool:
    """Return the tool `run_python`.

    Each call is a new process: nothing is kept between calls but files in `folder`. On Linux 5.13 and later with
    Landlock and seccomp filters, on x86-64 and AArch64, the kernel holds it, for root too, to: reading the standard
    library, the system's libraries and `folder`; writing `folder` only; no network; no other process and no thread; no
    signals to others. Wall and processor time, memory, size of a file, open files and output are bounded by `limits`
    wherever there are POSIX resource limits (macOS does not hold memory). The limit of processes binds users other
    than root everywhere; root is bound by the system call filter.

    Not isolated: names, sizes and times of files elsewhere can be asked for; the machine's clock, name and number of
    processors are seen; processor caches are shared; the kernel itself is trusted. A program can delete or garble all
    of `folder`, and what it leaves there may be run by you. Disk use is looked at ten times a second, not before each
    write. Code of people you do not trust belongs in a virtual machine.

    Args:
        folder: Where programs run and may write, such as the file tools' workspace; a folder per call if None.
        limits: What one call may use.
        is_confinement_required: Refuse to make the tool where the kernel cannot hold programs to the above. If False,
            they run there with the agent's own rights to files and network, within `limits`; for root, the
            number of processes is then not bounded.

    Raises:
        ConfigError: `folder` is not a folder, or programs cannot be confined here.
    """
    bounds = limits or Limits()
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; create it, or name another")
    place = folder.resolve() if folder else None
    if is_confinement_required:
        require_confinement()

    def run_python(code: str) -> str:
        """Run a Python program and return what it prints."""
        if len(code) > MAX_CODE_CHARS:
            raise ToolException(f"the program has {len(code)} characters; at most {MAX_CODE_CHARS} are allowed")
        outcome = run_confined(code, limits=bounds, folder=place, is_required=is_confinement_required)
        text = shorten(outcome.text(), MAX_RESULT_CHARS, "print less of it").rstrip("\n")
        if reason := explain(outcome, bounds):
            raise ToolException(f"{text}\n({reason})".lstrip("\n"))
        if outcome.status:
            raise ToolException(f"{text}\n(exit status {outcome.status})".lstrip("\n"))
        return text or "(no output; use print to see a value)"

    return make_tool(run_python, RunPythonArgs)
