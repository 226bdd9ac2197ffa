"""A thread is open in one run at a time; the lock moves with a fork and dies with its process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dlite_agent.config import Settings
from dlite_agent.errors import ThreadInUseError
from dlite_agent.run.thread_lock import ThreadLock


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, redis_url=None)


def is_free(settings: Settings, thread_id: str) -> bool:
    try:
        with ThreadLock(settings, thread_id):
            return True
    except ThreadInUseError:
        return False


def test_a_second_run_is_refused_until_the_first_has_ended(settings: Settings, tmp_path: Path) -> None:
    with ThreadLock(settings, "trip"):
        with pytest.raises(ThreadInUseError, match="'trip' is open in another run"):
            ThreadLock(settings, "trip")
        assert is_free(settings, "other")
        assert is_free(replace(settings, redis_url="redis://elsewhere"), "trip")
        assert not is_free(settings, "trip")
    assert is_free(settings, "trip")
    assert list((tmp_path / "threads").iterdir()) == []


def test_a_move_gives_the_thread_before_back(settings: Settings) -> None:
    with ThreadLock(settings, "trip") as lock:
        with lock.moving_to("trip-2"):
            assert not is_free(settings, "trip")
            assert not is_free(settings, "trip-2")
        assert is_free(settings, "trip")
        assert not is_free(settings, "trip-2")
    assert is_free(settings, "trip-2")


def test_a_move_that_fails_leaves_everything_as_it_was(settings: Settings) -> None:
    with ThreadLock(settings, "trip") as lock, ThreadLock(settings, "taken"):
        with pytest.raises(ThreadInUseError, match="taken"), lock.moving_to("taken"):
            raise AssertionError("not reached")
        with pytest.raises(OSError, match="full"), lock.moving_to("trip-2"):
            raise OSError("full")
        assert not is_free(settings, "trip")
        assert is_free(settings, "trip-2")


def test_a_lock_whose_file_was_just_removed_is_not_taken_for_one(settings: Settings, tmp_path: Path) -> None:
    """Whoever waited on the removed file would hold a lock that nobody else looks at."""
    with ThreadLock(settings, "trip"):
        (path,) = (tmp_path / "threads").iterdir()
        path.unlink()
        with ThreadLock(settings, "trip"):
            assert path.exists()
            assert not is_free(settings, "trip")


def test_the_lock_dies_with_its_process(settings: Settings, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from dlite_agent.config import Settings\n"
        "from dlite_agent.run.thread_lock import ThreadLock\n"
        "lock = ThreadLock(Settings(home=Path(sys.argv[1]), redis_url=None), 'trip')\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert not is_free(settings, "trip")
        other.kill()
        other.wait()
    assert is_free(settings, "trip")
