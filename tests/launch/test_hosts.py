"""`jaxft launch --hosts`: launchers on other hosts. Here the remote shell is one that stays on this machine."""

import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jaxft_protocol.credentials import job_key, read_secret

from jaxft._supervised._phase_file import DRAINED, read_word
from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.processes._ranks import free_ports
from jaxft_launch.supervise import _hosts
from jaxft_launch.supervise._hosts import (
    Part,
    check_reachable,
    http_for,
    meeting_of,
    own_name,
    parts_of,
    passed_on,
)
from jaxft_launch.supervise._options import LaunchOptions, check_options
from jaxft_launch.supervise._remote_shell import ALL_DRAINED, tell_drained
from jaxft_launch.supervise.launch import remote_members
from tests import patience
from tests.launch.launches import FAKE, Launch, fakes, is_alive, launch

# A shell is given its host as $0 and the command as $1.
HERE = "sh -c 'exec sh -c \"$1\"'"
pytestmark = pytest.mark.timeout(240)


# ---- which group runs where ----


def test_each_group_has_a_host_or_several_or_a_share_of_one() -> None:
    groups = ["group-0", "group-1"]
    assert parts_of(groups, ["a", "b"]) == [Part(group="group-0", host="a"), Part(group="group-1", host="b")]
    four = parts_of(groups, ["a", "b", "c", "d"])
    assert [(one.group, one.host, one.nodes, one.node) for one in four] == [
        ("group-0", "a", 2, 0),
        ("group-0", "b", 2, 1),
        ("group-1", "c", 2, 0),
        ("group-1", "d", 2, 1),
    ]
    shared = parts_of(groups, ["a"])
    assert [(one.group, one.host, one.share, one.shares) for one in shared] == [
        ("group-0", "a", 0, 2),
        ("group-1", "a", 1, 2),
    ]


@pytest.mark.parametrize(
    ("groups", "hosts", "says"),
    [
        (2, "abc", "3 hosts, which 2 groups"),
        (3, "ab", "2 hosts, which 3 groups"),
        (2, "aba", "names a twice"),
    ],
)
def test_hosts_that_cannot_be_shared_are_an_error(groups: int, hosts: str, says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        parts_of([f"group-{number}" for number in range(groups)], list(hosts))


def test_the_processes_of_a_group_meet_at_one_port_of_its_first_host() -> None:
    parts = parts_of(["group-0", "group-1"], ["me@a", "me@b", "me@c", "me@d"])
    meetings = [meeting_of(part, parts) for part in parts]
    assert meetings[0] == meetings[1]
    assert meetings[0].startswith("a:")
    assert meetings[2] == meetings[3]
    assert meetings[2].startswith("c:")
    parts = parts_of(["group-0"], ["me@::1", "::2"])
    assert meeting_of(parts[0], parts).startswith("[::1]:")


def test_a_coordinator_that_the_hosts_cannot_reach_is_an_error() -> None:
    check_reachable("head:29510", ["a", "b"])
    check_reachable("localhost:29510", ["localhost", "127.0.0.2"])
    check_reachable("[::1]:29510", ["me@localhost", "me@127.0.0.1", "::1"])
    with pytest.raises(LaunchError, match="is this machine for each host"):
        check_reachable("127.0.0.1:29510", ["a", "localhost"])


def test_of_several_hosts_one_may_be_this_machine() -> None:
    """Its own name then leads to an address that only it can use."""
    assert own_name(["localhost", "127.0.0.2"]) == "127.0.0.1"
    assert own_name(["no-such-host.invalid"]) == socket.gethostname()
    assert own_name(["localhost", "no-such-host.invalid"]) == socket.gethostname()


def test_the_address_is_that_of_the_route_to_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {"here": "127.0.0.1", "there": "10.0.0.7", "me": "127.0.1.1"}
    monkeypatch.setattr(_hosts, "_route_to", lambda host: routes.get(host, ""))
    assert own_name(["here", "me@there"]) == "10.0.0.7"
    assert own_name(["here", "me"]) == "127.0.0.1"
    assert http_for(["here", "there"], "[::]:29511", needed=True) == "http://10.0.0.7:29511"
    assert http_for(["there"], "head:29511", needed=True) == "http://head:29511"
    assert http_for(["localhost"], "localhost:29511", needed=True) == "http://localhost:29511"
    assert http_for(["there"], "localhost:29511", needed=False) == ""
    with pytest.raises(LaunchError, match=r"rules of --health are checked on each host.*'\[::\]:29511'"):
        http_for(["there"], "localhost:29511", needed=True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hosts": "a", "group": 1}, "--group does not go with --hosts"),
        ({"hosts": "a", "nodes": 2}, "--nodes does not go with --hosts"),
        ({"hosts": "a", "rungs": "2,1", "probe": "true"}, "--rungs does not go with --hosts"),
        ({"hosts": "a", "remote_shell": "no-such-shell -x"}, "there is no program 'no-such-shell'"),
        ({"hosts": "a", "remote_shell": "ssh '"}, "is no command"),
        ({"hosts": "a", "devices": "0,1,2", "groups": 2}, "which its 2 processes cannot share"),
        ({"hosts": ""}, "--hosts names no host"),
        ({"hosts": " , "}, "--hosts names no host"),
        ({"hosts": "-oProxyCommand=x"}, "which is no host"),
        ({"hosts": "ssh://me@a:22"}, "which is no host"),
        ({"hosts": "a b"}, "which is no host"),
        ({"nodes": 0}, "--nodes must be at least 1"),
        ({"nodes": 2, "node": 2}, "--node must be a number from 0 to 1"),
        ({"nodes": 2, "meet": "a:1"}, "it needs --group"),
        ({"nodes": 2, "group": 0}, "and --meet HOST:PORT"),
        ({"nodes": 2, "group": 0, "meet": "a"}, "--meet must be HOST:PORT"),
        ({"nodes": 2, "group": 0, "meet": "a:70000"}, "--meet must be HOST:PORT"),
        ({"nodes": 2, "group": 0, "meet": "a:1", "rungs": "1"}, "does not go with --nodes"),
    ],
)
def test_options_that_do_not_fit_together(options: dict[str, object], says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        check_options(LaunchOptions(**{"remote_shell": "sh -c", **options}))  # pyright: ignore[reportArgumentType]


# ---- what the other launchers get ----


def test_each_launcher_is_told_its_part_and_no_command_line_has_the_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAXFT_TOKEN", "s3cret")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_x='two words'")
    monkeypatch.setenv("HOME_OF_MINE", "stays")
    monkeypatch.setenv("JAXFT_HOST", "this-machine")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    options = LaunchOptions(
        groups=1, spares=1, nproc=2, hosts="a,b,c,d", devices="0,1", remote_shell="sh -c", warm=False
    )
    members = remote_members(
        options, "head:1", tmp_path, ["python", "my train.py", "--to", "{group}"], "", ""
    )
    assert [one.name for one in members] == ["group-0@a", "group-0@b", "spare-0@c", "spare-0@d"]
    text = members[1].command[-1]
    words = shlex.split(text)
    assert members[1].command[-4:-1] == ("sh", "-c", "b")
    assert words[:4] == ["cd", str(Path.cwd()), "&&", "exec"]
    flags = words[words.index("--attached") : words.index("--")]
    said = dict(zip(flags[1:-1:2], flags[2::2], strict=True))
    assert flags[-1] == "--no-warm"
    assert said["--meet"].startswith("a:")
    del said["--meet"]
    assert said == {
        "--group": "0",
        "--nproc": "2",
        "--nodes": "2",
        "--node": "1",
        "--coordinator": "head:1",
        "--devices": "0,1",
        "--max-restarts": "10",
        "--drain-timeout-s": "60.0",
        "--folder": str(tmp_path / "group-0@b"),
    }
    assert words[words.index("--") + 1 :] == ["python", "my train.py", "--to", "{group}"]
    assert "XLA_FLAGS=--xla_cpu_x='two words'" in words
    assert f"JAX_COMPILATION_CACHE_DIR={tmp_path}/compiled/group-0" in words
    assert "JAXFT_SPARE=1" in shlex.split(members[2].command[-1])
    assert "JAXFT_SPARE=1" not in words
    assert "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0" in words
    assert "HOME_OF_MINE" not in text
    assert "this-machine" not in text
    assert not any("s3cret" in word for one in members for word in one.command)
    assert "JAXFT_TOKEN" not in passed_on(os.environ)


def test_other_hosts_get_the_certificates_for_a_coordinator_elsewhere_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAXFT_TLS_CA", "/shared/ca.pem")
    options = LaunchOptions(groups=1, hosts="a", remote_shell="sh -c")
    for token, said in (("", "JAXFT_TLS_CA=/shared/ca.pem"), ("s3cret", "JAXFT_TLS_CA=")):
        [member] = remote_members(options, "head:1", tmp_path, ["true"], token, "")
        assert said in shlex.split(member.command[-1]), token


# ---- real launchers ----


def hosts(*names: str) -> tuple[str, ...]:
    given = ("--coordinator", "nowhere:1", "--remote-shell", HERE, "--groups", str(len(names)))
    return (*given, "--hosts", ",".join(names))


def until_file(running: Launch, name: str) -> Path:
    running.until_file(name)
    return running.file(name)


@pytest.mark.long
def test_groups_on_other_hosts_are_done_and_say_so(folder: Path) -> None:
    with fakes(folder, *hosts("a", "b"), lives=("say:{group} steps:3 exit:0",)) as running:
        assert running.status() == 0, running.text()
    assert "[group-0@a]" in running.text()
    assert "[group-0] group-0" in running.text()
    assert "[group-1] group-1" in running.text()
    assert {event["group"] for event in running.events("group_ended")} == {"group-0@a", "group-1@b"}


def test_a_group_of_two_hosts_has_the_ranks_of_both(folder: Path) -> None:
    words = (*hosts("a", "b"), "--groups", "1", "--nproc", "2")
    life = "env:JAXFT_RANK env:JAXFT_NPROC env:JAX_COORDINATOR_ADDRESS say:{rank} exit:0"
    with fakes(folder, *words, lives=(life,)) as running:
        assert running.status() == 0, running.text()
    logs = {rank: (folder / f"group-0@{'ab'[rank // 2]}" / f"group-0.0.{rank}.log") for rank in range(4)}
    meetings = set[str]()
    for rank, log in logs.items():
        own, nproc, meeting, filled = log.read_text().split()
        assert (own, nproc, filled) == (f"JAXFT_RANK={rank}", "JAXFT_NPROC=4", str(rank))
        meetings.add(meeting)
    assert len(meetings) == 1


@pytest.mark.parametrize(("status", "ends"), [(75, 75), (78, 78), (3, 3), (ALL_DRAINED, 1)])
def test_what_the_other_launcher_ends_with_is_understood(folder: Path, status: int, ends: int) -> None:
    words = (*hosts("a"), "--max-restarts", "0")
    with fakes(folder, *words, lives=(f"exit:{status}",)) as running:
        assert running.status() == ends, running.text()


@pytest.mark.long
def test_a_group_is_given_up_with_all_of_its_hosts(folder: Path) -> None:
    words = (*hosts("a", "b"), "--groups", "1")
    with fakes(folder, *words, lives=("0=mute 1=exit:3",)) as running:
        assert running.status() == 3, running.text()
    assert "group-0@a ends, since group-0 cannot go on without its other hosts" in running.text()


@pytest.mark.long
def test_a_drain_reaches_the_programs(folder: Path) -> None:
    with fakes(folder, *hosts("a", "b"), lives=("leave:75 steps:1 made:up mute",)) as running:
        for part in ("group-0@a", "group-1@b"):
            until_file(running, f"{part}/up")
        running.process.send_signal(signal.SIGTERM)
        assert running.status() == 75, running.text()
    assert running.text().count("got SIGTERM: each group finishes its step") == 3  # here and on each host


@pytest.mark.long
def test_a_group_that_is_drained_leaves_the_others_running(folder: Path) -> None:
    lives = ("steps:1 made:up group-0=gate:end group-0=steps:9 group-0=exit:0 drains:5 mute",)
    with fakes(folder, *hosts("a", "b"), "--deadlines", "end=1", lives=lives) as running:
        for part in ("group-0@a", "group-1@b"):
            until_file(running, f"{part}/up")
        (program,) = map(int, (folder / "group-1@b" / "group-1.0.starts").read_text().split())
        os.kill(program, signal.SIGTERM)
        running.until("group_ended")
        (folder / "group-0@a" / "end").touch()
        assert running.status() == 0, running.text()
    ends = [(event["group"], event["ending"]) for event in running.events("group_ended")]
    assert ends == [("group-1@b", "drained"), ("group-0@a", "done")]
    assert "group-1@b was drained\n" in running.text()


def test_a_lost_connection_ends_what_runs_there_and_it_is_started_again(folder: Path) -> None:
    with fakes(folder, *hosts("a"), lives=("steps:1 made:up mute", "exit:0")) as running:
        until_file(running, "group-0@a/up")
        (program,) = map(int, (folder / "group-0@a" / "group-0.0.starts").read_text().split())
        (shell,) = children_of(running.pids("group-0@a")[0])
        os.kill(shell, signal.SIGKILL)
        assert running.status() == 0, running.text()
        patience.until(lambda: not is_alive(program), "the program to end")
    assert "the connection to a ended, or could not be made" in running.text()
    assert [event["ending"] for event in running.events("group_ended")] == ["again", "done"]


def test_no_process_on_another_host_outlives_a_launcher_that_is_killed(folder: Path) -> None:
    with fakes(folder, *hosts("a"), "--nproc", "2", lives=("deaf made:up mute",)) as running:
        until_file(running, "group-0@a/up")
        starts = [folder / "group-0@a" / f"group-0.{rank}.starts" for rank in range(2)]
        patience.until(lambda: all(file.exists() and file.read_text() for file in starts), "both to start")
        running.process.kill()
        pids = [int(file.read_text()) for file in starts]
        patience.until(lambda: not any(map(is_alive, pids)), "the programs to end", context=running.text)


def test_the_token_goes_through_the_shell_unseen(folder: Path) -> None:
    life = "env:JAXFT_TOKEN made:up gate:seen exit:0"
    with fakes(folder, *hosts("a"), lives=(life,), environment={"JAXFT_TOKEN": "s3cret"}) as running:
        until_file(running, "group-0@a/up")
        shown = [
            file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.parent.name != "self"
        ]
        (folder / "group-0@a" / "seen").touch()
        assert running.status() == 0, running.text()
    assert "JAXFT_TOKEN=s3cret" in (folder / "group-0@a" / "group-0.0.log").read_text()
    assert not any(b"s3cret" in one for one in shown)


@pytest.mark.long
def test_a_coordinator_of_our_own_admits_only_who_has_the_token_of_the_job(folder: Path) -> None:
    words = ("--hosts", "127.0.0.1,127.0.0.2", "--remote-shell", HERE, "--groups", "2", "--job", "toy")
    lives = ("env:JAXFT_COORDINATOR env:JAXFT_TOKEN exit:0",)
    with launch(folder, *words, "--no-warm", program=(*FAKE, *lives)) as running:
        assert running.status() == 0, running.text()
    secret = folder / "secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    said = (folder / "group-0@127.0.0.1" / "group-0.0.log").read_text().split()
    port = running.events("coordinator_started")[0]["address"].rpartition(":")[2]
    token = job_key(read_secret(secret), "toy").hex()
    assert said == [f"JAXFT_COORDINATOR=127.0.0.1:{port}", f"JAXFT_TOKEN={token}"]
    assert "admits every client" not in (folder / "coordinator.log").read_text()


def test_a_launcher_that_nobody_has_attached_says_so(folder: Path) -> None:
    with fakes(folder, "--attached", "--group", "0", lives=("exit:0",)) as running:
        assert running.status() not in (0, 75), running.text()
    assert "--attached is for a launcher that `jaxft launch --hosts` starts" in running.text()


def test_orders_that_cannot_be_read_end_the_launcher_too(folder: Path) -> None:
    program = (
        "import io, signal\n"
        "from jaxft._launch import _attached\n"
        "class Orders(io.BytesIO):\n"
        "    def readline(self, size=-1):\n"
        "        if line := super().readline(size): return line\n"
        "        raise OSError('the other end is gone')\n"
        "    def fileno(self): return 0\n"
        "_attached.attach(Orders(b'a token\\n'))\n"
        "signal.pause()\n"
    )
    command = [sys.executable, "-c", program]
    ended = patience.run(command, capture_output=True, text=True)
    assert ended.returncode in (-signal.SIGTERM, -signal.SIGHUP), ended.stderr


def test_silence_ends_the_launcher_and_lines_that_say_nothing_do_not() -> None:
    program = (
        "import os, signal, sys\n"
        "from jaxft._launch import _attached\n"
        "_attached.SILENCE_S = float(sys.argv[1])\n"
        "_attached.attach(open(0, 'rb', buffering=0, closefd=False))\n"
        "os.write(1, b'attached')\n"
        "signal.pause()\n"
    )
    for silence_s, lines in ((0.01, 0), (1e6, 3)):
        command = [sys.executable, "-c", program, str(silence_s)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"a token\n")
            process.stdin.flush()
            if lines:
                assert process.stdout.read(8) == b"attached"
                process.stdin.write(b"\n" * lines)
                process.stdin.write(b"drain\n")  # it has obeyed nothing else before
                process.stdin.flush()
            assert patience.wait(process) == -signal.SIGTERM


def test_the_remote_shell_says_that_it_is_still_there(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from jaxft._launch import _remote_shell\n"
        "_remote_shell.STILL_HERE_EVERY_S = 0.01\n"
        "sys.exit(_remote_shell.main())\n"
    )
    # A line `drain` never comes: the shell ends after the token and three empty lines.
    there = 'read token; for i in 1 2 3; do read line; test -z "$line" || exit 3; done; exit 0'
    command = [sys.executable, "-c", program, "sh", "-c", there, "host", "command"]
    ended = patience.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("folder", [".", "removed", "removed/with/its/parents"])
def test_what_the_remote_shell_writes_of_a_drain_is_a_phase(tmp_path: Path, folder: str) -> None:
    """Its folder is empty until then, and may have been removed."""
    tell_drained(tmp_path / folder / "phase")
    word = read_word(tmp_path / folder / "phase")
    assert word is not None
    assert word.phase == DRAINED


def children_of(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


# ---- a real ssh ----


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[str]:
    """The command of a client that may log in to a server of our own."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if server is None or shutil.which("ssh-keygen") is None:
        pytest.skip("needs sshd and ssh-keygen (openssh-server)")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it, empty
    for name in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        patience.run(words, check=True, capture_output=True)
    (port,) = free_ports(1)
    settings = {
        "ListenAddress": "127.0.0.1",
        "HostKey": tmp_path / "host",
        "AuthorizedKeysFile": tmp_path / "user.pub",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "UsePAM": "no",
        "StrictModes": "no",
        "PidFile": "none",
    }
    config = tmp_path / "sshd_config"
    config.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    with (tmp_path / "sshd.log").open("wb") as log:
        words = [server, "-D", "-e", "-f", str(config), "-p", str(port)]
        process = subprocess.Popen(words, stdout=log, stderr=log, process_group=0)
    try:
        patience.until(
            lambda: "Server listening" in (tmp_path / "sshd.log").read_text() or process.poll() is not None,
            "sshd to listen",
        )
        if process.poll() is not None:
            pytest.skip(f"sshd does not run here: {(tmp_path / 'sshd.log').read_text()}")
        known = f"-o UserKnownHostsFile={tmp_path}/known -o StrictHostKeyChecking=accept-new"
        yield f"ssh -o BatchMode=yes -p {port} -i {tmp_path}/user -o IdentitiesOnly=yes {known}"
    finally:
        process.terminate()
        process.wait()


def test_over_ssh_a_job_is_drained_and_nothing_outlives_its_launcher(folder: Path, ssh: str) -> None:
    over_ssh = ("--coordinator", "nowhere:1", "--hosts", "127.0.0.1", "--remote-shell", ssh)
    life = "leave:0 env:JAXFT_TOKEN steps:1 made:up mute"
    with fakes(folder, *over_ssh, lives=(life,), environment={"JAXFT_TOKEN": "s3cret"}) as running:
        until_file(running, "group-0@127.0.0.1/up")
        running.process.send_signal(signal.SIGTERM)
        assert running.status() == 0, running.text()
    assert "got SIGTERM: each group finishes its step" in running.text()
    assert "JAXFT_TOKEN=s3cret" in (folder / "group-0@127.0.0.1" / "group-0.0.log").read_text()
    again = folder.with_name("again")
    with fakes(again, *over_ssh, lives=("deaf made:up mute",)) as running:
        until_file(running, "group-0@127.0.0.1/up")
        running.process.kill()
        (pid,) = map(int, (again / "group-0@127.0.0.1" / "group-0.0.starts").read_text().split())
        patience.until(lambda: not is_alive(pid), "the program to end", context=running.text)
