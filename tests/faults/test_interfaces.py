"""Groups on hosts with two network interfaces, slow ones and dead ones: namespaces of the kernel."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clusters import ALONE_STEPS, Cluster, Worker, cluster, digest_alone
from tests.faults.namespaces import MISSING, Switch, available, switch
from tests.faults.trial import FAILURE_S, figures, slack_s

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

GROUPS = ("group-0", "group-1")
STEPS = 6
# In each step each group sends the 14 MB of its gradients: three seconds at this rate, and less than half of one on a
# busy machine without it.
WIDTH = ("--width", "200000")
RATE_BITS_PER_S = 40_000_000
HEARTBEATS = ("--heartbeat-timeout-ms", "2000")
# More than anything but a part of an exchange.
A_STEP_BYTES = 3_000_000


def run_over(interfaces: int, folder: Path) -> tuple[float, list[int], set[str | None]]:
    """Train over so many of two interfaces: seconds of the shortest step, bytes sent by each, digests."""
    folder.mkdir()
    with switch(("coordinator", *GROUPS), 2) as net, cluster(folder) as here:
        here.namespace, here.host = net.namespace, net.address("coordinator")
        here.start_coordinator("--insecure")
        for host in GROUPS:
            for interface in range(2):
                net.cap_sending(host, RATE_BITS_PER_S, interface)

        def flags(group: str) -> tuple[str, ...]:
            hosts = ",".join(net.address(group, interface) for interface in range(interfaces))
            return ("--steps", str(STEPS), *WIDTH, "--host", hosts)

        workers = here.start_together(GROUPS, flags)
        here.until_finished(*workers.values())
        ends_s = [event["t"] for event in workers["group-0"].steps()]
        sent = [net.sent_bytes("group-0", interface) for interface in range(2)]
        took_s = min(after - before for before, after in itertools.pairwise(ends_s))
        return took_s, sent, {worker.digest for worker in workers.values()}


@pytest.mark.long
def test_an_exchange_uses_all_interfaces_and_keeps_its_bits(tmp_path: Path) -> None:
    if not available():
        pytest.skip(MISSING)
    undisturbed = digest_alone(STEPS, *WIDTH)
    one_s, sent_by_one, digests = run_over(1, tmp_path / "one")
    assert digests == {undisturbed}
    both_s, sent_by_both, digests = run_over(2, tmp_path / "both")
    assert digests == {undisturbed}
    assert sent_by_one[1] < 1_000_000 < sent_by_one[0]
    assert sum(sent_by_both) == pytest.approx(sum(sent_by_one), rel=0.1)
    assert min(sent_by_both) > sum(sent_by_both) / 3
    assert one_s / both_s > 1.3, f"{one_s:.2f} s by one interface, {both_s:.2f} s by both"
    figures.info("%.2f s a step by one interface, %.2f s by both", one_s, both_s)


@pytest.mark.long
def test_a_group_in_one_network_meets_one_in_two(tmp_path: Path) -> None:
    """All of their threads use the network that both have."""
    if not available():
        pytest.skip(MISSING)
    with switch(("coordinator", *GROUPS), 2) as net, cluster(tmp_path) as here:
        here.namespace, here.host = net.namespace, net.address("coordinator")
        here.start_coordinator("--insecure")
        net.set_interface("group-0", 1, "down")
        hosts = {
            "group-0": net.address("group-0"),
            "group-1": f"{net.address('group-1')},{net.address('group-1', 1)}",
        }

        def flags(group: str) -> tuple[str, ...]:
            return ("--steps", str(STEPS), *WIDTH, "--exchange-threads", "2", "--host", hosts[group])

        workers = here.start_together(GROUPS, flags)
        here.until_finished(*workers.values())
        assert {worker.digest for worker in workers.values()} == {digest_alone(STEPS, *WIDTH)}
        assert {event["attempts"] for event in workers["group-1"].steps()} == {1}


class Job:
    """Two groups with two networks between them, and a third, `eth0`, to the coordinator."""

    def __init__(self, here: Cluster, net: Switch) -> None:
        self.here, self.net = here, net
        self.hurry = here.folder / "hurry"
        here.namespace, here.host = net.namespace, net.address("coordinator")
        here.start_coordinator("--insecure", *HEARTBEATS)
        self.workers = here.start_together(GROUPS, self.flags)
        self.until_both_get_on()

    def flags(self, group: str) -> tuple[str, ...]:
        hosts = ",".join(self.net.address(group, interface) for interface in (1, 2))
        pace = ("--pace", "0.1", "--hurry", str(self.hurry), "--failure-timeout-s", str(FAILURE_S))
        return ("--steps", str(ALONE_STEPS), *WIDTH, *pace, "--host", hosts)

    def until_both_get_on(self, steps: int = 3) -> None:
        """Wait until both groups have taken so many more steps together."""
        for group, worker in self.workers.items():
            before = self._together(worker)
            self.here.until(
                lambda worker=worker, before=before: self._together(worker) >= before + steps,
                f"{group} to take {steps} more steps with the other",
            )

    def _together(self, worker: Worker) -> int:
        return sum(len(event["members"]) == len(GROUPS) for event in worker.steps())

    def until_says(self, group: str, text: str) -> None:
        self.here.until(lambda: self.workers[group].says(text), f"{group} to say {text!r}")

    def sent_bytes(self, interface: int) -> int:
        """How much group-0 sends by an interface in some steps of both."""
        before = self.net.sent_bytes("group-0", interface)
        self.until_both_get_on()
        return self.net.sent_bytes("group-0", interface) - before

    def finish(self) -> None:
        self.hurry.touch()
        self.here.until_finished(*self.workers.values())
        assert {worker.digest for worker in self.workers.values()} == {digest_alone(ALONE_STEPS, *WIDTH)}

    def longest_step_s(self) -> float:
        """The longest time between two steps that both groups took together."""
        ends_s = [event["t"] for event in self.workers["group-0"].steps() if len(event["members"]) == 2]
        return max(after - before for before, after in itertools.pairwise(ends_s))


@contextmanager
def job_of_two_networks(folder: Path) -> Iterator[Job]:
    if not available():
        pytest.skip(MISSING)
    with switch(("coordinator", *GROUPS), 3) as net, cluster(folder) as here:
        yield Job(here, net)


def port_goes(net: Switch, interface: int, state: str) -> None:
    net.set_port("group-0", interface, state)


def interface_goes(net: Switch, interface: int, state: str) -> None:
    net.set_interface("group-0", interface, state)


def switch_goes(net: Switch, interface: int, state: str) -> None:
    for group in GROUPS:
        net.set_port(group, interface, state)


@pytest.mark.long
@pytest.mark.parametrize(
    ("dead", "fault"),
    [(2, port_goes), (1, interface_goes), (2, switch_goes)],
    ids=["cable", "first", "switch"],
)
def test_a_dead_interface_is_left_out_until_it_is_back(
    dead: int, fault: Callable[[Switch, int, str], None], tmp_path: Path
) -> None:
    with job_of_two_networks(tmp_path) as job:
        assert min(job.sent_bytes(1), job.sent_bytes(2)) > A_STEP_BYTES
        fault(job.net, dead, "down")
        job.until_says("group-0", f"network interface eth{dead} does not work")
        job.until_both_get_on()
        stood_s = job.longest_step_s()
        assert stood_s < 2 * FAILURE_S + slack_s()
        figures.info("%s: %.2f s between two steps of both", fault.__name__, stood_s)
        assert job.sent_bytes(3 - dead) > 2 * A_STEP_BYTES, "it carries all"
        fault(job.net, dead, "up")
        assert job.here.coordinator is not None
        job.here.coordinator.kill()  # and the groups join another
        job.here.coordinator.wait()
        job.here.start_coordinator("--insecure", *HEARTBEATS, port=job.here.port)
        job.until_says("group-0", f"network interface eth{dead} works again")
        job.until_both_get_on()
        assert min(job.sent_bytes(1), job.sent_bytes(2)) > A_STEP_BYTES
        job.finish()
        lines = job.workers["group-0"].log()
        assert lines.count("does not work") == lines.count("works again") == 1, lines
        assert f"So {job.net.address('group-0', dead)}:" in lines


@pytest.mark.long
def test_a_group_heals_from_one_whose_first_interface_is_dead(tmp_path: Path) -> None:
    """No exchange fails there: it trains alone when its interface dies."""
    with job_of_two_networks(tmp_path) as job:
        died = job.workers["group-1"]
        died.process.kill()
        job.here.until_dead(died)
        job.here.until_lost("group-1")
        interface_goes(job.net, 1, "down")
        job.workers["group-1"] = job.here.start("group-1", *job.flags("group-1"))
        job.until_both_get_on()
        assert job.workers["group-1"].says("heals to step")
        assert job.workers["group-0"].says("network interface eth1 does not work")
        job.finish()
