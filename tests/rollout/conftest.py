"""One Ray session for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="package")
def ray_session() -> Iterator[None]:
    """Ray on this machine, with more CPUs than it has: the tests' actors hardly compute."""
    # "local": not a Ray that happens to run on this machine
    ray.init("local", num_cpus=8, include_dashboard=False, object_store_memory=150 << 20, log_to_driver=False)
    yield
    ray.shutdown()
