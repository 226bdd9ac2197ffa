"""The file tools: what they do, and that nothing outside the workspace can be reached."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import ToolMessage
from langchain_core.tools import ToolException

from dlite_agent.errors import ConfigError
from dlite_agent.tools import Workspace, database_tool, default_tools, note_tools, python_tool, web_tool
from dlite_agent.tools import files as files_module

SECRET = "outside the workspace"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    (tmp_path / "secret.txt").write_text(SECRET)
    return Workspace(tmp_path / "work")


def call(workspace: Path, name: str, **arguments: object) -> ToolMessage:
    tool = {tool.name: tool for tool in default_tools(workspace)}[name]
    message = tool.invoke({"type": "tool_call", "id": "1", "name": name, "args": arguments})
    assert isinstance(message, ToolMessage)
    return message


def test_what_is_written_is_read_back(workspace: Workspace) -> None:
    assert workspace.write_file("src/a.txt", "äöü\r\n\tend") == "wrote src/a.txt (12 bytes)"
    assert workspace.read_file("./src//a.txt") == "äöü\r\n\tend"
    assert (workspace.root / "src" / "a.txt").read_bytes() == "äöü\r\n\tend".encode()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(text=st.text(min_size=1, max_size=200).filter(lambda text: text.isprintable() or "\n" in text))
def test_any_text_survives(workspace: Workspace, text: str) -> None:
    workspace.write_file("any.txt", text)
    assert workspace.read_file("any.txt") == text


def test_listing_is_sorted_and_nested_and_hides_nothing_but_drafts(workspace: Workspace) -> None:
    for path in ("b.txt", "a/z.txt", "a/b/c.txt", ".git/config", ".dlite-draft-0"):
        (workspace.root / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace.root / path).write_text("12345")
    os.symlink("/etc", workspace.root / "link")
    expected = "\n".join(
        [".git/", "a/", "a/b/", "a/b/c.txt (5 bytes)", "a/z.txt (5 bytes)", "b.txt (5 bytes)", "link (not a file)"]
    )
    assert workspace.list_files() == expected
    assert workspace.list_files("a/b") == "a/b/c.txt (5 bytes)"


def test_listing_an_empty_or_a_huge_folder_stays_short(workspace: Workspace) -> None:
    assert workspace.list_files() == "(empty)"
    for index in range(files_module.MAX_ENTRIES + 50):
        (workspace.root / f"{index:04d}").touch()
    lines = workspace.list_files().splitlines()
    assert len(lines) == files_module.MAX_ENTRIES + 1
    assert lines[-1] == "(more than 200 entries; list a subfolder)"


def test_edit_replaces_one_unique_piece_only(workspace: Workspace) -> None:
    workspace.write_file("a.txt", "one two two")
    assert workspace.edit_file("a.txt", "one", "1") == "edited a.txt (9 bytes)"
    workspace.write_file("b.txt", "1 aaa")
    with pytest.raises(ToolException, match="occurs 2 times"):
        workspace.edit_file("b.txt", "aa", "x")  # the first two, or the last two?
    for old, problem in (("two", "occurs 2 times"), ("three", "does not occur"), ("", "old_text is empty")):
        with pytest.raises(ToolException, match=problem):
            workspace.edit_file("a.txt", old, "x")
    assert workspace.read_file("a.txt") == "1 two two"


def test_long_files_are_read_in_pages_that_join_to_the_whole(workspace: Workspace) -> None:
    text = "".join(f"line {index} {'x' * 80}\n" for index in range(600))
    workspace.write_file("long.txt", text)
    pages, start = "", 1
    while True:
        page = workspace.read_file("long.txt", start)
        body, _, note = page.rpartition("(lines ")
        if not note.endswith(f"read on with start_line {start + body.count(chr(10))})"):
            break
        assert len(page) < files_module.MAX_RESULT_CHARS + 100
        pages, start = pages + body, start + body.count("\n")
    assert pages + page == text
    with pytest.raises(ToolException, match="has 600 lines"):
        workspace.read_file("long.txt", 601)


def test_a_range_of_lines_is_read(workspace: Workspace) -> None:
    workspace.write_file("a.txt", "one\ntwo\r\nthree\u2028still three\nfour")
    assert workspace.read_file("a.txt", 2, 2) == "two\r\n(lines 2-2 of 4; read on with start_line 3)"
    assert workspace.read_file("a.txt", 3, 9) == "three\u2028still three\nfour"
    with pytest.raises(ToolException, match="end_line is 1, before start_line 2"):
        workspace.read_file("a.txt", 2, 1)


def test_one_line_longer_than_a_page_is_cut_and_said_so(workspace: Workspace) -> None:
    workspace.write_file("wide.txt", "y" * (files_module.MAX_RESULT_CHARS + 1))
    assert workspace.read_file("wide.txt").endswith("(line 1 is longer than 16000 characters)")


@pytest.mark.parametrize(
    "path",
    [
        "../secret.txt",
        "a/../../secret.txt",
        "/etc/passwd",
        "~/x",
        "~root/x",
        "",
        ".",
        "  ",
        "a\0b",
        "x" * 2000,
        "//etc/passwd",
    ],
)
def test_a_path_that_leaves_the_workspace_is_refused(workspace: Workspace, path: str) -> None:
    with pytest.raises(ToolException):
        workspace.read_file(path)
    with pytest.raises(ToolException):
        workspace.write_file(path, "overwritten")
    with pytest.raises(ToolException):
        workspace.edit_file(path, "outside", "inside")
    assert (workspace.root.parent / "secret.txt").read_text() == SECRET


def test_a_link_is_never_followed(workspace: Workspace) -> None:
    outside = workspace.root.parent
    os.symlink(outside / "secret.txt", workspace.root / "file")
    os.symlink(outside, workspace.root / "folder")
    os.symlink(outside / "new.txt", workspace.root / "dangling")
    for path in ("file", "folder/secret.txt", "dangling", "folder/new.txt", "folder/sub/new.txt"):
        with pytest.raises(ToolException):
            workspace.read_file(path)
        with pytest.raises(ToolException):
            workspace.write_file(path, "overwritten")
    with pytest.raises(ToolException):
        workspace.list_files("folder")
    assert SECRET not in workspace.list_files()
    assert sorted(os.listdir(outside)) == ["secret.txt", "work"]
    assert (outside / "secret.txt").read_text() == SECRET


def test_a_parent_swapped_for_a_link_while_in_use_leads_nowhere(workspace: Workspace) -> None:
    outside = workspace.root.parent / "outside"
    outside.mkdir()
    (outside / "a.txt").write_text(SECRET)
    (workspace.root / "real").mkdir()
    (workspace.root / "real" / "a.txt").write_text("inside")
    os.symlink(outside, workspace.root / "link")
    stop = threading.Event()

    def swap() -> None:  # `folder` is now the real one, now the link
        while not stop.is_set():
            for target in ("real", "link"):
                try:
                    os.rename(workspace.root / target, workspace.root / "folder")
                except OSError:  # the writer has made a folder of that name
                    shutil.rmtree(workspace.root / "folder", ignore_errors=True)
                else:
                    os.rename(workspace.root / "folder", workspace.root / target)

    swapper = threading.Thread(target=swap)
    swapper.start()
    num_read = 0
    try:
        for _ in range(3000):
            try:
                assert workspace.read_file("folder/a.txt") == "inside"
                num_read += 1
                workspace.write_file("folder/a.txt", "inside")
            except ToolException:
                continue
    finally:
        stop.set()
        swapper.join()
    assert num_read > 0
    assert (outside / "a.txt").read_text() == SECRET
    assert os.listdir(outside) == ["a.txt"]


def test_a_name_swapped_for_a_link_while_being_written_replaces_the_link(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = workspace.root.parent / "secret.txt"
    rename = os.rename

    def rename_late(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        os.symlink(secret, workspace.root / "a.txt")
        rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", rename_late)
    workspace.write_file("a.txt", "new")
    assert secret.read_text() == SECRET
    assert not (workspace.root / "a.txt").is_symlink()
    assert (workspace.root / "a.txt").read_text() == "new"


def test_folders_pipes_and_devices_are_not_files(workspace: Workspace) -> None:
    (workspace.root / "folder").mkdir()
    os.mkfifo(workspace.root / "pipe")
    for path in ("folder", "pipe", "folder/x/y", "pipe/x"):
        with pytest.raises(ToolException):
            workspace.read_file(path)
    for path in ("folder", "pipe", "pipe/x"):
        with pytest.raises(ToolException):
            workspace.write_file(path, "text")
    with pytest.raises(ToolException):
        workspace.list_files("pipe")


def test_no_descriptor_is_left_open(workspace: Workspace) -> None:
    (workspace.root / "folder").mkdir()
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(20):
        workspace.write_file("folder/a/b.txt", "x")
        workspace.list_files()
        for path in ("folder", "missing/x", "folder/a/b.txt/c", ".."):
            with pytest.raises(ToolException):
                workspace.read_file(path)
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after == before


def test_a_write_that_fails_keeps_the_old_text(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace.write_file("a.txt", "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ToolException, match="No space left on device"):
        workspace.write_file("a.txt", "new")
    assert os.listdir(workspace.root) == ["a.txt"]
    assert workspace.read_file("a.txt") == "old"


def test_writing_keeps_the_mode(workspace: Workspace) -> None:
    workspace.write_file("run.sh", "#!/bin/sh\n")
    (workspace.root / "run.sh").chmod(0o750)
    workspace.edit_file("run.sh", "sh\n", "sh\ntrue\n")
    assert (workspace.root / "run.sh").stat().st_mode & 0o777 == 0o750


def test_set_user_id_does_not_survive_new_contents(workspace: Workspace) -> None:
    (workspace.root / "suid").touch()
    (workspace.root / "suid").chmod(0o4755)
    workspace.write_file("suid", "#!/bin/sh")
    assert (workspace.root / "suid").stat().st_mode & 0o7777 == 0o755


def test_a_new_file_is_as_private_as_the_process_makes_files(workspace: Workspace) -> None:
    before = os.umask(0o077)
    try:
        workspace.write_file("private.txt", "x")
    finally:
        os.umask(before)
    assert (workspace.root / "private.txt").stat().st_mode & 0o777 == 0o600


def test_sizes_are_bounded_both_ways(workspace: Workspace) -> None:
    with pytest.raises(ToolException, match="at most 1048576"):
        workspace.write_file("big.txt", "x" * (files_module.MAX_FILE_BYTES + 1))
    assert workspace.list_files() == "(empty)"
    (workspace.root / "big.txt").write_bytes(b"x" * (files_module.MAX_FILE_BYTES + 1))
    with pytest.raises(ToolException, match="larger than 1048576"):
        workspace.read_file("big.txt")
    (workspace.root / "binary").write_bytes(b"\xff\xfe\0")
    with pytest.raises(ToolException, match="not a text file"):
        workspace.read_file("binary")
    with pytest.raises(ToolException, match="not valid Unicode"):
        workspace.write_file("a.txt", "\ud800")


def test_edits_made_at_once_are_all_kept(workspace: Workspace) -> None:
    workspace.write_file("a.txt", "".join(f"[{index}]" for index in range(40)))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: workspace.edit_file("a.txt", f"[{index}]", f"<{index}>"), range(40)))
    assert workspace.read_file("a.txt") == "".join(f"<{index}>" for index in range(40))


def test_failures_reach_the_model_as_error_messages(tmp_path: Path) -> None:
    missing = call(tmp_path, "read_file", path="nope.txt")
    assert (missing.status, missing.content) == ("error", "nope.txt does not exist; call list_files to see what does")
    wrong = call(tmp_path, "write_file", path="a.txt")
    assert (wrong.status, wrong.content) == ("error", "wrong arguments: content: Field required")
    fine = call(tmp_path, "write_file", path="a.txt", content="x")
    assert (fine.status, fine.content) == ("success", "wrote a.txt (1 bytes)")


def test_a_workspace_that_is_a_file_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        default_tools(tmp_path / "file")


def test_every_tool_has_a_short_prompt_and_described_arguments(tmp_path: Path) -> None:
    tools = default_tools(tmp_path)
    assert [tool.name for tool in tools] == [
        "list_files",
        "read_file",
        "write_file",
        "edit_file",
        "find_files",
        "search_files",
        "calculate",
        "current_time",
    ]
    (tmp_path / "a.db").touch()
    more = [*note_tools(tmp_path), database_tool(tmp_path / "a.db"), web_tool(["example.org"])]
    for tool in [*tools, *more, python_tool(is_confinement_required=False)]:
        assert 0 < len(tool.description) < 80
        assert all(schema.get("description") for schema in tool.args.values())
