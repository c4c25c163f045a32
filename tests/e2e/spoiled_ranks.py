"""A training job whose policy ranks are spoiled, as the variable SPOILED says."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from openrlhf_ext.cli.train_ppo_ray import main
from openrlhf_ext.driver import processes
from openrlhf_ext.ranks import policy

# Ray sends these classes to the ranks by value: what they change is there, not in the driver.


class OnSmallGpu(policy.PolicyActor):
    """Finds itself on a GPU of 4 GiB."""

    def init_model(self, *arguments: Any) -> dict[str, Any]:
        policy.device_bytes = lambda: 4 << 30
        return super().init_model(*arguments)


class Slow(policy.PolicyActor):
    """Takes longer to load than a test may take."""

    def init_model(self, *_: Any) -> dict[str, Any]:
        time.sleep(3600)
        raise AssertionError("nobody ended this")


if __name__ == "__main__":
    processes.PolicyActor = {"small_gpu": OnSmallGpu, "slow": Slow}[os.environ["SPOILED"]]
    sys.exit(main())
