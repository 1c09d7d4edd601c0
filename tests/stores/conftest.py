"""An etcd for each file of tests, and a prefix for each test."""

import uuid
from collections.abc import Iterator

import pytest

from tests.stores.etcd_server import Etcd, etcd_in


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with etcd_in(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@pytest.fixture
def prefix() -> str:
    return f"test/{uuid.uuid4()}"
