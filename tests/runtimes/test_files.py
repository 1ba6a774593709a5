"""Files of a task go nowhere but into the workspace; a copy for grading takes nothing but files."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from polynya.errors import HarnessFailed, WorkspaceError
from polynya.runtimes.files import copy_workspace, remove_tree, write_files


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "a\0b", ".", "a/"])
def test_a_path_that_is_not_below_the_workspace_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(WorkspaceError, match=r"runtime\.files"):
        write_files(tmp_path, {name: "x"})
    assert list(tmp_path.iterdir()) == []


def test_text_is_written_as_it_is_and_a_script_is_executable(tmp_path: Path) -> None:
    write_files(tmp_path, {"a/b/run.sh": "#!/bin/sh\necho ü\r\n", "plain": "x"})
    assert (tmp_path / "a/b/run.sh").read_bytes() == "#!/bin/sh\necho ü\r\n".encode()
    assert (tmp_path / "a/b/run.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "plain").stat().st_mode & 0o777 == 0o644


def test_what_is_in_the_way_goes_and_links_are_not_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "file").write_text("untouched")
    (root / "linked").symlink_to(outside)
    (root / "file").symlink_to(outside / "file")
    (root / "was_file").write_text("x")
    (root / "was_folder" / "deep").mkdir(parents=True)
    write_files(root, {"linked/file": "1", "file": "2", "was_file/inner": "3", "was_folder": "4"})
    assert (outside / "file").read_text() == "untouched"
    assert [(root / name).read_text() for name in ("linked/file", "file", "was_file/inner", "was_folder")] == list(
        "1234"
    )


def test_a_name_that_the_disk_refuses_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match=r"n{200}"):
        write_files(tmp_path, {"n" * 300: "x"})


def test_a_copy_has_files_folders_links_and_modes(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    (src / "a" / "empty").mkdir(parents=True)
    dst.mkdir()
    (src / "a" / "run").write_bytes(b"\0\xff" * 700_000)
    (src / "a" / "run").chmod(0o4755)
    (src / "absolute").symlink_to("/etc/passwd")
    (src / "escaping").symlink_to("../../outside")
    (src / "folder_link").symlink_to("a")
    copy_workspace(src, dst)
    assert (dst / "a" / "run").read_bytes() == b"\0\xff" * 700_000
    assert (dst / "a" / "run").stat().st_mode & 0o7777 == 0o755
    assert (dst / "a" / "empty").is_dir()
    assert [os.readlink(dst / name) for name in ("absolute", "escaping", "folder_link")] == [  # noqa: PTH115
        "/etc/passwd",
        "../../outside",
        "a",
    ]


def test_a_copy_leaves_out_what_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    src.mkdir()
    dst.mkdir()
    os.mkfifo(src / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(src)  # A socket's whole path may have 107 bytes.
        listener.bind("sock")
    if os.geteuid() == 0:
        os.mknod(src / "device", 0o600 | 0o020000, os.makedev(1, 3))
    (src / "file").write_text("x")
    copy_workspace(src, dst)
    assert [path.name for path in dst.iterdir()] == ["file"]


def test_a_copy_beyond_the_caps_is_the_agents_doing(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    src.mkdir()
    dst.mkdir()
    with (src / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(HarnessFailed, match="bytes") as caught:
        copy_workspace(src, dst)
    assert caught.value.policy_can_cause
    (src / "sparse").unlink()
    for number in range(11):
        (src / str(number)).touch()
    remove_tree(dst)
    dst.mkdir()
    with pytest.raises(HarnessFailed, match="more than 10 files"):
        copy_workspace(src, dst, max_files=10)


def test_a_tree_deeper_than_the_recursion_limit_is_refused_or_copied_but_never_a_crash(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    src.mkdir()
    dst.mkdir()
    here = os.open(src, os.O_RDONLY)
    for _ in range(2500):
        os.mkdir("dd", dir_fd=here)
        below = os.open("dd", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        with pytest.raises(HarnessFailed, match="File name too long"):
            copy_workspace(src, dst)
    finally:  # Left behind, it would break pytest's own removal of old folders.
        remove_tree(src, dst)
    assert not src.exists()


def test_a_tree_is_removed_with_all_kinds_of_files_and_nothing_that_its_links_name(tmp_path: Path) -> None:
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    (outside / "kept").mkdir(parents=True)
    (tree / "a" / "b" / "c").mkdir(parents=True)
    (tree / "b").mkdir()
    (tree / "a" / "link").symlink_to(outside)
    os.mkfifo(tree / "a" / "b" / "fifo")
    (tree / "a" / "b" / "c").chmod(0)
    (tree / "a" / "b").chmod(0o500)
    link = tmp_path / "link"
    link.symlink_to(outside)
    remove_tree(tree, link, tmp_path / "never was")
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
    assert (outside / "kept").is_dir()
