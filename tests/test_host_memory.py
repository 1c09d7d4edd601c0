"""What is left of a host's memory, and of a container's."""

from pathlib import Path

from jaxft._base._host_memory import available_bytes
from jaxft_launch.check import _machine_checks
from jaxft_launch.check._sources import free_memory_gb


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


def test_doctor_and_health_know_the_limit_of_their_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable:   8000000 kB\n")
    for name, text in (("max", "2000000000"), ("current", "500000000"), ("stat", "inactive_file 0")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert free_memory_gb(meminfo, tmp_path) == (1.5, "1.5 GB of host memory are available")
    levels = [next(iter(_machine_checks.memory(size, meminfo, tmp_path))).level for size in (1.5, 1.6)]
    assert levels == ["ok", "fail"]
