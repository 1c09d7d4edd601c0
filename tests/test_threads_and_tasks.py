"""Each thread and task that jaxft starts has a test of what happens when it fails. A new one must be listed here."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STARTS = {
    "Thread",
    "Timer",
    "ThreadPoolExecutor",
    "ProcessPoolExecutor",
    "create_task",
    "ensure_future",
    "run_coroutine_threadsafe",
    "run_in_executor",
    "to_thread",
    "start_new_thread",
    "start_thread",
    "submit",
}

# Where something is started, and the test that ends it by an error (or why its error cannot be lost).
KNOWN = {
    ("jaxft/_session/_loop.py", "LoopThread.start"): "tests/replica/test_session.py",
    ("jaxft/_session/_loop.py", "LoopThread.keep"): "tests/replica/test_session.py",
    ("jaxft/_session/_stream.py", "Stream._resolved"): "tests/replica/test_channel_target.py",
    ("jaxft/_replica/_membership.py", "_met_in_time.start"): "tests/processes/test_ranks.py",
    ("jaxft/_transport/_listener.py", "Listener.__init__"): "tests/transport/test_listener.py",
    ("jaxft/_transport/_listener.py", "Listener._admit_heal"): "tests/transport/test_listener.py",
    ("jaxft/_checkpoints/_checkpoints.py", "Checkpoints.save"): "tests/checkpoints/test_saving.py",
    ("jaxft/_checkpoints/_folder.py", "said_if_slow"): "it only logs",
    ("jaxft/_checkpoints/_sharing.py", "wait_for"): "tests/checkpoints/test_saving.py",
    ("jaxft/data/_prefetch.py", "Workers.submit"): "tests/data/test_prefetch.py",
    ("jaxft/data/_prefetch.py", "Prefetch.__call__"): "tests/data/test_prefetch.py",
    ("jaxft/_arrays/_device_sums.py", "adds_as_numpy"): "tests/arrays/test_device_sums.py",
    ("jaxft/_replica/_held_state.py", "HeldState._replace_results"): "tests/replica/test_results_ahead.py",
    ("jaxft/_heal/_store.py", "StateStore._start_copy"): "tests/heal/test_accelerator_state.py",
    ("jaxft/_base/_room.py", "start_thread.start"): "each call of it is listed here",
    ("jaxft/_transport/_threads.py", "Team.start"): "tests/exchange/test_strands.py",
    ("jaxft/_transport/_addresses.py", "targets_of"): "tests/transport/test_addresses.py",
    ("jaxft/_ranks/_link.py", "Link.start"): "tests/ranks/test_link.py",
    ("jaxft/_ranks/_link.py", "Link.expect_end"): "tests/ranks/test_link.py",
    ("protocol/jaxft_protocol/host/lines.py", "_started"): "tests/protocol/test_lines.py",
    ("jaxft/_ranks/_leader.py", "Leader._hear"): "tests/ranks/test_link.py",
    ("jaxft/_supervised/_beacon.py", "Beacon.__init__"): "tests/launch/test_beacon.py",
    ("jaxft/_supervised/_victim.py", "Doom._die_soon"): "tests/chaos/test_victim.py",
    ("jaxft/_supervised/_victim.py", "take_orders"): "tests/chaos/test_victim.py",
    ("launcher/jaxft_launch/storm/_network.py", "Network.__init__"): "tests/chaos/test_network.py",
    ("launcher/jaxft_launch/storm/_network.py", "Network._call"): "its result is awaited at once",
    (
        "launcher/jaxft_launch/storm/_network.py",
        "Network._accepter.accept",
    ): "tests/chaos/test_network.py",
    ("launcher/jaxft_launch/storm/_network.py", "Network._carry"): "a task group raises what its tasks raise",
    ("coordinator/jaxft_coordinator/stores/_file.py", "FileStore.open"): "an executor's results are awaited",
    (
        "coordinator/jaxft_coordinator/stores/_file.py",
        "FileStore._do",
    ): "an executor's results are awaited",
    (
        "coordinator/jaxft_coordinator/stores/_etcd.py",
        "EtcdStore._try_to_lead",
    ): "tests/stores/test_etcd_leaders.py",
    ("coordinator/jaxft_coordinator/_serve.py", "run"): "tests/coordinator/test_failing_parts.py",
    (
        "coordinator/jaxft_coordinator/shell/_leading.py",
        "Leading._until_lost",
    ): "tests/stores/test_etcd_leaders.py",
    (
        "coordinator/jaxft_coordinator/shell/_server.py",
        "Server.start",
    ): "tests/coordinator/test_failing_parts.py",
    (
        "coordinator/jaxft_coordinator/shell/_server.py",
        "Server._run",
    ): "tests/coordinator/test_failing_parts.py",
    (
        "coordinator/jaxft_coordinator/shell/_server.py",
        "Server._set_health",
    ): "tests/coordinator/test_failing_parts.py",
    (
        "coordinator/jaxft_coordinator/shell/_server.py",
        "Server.Session",
    ): "tests/coordinator/test_failing_parts.py",
    (
        "coordinator/jaxft_coordinator/http/_app.py",
        "_Answers.metrics",
    ): "its result is awaited at once",
    (
        "coordinator/jaxft_coordinator/http/_door.py",
        "Door.accept",
    ): "a task group raises what its tasks raise",
    (
        "coordinator/jaxft_coordinator/http/_door.py",
        "Door._accept",
    ): "tests/operate/test_handshakes.py",
    (
        "coordinator/jaxft_coordinator/http/serve.py",
        "HttpPort.start",
    ): "tests/operate/test_http.py",
    (
        "coordinator/jaxft_coordinator/http/serve.py",
        "HttpPort._run",
    ): "a task group raises what its tasks raise",
    (
        "coordinator/jaxft_coordinator/shell/_server.py",
        "Server._sweep_forever",
    ): "tests/coordinator/test_failing_parts.py",
}


def starts(path: Path) -> Iterator[str]:
    """The functions in a file that start a thread or a task, by their qualified names."""

    def visit(node: ast.AST, within: tuple[str, ...]) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            within = (*within, node.name)
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in STARTS:
                yield ".".join(within)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, within)

    return visit(ast.parse(path.read_text()), ())


def found() -> Counter[tuple[str, str]]:
    files = [
        path
        for folder in (
            "jaxft",
            "coordinator/jaxft_coordinator",
            "launcher/jaxft_launch",
            "protocol/jaxft_protocol",
        )
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    return Counter((str(path.relative_to(ROOT)), name) for path in files for name in starts(path))


def test_each_thread_and_task_is_known_here() -> None:
    unknown = set(found()) - set(KNOWN)
    assert not unknown, f"{sorted(unknown)}: test what happens when it fails, and list that test in KNOWN"
    gone = set(KNOWN) - set(found())
    assert not gone, f"{sorted(gone)} starts nothing any more: remove it from KNOWN"


@pytest.mark.parametrize("test", sorted({test for test in KNOWN.values() if test.startswith("tests/")}))
def test_the_tests_that_are_named_are_there(test: str) -> None:
    assert (ROOT / test).exists()
