"""A store in etcd, for coordinators on several machines that stand by for each other.

    PREFIX/leader       who leads, and under which term; bound to a lease, so it disappears with its writer
    PREFIX/term         the highest term so far
    PREFIX/written      the token of the last append
    PREFIX/saved/JOB    the last `Saved` of a job
    PREFIX/moved/JOB    the last `Moved` since then, if there is one

To lead is to have created `leader`. Everything else is written in transactions that compare the revision at which
`leader` was created: etcd itself refuses a coordinator that was frozen or cut off for longer than its lease, or
wrongly believes that it leads. No clock decides about durability; clocks only decide when to give up.

Every append also compares and sets `written`. A request that timed out here may still reach etcd, even after later
ones; by then `written` has changed, and the request does nothing. And an append may be resent until it is answered:
if `written` already is its token, an earlier copy has arrived. If `written` is older than the last acknowledged
append, etcd was restored from a snapshot: this coordinator stops leading, and begins again from that.
"""

import asyncio
import contextlib
import errno
import logging
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxft_protocol.coordinator import durable
from jaxft_protocol.coordinator.job import Record, Saved
from jaxft_protocol.host.tls import Pem

from jaxft_coordinator.stores import records
from jaxft_coordinator.stores._etcd_link import EtcdFailed, Link, client_library, parsed
from jaxft_coordinator.stores._keys import jobs_in, led_in, parts, size
from jaxft_coordinator.stores._store import Opened, StoreDamaged, StoreLost, Wait, too_big

_log = logging.getLogger("jaxft_coordinator")

# etcd's own leader elections take 1 to 3 s; a shorter lease would change our leader whenever etcd changes its own.
LEASE_TTL_S = 5
_RETRY_S = 0.2
# A standby checks again after this, in case its watch has died silently.
_WATCH_S = 2.0


class EtcdStore:
    """Keeps records in etcd under `prefix`, for any number of coordinators of which one leads.

        endpoints: host:port of each member of the etcd cluster.
        prefix: the prefix of all keys. Coordinators with the same prefix stand by for each other.
        ttl_s: how long an unresponsive leader still leads, in whole seconds. etcd may grant more.
        tls: the CA to trust, and our certificate, whose common name is the user at etcd. Without it, and with an
            endpoint that begins with https://, gRPC's default authorities are trusted.

    Raises:
        ImportError: aetcd is not installed.
        ValueError: an endpoint is not host:port, or only some of them are https://.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        prefix: str = "jaxft",
        *,
        ttl_s: int = LEASE_TTL_S,
        tls: Pem | None = None,
    ) -> None:
        if not endpoints or ttl_s < 1 or not prefix.strip("/"):
            raise ValueError(
                f"the etcd store needs at least one endpoint, not {list(endpoints)}, a prefix, not {prefix!r}, and a "
                f"lease of at least 1 s, not {ttl_s}"
            )
        if tls is None and any(endpoint.strip().startswith("https://") for endpoint in endpoints):
            tls = Pem()
        self._endpoints = [parsed(endpoint, tls=tls is not None) for endpoint in endpoints]
        self._prefix = prefix.strip("/")
        self._ttl_s = ttl_s
        self._names = client_library().transactions
        # Two connections, so that a hanging request does not delay the renewal of the lease.
        self._requests = Link(self._endpoints, tls)
        self._renewals = Link(self._endpoints, tls)
        self._led = records.Led(0, "")
        self._lease_id = 0
        self._granted_s = 0.0
        self._expires_s = 0.0
        self._created = 0
        self._jobs: dict[str, Saved] = {}
        # The newest append that etcd has acknowledged, and the newest that was sent.
        self._written = 0
        self._appends = 0
        self._leader = ""
        self._renewing: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._lose("it has not opened its store yet")

    async def open(self, address: str) -> Opened:
        await self.close()
        wait = Wait(at_once=True)
        try:
            while True:
                try:
                    opened = await self._try_to_lead(address)
                    if opened is not None:
                        return opened
                    wait.say(
                        f"stands by: {self._who_leads(address)} leads, according to etcd at {self._where}"
                    )
                    await self._until_leader_goes()
                except EtcdFailed as error:
                    self._leader = ""  # that coordinator may have lost etcd too
                    wait.say(f"waiting for etcd at {self._where}", str(error))
                    await _pause()
        except BaseException:
            await self.close()
            raise

    @property
    def leader(self) -> str:
        return self._leader

    async def append(self, records: Sequence[Record]) -> None:
        if self._lost.is_set():
            raise StoreLost(self._why_lost)
        jobs = self._jobs
        for record in records:
            jobs = durable.fold(jobs, record)
        for values in parts(records):
            await self._append_part(values)
        self._jobs = jobs

    async def lost(self) -> str:
        await self._lost.wait()
        return self._why_lost

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
            self._renewing = None
        self._lose("it has closed its store")
        await self._drop_lease()
        self._leader = ""
        await self._requests.close()
        await self._renewals.close()

    # ---- leading ----

    async def _try_to_lead(self, address: str) -> Opened | None:
        """Start to lead, or return None because another coordinator leads.

        Raises:
            EtcdFailed: etcd did not answer, or refused.
        """
        read = [self._get("leader"), self._get("term")]
        _, (leader, term) = await self._transaction([], read, [])
        if leader:
            self._leader = self._led_in(leader).address
            return None
        before = self._led_in(term).term if term else 0
        # From the clock, so that the term still grows if etcd was emptied; and above this process's last.
        self._led = records.Led(max(before + 1, self._led.term + 1, int(time.time())), address)
        await self._take_lease()
        try:
            opened = await self._create_leader(term[0][1].mod_revision if term else 0)
        except EtcdFailed:
            await self._drop_lease()  # the key may have been created
            raise
        if opened is None:
            await self._drop_lease()
            return None
        self._leader = address
        self._lost.clear()
        self._renewing = asyncio.create_task(self._renew_forever())
        return opened

    async def _create_leader(self, term_revision: int) -> Opened | None:
        """In one transaction, become the leader and read all jobs; None if another was faster."""
        value = records.encode(self._led)
        self._written = self._appends = 0
        done, answers = await self._transaction(
            [
                self._names.Create(self._key("leader")) == 0,
                self._names.Mod(self._key("term")) == term_revision,
            ],
            [
                self._names.Put(self._key("leader"), value, self._lease_id),
                self._names.Put(self._key("term"), value),
                self._names.Put(self._key("written"), self._token(self._written)),
                self._get("leader"),
                self._get_all("saved"),
                self._get_all("moved"),
            ],
            [],
        )
        if not done:
            return None
        _, _, _, leader, saved, moved = answers
        self._created = leader[0][1].create_revision
        prefix = self._key("").decode()
        entries = ((entry.key.decode(errors="replace"), entry.value) for _, entry in (*saved, *moved))
        jobs, unreadable = jobs_in(((key.removeprefix(prefix), value) for key, value in entries), prefix)
        self._jobs = jobs
        return Opened(self._led.term, jobs, unreadable)

    @staticmethod
    def _led_in(answer: Any) -> records.Led:
        entry = answer[0][1]
        return led_in(entry.value, entry.key.decode(errors="replace"))

    def _who_leads(self, address: str) -> str:
        if self._leader != address:
            return self._leader or "another coordinator"
        return f"this coordinator's earlier life, or another one with the same address, {address},"

    async def _until_leader_goes(self) -> None:
        """Return when the leader's key is deleted, or it is time to check again."""
        key = self._key("leader")

        async def first_deletion(client: Any) -> None:
            await client.connect()
            watch = await client.watch(key, kind=client_library().EventKind.DELETE)
            # It may have been deleted before the watch started.
            if await client.get(key) is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_WATCH_S):
                        await anext(aiter(watch))
            await watch.cancel()

        await self._requests.call(first_deletion, self._deadline_s + _WATCH_S)

    # ---- the lease ----

    async def _take_lease(self) -> None:
        sent_s = time.monotonic()
        lease = await self._requests.call(lambda client: client.lease(self._ttl_s), self._deadline_s)
        self._lease_id = lease.id
        self._granted_s = float(lease.ttl)
        # From the request, not from the answer: etcd may count from any moment in between.
        self._expires_s = sent_s + self._granted_s

    async def _drop_lease(self) -> None:
        """Revoke the lease, and with it the leader's key. If that fails, they expire."""
        lease_id, self._lease_id = self._lease_id, 0
        if lease_id:
            with contextlib.suppress(EtcdFailed):
                await self._requests.call(lambda client: client.revoke_lease(lease_id), self._deadline_s)

    async def _renew_forever(self) -> None:
        try:
            while not self._lost.is_set():
                await asyncio.sleep(self._granted_s / 3)
                await self._renew()
        except Exception as error:  # a caller that awaits `lost` must not wait forever
            _log.exception("cannot renew the lease in etcd")
            self._lose(f"the renewal of its lease in etcd failed: {error}")

    async def _renew(self) -> None:
        """Renew the lease, or stop leading."""
        lease_id = self._lease_id
        while True:
            sent_s = time.monotonic()
            # Try even after the lease should have expired, because this process or machine was paused: etcd knows.
            timeout_s = max(_RETRY_S, min(self._deadline_s, self._expires_s - sent_s))
            try:
                answer = await self._renewals.call(lambda client: client.refresh_lease(lease_id), timeout_s)
            except EtcdFailed as error:
                if time.monotonic() + _RETRY_S < self._expires_s:
                    await _pause()
                    continue
                self._lose(
                    f"its lease of {self._granted_s:.0f} s in etcd could not be renewed in time: {error}"
                )
                return
            if answer is None or answer.TTL <= 0:
                self._lose(
                    f"its lease of {self._granted_s:.0f} s in etcd has expired: it was paused, or cut off from etcd"
                )
                return
            self._expires_s = sent_s + answer.TTL
            return

    def _lose(self, why: str) -> None:
        if self._lost.is_set():
            return
        self._why_lost = why
        self._leader = ""
        self._lost.set()

    # ---- writing ----

    async def _append_part(self, values: Mapping[str, bytes | None]) -> None:
        """Write each value to its key (None: delete the key), all or none."""
        self._appends += 1
        number = self._appends
        operations = [self._put_or_delete(name, value) for name, value in values.items()]
        wait = Wait(at_once=False)
        unanswered = False
        while True:
            if self._lost.is_set():
                raise StoreLost(self._why_lost)
            try:
                if await self._append_once(number, operations):
                    return
            except EtcdFailed as error:
                # If an earlier request may still arrive, "nothing was written" could be wrong.
                if error.errno and not unanswered:
                    raise _refused(error, size(values)) from error
                unanswered = True
                wait.say(f"waiting for etcd at {self._where} to write a decision", str(error))
                await _pause()

    async def _append_once(self, number: int, operations: Sequence[Any]) -> bool:
        """Try to append; return whether it is durable now. If not, call again.

        Raises:
            EtcdFailed: etcd did not answer, or refused.
            StoreLost: another coordinator leads, or etcd has forgotten acknowledged records.
        """
        done, answers = await self._transaction(
            [
                self._names.Create(self._key("leader")) == self._created,
                self._names.Value(self._key("written")) == self._token(self._written),
            ],
            [self._names.Put(self._key("written"), self._token(number)), *operations],
            [self._get("leader"), self._get("written")],
        )
        if done:
            self._written = number
            return True
        leader, written = answers
        if not leader or leader[0][1].create_revision != self._created:
            why = "its lease in etcd has expired"
            address = ""
            with contextlib.suppress(StoreDamaged):
                if leader:
                    who = self._led_in(leader)
                    address = who.address
                    why = f"{why}, and {address} leads under term {who.term}"
            self._lose(why)
            self._leader = address
            raise StoreLost(self._why_lost)
        self._written = self._number_of(written[0][0] if written else b"")
        return self._written == number

    def _token(self, number: int) -> bytes:
        return f"{self._led.term}/{number}".encode()

    def _number_of(self, token: bytes) -> int:
        """The append that etcd has, although it has not answered: an earlier copy of this one, or a cancelled one.

        Raises:
            StoreLost: it is older than an acknowledged one.
        """
        term, _, number = token.partition(b"/")
        ours = term == str(self._led.term).encode() and number.isdigit()
        if ours and self._written < int(number) <= self._appends:
            return int(number)
        self._lose(
            f"etcd at {self._where} has forgotten decisions that it had acknowledged: it was restored from an older "
            f"snapshot, or another program has written to it (it has write {token.decode(errors='replace')!r:.80}, "
            f"not {self._token(self._written).decode()!r}). Each job continues from the newest state that its groups "
            "bring"
        )
        raise StoreLost(self._why_lost)

    def _put_or_delete(self, name: str, value: bytes | None) -> Any:
        if value is None:
            return self._names.Delete(self._key(name))
        return self._names.Put(self._key(name), value)

    # ---- requests ----

    async def _transaction(
        self, compare: Sequence[Any], success: Sequence[Any], failure: Sequence[Any]
    ) -> tuple[bool, Sequence[Any]]:
        """Return whether all of `compare` held, and the answers; a read gives a list of (value, key and value)."""
        return await self._requests.call(
            lambda client: client.transaction(compare, success, failure), self._deadline_s
        )

    def _get(self, name: str) -> Any:
        return self._names.Get(self._key(name))

    def _get_all(self, folder: str) -> Any:
        return self._names.Get(self._key(f"{folder}/"), self._key(f"{folder}0"))  # "0" comes after "/"

    def _key(self, name: str) -> bytes:
        return f"{self._prefix}/{name}".encode()

    @property
    def _where(self) -> str:
        return ",".join(self._endpoints)

    @property
    def _deadline_s(self) -> float:
        """For one request, so that a second one can still be sent before the lease expires."""
        return max(1.0, self._ttl_s / 3)


def _refused(error: EtcdFailed, size: int) -> OSError:
    if error.errno == errno.EMSGSIZE:
        limit = f"etcd takes 1.5 MB in one request by default ({error})"
        return too_big(size, limit, "Start etcd with a higher --max-request-bytes")
    return OSError(error.errno, f"nothing was written: {error}")


async def _pause() -> None:
    await asyncio.sleep(_RETRY_S * random.uniform(0.5, 1.5))
