"""One replica group of TorchFT that averages through its Manager, over gloo."""

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo

from benchmarks._worker import serve

TIMEOUT = timedelta(seconds=60)
# Like its DistributedDataParallel: gradients are packed into buckets of this many bytes, each averaged as a whole.
BUCKET_BYTES = 25 << 20
# This many elements of each result are checked, and all of the first: checking all takes longer than the exchange.
CHECKED = 1 << 20


class Group:
    def join(self, me: int, members: int, lighthouse: str) -> None:
        self._me, self._members = me, members
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=lambda _: None,
            state_dict=dict,
            min_replica_size=members,
            use_async_quorum=False,
            init_sync=False,
            timeout=TIMEOUT,
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"group-{me}",
            hostname="localhost",
        )

    def prepare(self, sizes: list[int], dtype: str) -> None:
        """Make this group's gradients: `sizes` elements each, packed into buckets."""
        self._sizes = sizes
        # Each member's gradients are the same random numbers, as many times as its place: the mean is known at once.
        numbers = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(0))
        self._mine = ((self._me + 1) * numbers).to(getattr(torch, dtype))
        self._grads = torch.empty_like(self._mine)  # an average overwrites its input
        self._wanted = (self._members + 1) / 2 * numbers
        self._stride = 1

    def exchange(self, count: int) -> dict[str, Any]:
        spans: list[tuple[float, float]] = []
        cpu_s: list[float] = []
        for _ in range(count):
            self._manager.start_quorum()
            self._manager.wait_quorum()
            grads = self._grads.copy_(self._mine)
            began_cpu_s, began_s = time.process_time(), time.monotonic()
            works = [self._manager.allreduce(bucket) for bucket in self._buckets(grads)]
            for work in works:
                work.wait()
            spans.append((began_s, time.monotonic()))
            cpu_s.append(time.process_time() - began_cpu_s)
            if self._manager.errored() is not None:
                raise AssertionError(f"the exchange failed: {self._manager.errored()}")
            got, wanted = (each[:: self._stride] for each in (grads, self._wanted))
            if not torch.allclose(got.float(), wanted, rtol=2e-2, atol=2e-2):
                raise AssertionError("the exchange computed a wrong sum")
            self._stride = max(1, len(grads) // CHECKED)
        return {"spans": spans, "cpu_s": cpu_s}

    def _buckets(self, grads: torch.Tensor) -> list[torch.Tensor]:
        """Whole leaves, as many as fit."""
        bounds, begin, end = [], 0, 0
        most = BUCKET_BYTES // grads.element_size()
        for size in self._sizes:
            if end > begin and end + size - begin > most:
                bounds.append((begin, end))
                begin = end
            end += size
        bounds.append((begin, end))
        return [grads[begin:end] for begin, end in bounds]


if __name__ == "__main__":
    serve(Group())
