"""The rest of a host's memory, and of a container's."""

from pathlib import Path

from jaxft._base._room import available_bytes


def test_the_memory_that_is_left_to_a_process(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    cgroup.mkdir()
    assert available_bytes(meminfo, cgroup) is None
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:       7 kB\n")
    assert available_bytes(meminfo, cgroup) == 7 * 1024
    for limit, left in (("max", 7 * 1024), ("6000", 6000 - 5000 + 300), ("90000", 7 * 1024)):
        (cgroup / "memory.max").write_text(f"{limit}\n")
        (cgroup / "memory.current").write_text("5000\n")
        (cgroup / "memory.stat").write_text("anon 4000\ninactive_file 300\n")
        assert available_bytes(meminfo, cgroup) == left
    meminfo.write_text("nothing of use\n")
    assert available_bytes(meminfo, cgroup) == 90000 - 5000 + 300
