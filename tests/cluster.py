"""A Ray of a test's own."""

from __future__ import annotations

import ray

from openrlhf_ext.driver.cluster import start_with_retries


def start_local_ray() -> None:
    """Starts Ray with more CPUs than there are: the tests' actors hardly compute.

    "local": it joins no Ray of another test or of somebody else, which a bare ``ray.init()`` finds
    in /tmp/ray.
    """
    arguments = {
        "num_cpus": 8,
        "include_dashboard": False,
        "object_store_memory": 150 << 20,
        "log_to_driver": False,
        # eight processes, a second of a core each
        "_system_config": {"prestart_worker_first_driver": False},
    }
    start_with_retries(lambda: ray.init("local", **arguments))
