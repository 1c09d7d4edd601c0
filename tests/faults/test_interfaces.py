"""Groups on hosts with two network interfaces, each of which lets only so much through: namespaces of the kernel."""

import itertools
import statistics
from pathlib import Path

import pytest

from tests.clusters import cluster, digest_alone
from tests.faults.namespaces import MISSING, available, switch
from tests.faults.trial import figures

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

GROUPS = ("group-0", "group-1")
STEPS = 6
# In each step each group sends the 14 MB of its gradients: more than a second at this rate, however busy the machine.
WIDTH = ("--width", "200000")
RATE_BITS_PER_S = 100_000_000


def run_over(interfaces: int, folder: Path) -> tuple[float, list[int], set[str | None]]:
    """Train over so many of two interfaces: seconds for a step, the bytes sent by each interface, digests."""
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
        took_s = statistics.median(after - before for before, after in itertools.pairwise(ends_s))
        return took_s, sent, {worker.digest for worker in workers.values()}


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
