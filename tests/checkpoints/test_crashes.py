"""The machine stops in the middle of a save, and its disk forgets all that it may forget.

A disk promises the bytes of a file after its fsync, and the names in a folder after the folder's fsync. Anything
else may be there after a crash or not. So at every call that names, removes or syncs something, three images of the
folder are made: of a disk that keeps only its promises; of a disk that keeps every change of names at once, but no
bytes that were not synced (as ext4 did when it became known for empty files after a rename); and of a disk that
removes at once and adds late. In each of them a whole checkpoint must be found.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxft._checkpoints import Checkpoints

from .states import PATIENCE_S, of_optax, restored, same, save, saved

Image = dict[str, bytes]  # the files, by path


class Disk:
    """Watches a folder, and knows its contents after a crash."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bytes: dict[int, bytes] = {}  # by inode, as synced last
        self.names: dict[int, dict[str, int]] = {}  # by a folder's inode, as synced last
        self.images: list[Image] = []
        self.open: dict[int, int] = {}  # a descriptor for each, so that no inode's number is used twice
        for folder, _, files in os.walk(root):
            self.synced(Path(folder))
            for name in files:
                self.synced(Path(folder, name))
        # The folder itself is there to stay.
        self.root_inode = root.stat().st_ino

    def synced(self, path: Path) -> None:
        if path.is_dir():
            self.names[self.inode(path)] = _names(path)
        elif path.is_file():
            self.bytes[self.inode(path)] = path.read_bytes()

    def inode(self, path: Path) -> int:
        number = path.stat().st_ino
        if number not in self.open:
            self.open[number] = os.open(path, os.O_RDONLY)
        return number

    def close(self) -> None:
        for descriptor in self.open.values():
            os.close(descriptor)

    def crash(self) -> None:
        """Note what three kinds of disk would have kept."""
        for folder, _, files in os.walk(self.root):
            for name in files:
                self.inode(Path(folder, name))
        now = {self.inode(folder): _names(folder) for folder in _folders(self.root)}
        late = {
            inode: {name: file for name, file in self.names.get(inode, {}).items() if names.get(name) == file}
            for inode, names in now.items()
        }
        self.images += [self._image(names) for names in (self.names, now, late)]

    def _image(self, names: dict[int, dict[str, int]]) -> Image:
        image: Image = {}

        def walk(inode: int, path: str) -> None:
            for name, child in names.get(inode, {}).items():
                if child in self.folders:
                    walk(child, f"{path}{name}/")
                else:
                    image[f"{path}{name}"] = self.bytes.get(child, b"")

        self.folders = {*self.names, *names}
        walk(self.root_inode, "")
        return image


def _names(folder: Path) -> dict[str, int]:
    return {entry.name: entry.inode() for entry in os.scandir(folder)}


def _folders(root: Path) -> Iterator[Path]:
    yield root
    for folder, names, _ in os.walk(root):
        yield from (Path(folder, name) for name in names)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Disk]]:
    """Watch a folder from now on."""
    disks: list[Disk] = []

    def begin(root: Path) -> Disk:
        disk = Disk(root)
        disks.append(disk)

        def wrap(name: str) -> None:
            original: Any = getattr(os, name)

            def wrapped(*arguments: Any, **options: Any) -> Any:
                disk.crash()
                result = original(*arguments, **options)
                if name == "fsync":
                    disk.synced(Path(os.readlink(f"/proc/self/fd/{arguments[0]}")))
                disk.crash()
                return result

            monkeypatch.setattr(os, name, wrapped)

        for name in ("fsync", "rename", "unlink", "rmdir"):
            wrap(name)
        return disk

    yield begin
    monkeypatch.undo()
    for disk in disks:
        disk.close()


def whole(folder: Path) -> dict[int, Image]:
    """The files of each complete checkpoint."""
    return {
        int(step.name): {
            str(path.relative_to(step)): path.read_bytes() for path in step.rglob("*") if path.is_file()
        }
        for step in folder.iterdir()
        if step.name.isdigit()
    }


def steps_in(image: Image) -> dict[int, Image]:
    found: dict[int, Image] = {}
    for path, content in image.items():
        step, _, rest = path.partition("/")
        if step.isdigit():
            found.setdefault(int(step), {})[rest] = content
    return found


@pytest.mark.parametrize("keep", [1, pytest.param(2, marks=pytest.mark.long)])
def test_after_a_crash_at_any_moment_there_is_a_whole_checkpoint(
    keep: int, tmp_path: Path, watch: Callable[[Path], Disk]
) -> None:
    folder = tmp_path / "saved"
    checkpoints = saved(folder, 5, keep=keep)
    good = whole(folder)
    disk = watch(folder)
    for step in (10, 15):
        checkpoints.save(step, of_optax(step), job="docs", history=7)
        checkpoints.finish(PATIENCE_S)
        good |= whole(folder)
    assert sorted(good) == [5, 10, 15]
    assert len(disk.images) > 20
    newest = 5
    for image in disk.images:
        found = steps_in(image)
        # A restore takes the newest that has the bytes with which it was saved.
        intact = max((step for step, files in found.items() if files == good[step]), default=0)
        assert intact >= newest, f"steps {sorted(found)} are there, of which {intact} is whole; {newest} was"
        newest = max(newest, intact if _is_announced(disk, image, intact) else newest)
    assert newest == 15


def test_a_first_checkpoint_stays_in_folders_that_the_save_has_made(
    tmp_path: Path, watch: Callable[[Path], Disk]
) -> None:
    disk = watch(tmp_path)
    saved(tmp_path / "runs" / "2026" / "saved", 5)
    disk.crash()
    for image in disk.images[-3:]:
        names = {path.rpartition("/")[2] for path in image if path.startswith("runs/2026/saved/5/")}
        assert "_CHECKPOINT_METADATA" in names


def _is_announced(disk: Disk, image: Image, step: int) -> bool:
    """Whether all three disks agree that a step is there: then it stays."""
    place = next(index for index, other in enumerate(disk.images) if other is image) // 3 * 3
    return all(step in steps_in(each) for each in disk.images[place : place + 3])


def test_what_a_disk_has_kept_is_restored(tmp_path: Path, watch: Callable[[Path], Disk]) -> None:
    folder, after = tmp_path / "saved", tmp_path / "after"
    checkpoints = saved(folder, 5, keep=1)
    disk = watch(folder)
    save(checkpoints, 10)
    images: list[Image] = []
    for image in disk.images:
        if image not in images:
            images.append(image)
    for image in images:
        shutil.rmtree(after, ignore_errors=True)
        for path, content in image.items():
            (after / path).parent.mkdir(parents=True, exist_ok=True)
            (after / path).write_bytes(content)
        found = restored(Checkpoints(after))
        assert same(found.state, of_optax(found.step))
