"""One Ray session for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from tests.cluster import start_local_ray


@pytest.fixture(scope="package")
def ray_session() -> Iterator[None]:
    """Ray on this machine, with more CPUs than it has: the tests' actors hardly compute."""
    start_local_ray()
    yield
    ray.shutdown()
