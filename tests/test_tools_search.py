"""Finding files by name and by what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.tools import ToolException

from dlite_agent.tools import Workspace
from dlite_agent.tools import search as search_module
from dlite_agent.tools.search import FileSearch


@pytest.fixture
def search(tmp_path: Path) -> FileSearch:
    for path, text in {
        "a.py": "import os\ndef main():\n    pass\n",
        "src/b.py": "def other(): main()\n",
        "src/deep/c.txt": "one (1)\u2028same line\ntwo\n",
        ".hidden/d.py": "def main()",
        "image.bin": "\0main",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return FileSearch(Workspace(tmp_path))


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.py", "a.py\nsrc/b.py"),
        ("src/*", "src/b.py"),
        ("src/**", "src/b.py\nsrc/deep/c.txt"),
        ("**/c.*", "src/deep/c.txt"),
        ("./a.py", "a.py"),
        ("s*/**/[ab].py", "src/b.py"),
        ("*.PY", "no file matches *.PY"),
    ],
)
def test_files_are_found_by_name(search: FileSearch, pattern: str, found: str) -> None:
    assert search.find_files(pattern) == found


@pytest.mark.parametrize("is_regex", [False, True])
def test_lines_are_found_with_path_and_number(search: FileSearch, is_regex: bool) -> None:
    notes = "\n(1 files are not text, too large or links)"
    assert (
        search.search_files("main", is_regex=is_regex) == f"a.py:2: def main():\nsrc/b.py:1: def other(): main(){notes}"
    )
    assert search.search_files("two", "src/deep", is_regex) == "src/deep/c.txt:2: two"
    assert search.search_files("main", "a.py", is_regex) == "a.py:2: def main():"
    assert search.search_files("nothing", "src", is_regex) == "no line has 'nothing'"


def test_plain_text_is_not_read_as_a_pattern(search: FileSearch) -> None:
    assert search.search_files("(1)", "src").startswith("src/deep/c.txt:1: one (1)")
    assert search.search_files(r"^def \w+\(", "src", is_regex=True) == "src/b.py:1: def other(): main()"


def test_what_cannot_be_searched_is_said(search: FileSearch) -> None:
    for text, path in (
        ("", "."),
        ("a\nb", "."),
        ("x" * 300, "."),
        ("a", "missing"),
        ("a", "missing/b.py"),
        ("a", "../x"),
    ):
        with pytest.raises(ToolException):
            search.search_files(text, path)
    for pattern in ("", ".", "x" * 300):
        with pytest.raises(ToolException, match="pattern"):
            search.find_files(pattern)


def test_a_pattern_that_python_warns_of_is_searched_for(search: FileSearch, tmp_path: Path) -> None:
    (tmp_path / "sets.txt").write_text("[a]\n")
    assert search.search_files("[[a]", "sets.txt", is_regex=True) == "sets.txt:1: [a]"


def test_a_path_that_is_no_unicode_is_refused(search: FileSearch) -> None:
    with pytest.raises(ToolException, match="Unicode"):
        search.search_files("hit", "\ud800")


def test_a_search_that_finds_too_much_is_cut(
    search: FileSearch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "long.txt").write_text("hit\n" * 500)
    for is_regex in (False, True):
        lines = search.search_files("hit", is_regex=is_regex).splitlines()
        assert lines[99:101] == ["long.txt:100: hit", "(first 100 lines; search a subfolder, or a longer text)"]
    monkeypatch.setattr(search_module, "MAX_SEARCH_BYTES", 40)
    assert search.search_files("main").endswith("(searched the first 40 bytes only; search a subfolder)")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(text=st.text(alphabet="ab\n\r\x0b\u2028", max_size=30))
def test_line_numbers_are_those_of_read_file(tmp_path: Path, text: str) -> None:
    workspace = Workspace(tmp_path / "w")
    workspace.write_file("x.txt", text)
    for line in FileSearch(workspace).search_files("ab").splitlines():
        if line.startswith("x.txt:"):
            number = int(line.split(":")[1])
            assert "ab" in workspace.read_file("x.txt", number, number).partition("\n")[0]
