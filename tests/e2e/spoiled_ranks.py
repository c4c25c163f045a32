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


class Frozen(policy.PolicyActor):
    """Its optimizer's values never reach the parameters."""

    def init_model(self, *arguments: Any) -> dict[str, Any]:
        about = super().init_model(*arguments)
        train_step = self.policy.train_step

        def train_and_forget(*batch: Any) -> dict[str, float]:
            before = [parameter.detach().clone() for parameter in self._parameters]
            step = train_step(*batch)
            for parameter, old in zip(self._parameters, before, strict=True):
                parameter.data.copy_(old)
            return step

        self.policy.train_step = train_and_forget
        return about


if __name__ == "__main__":
    processes.PolicyActor = {"small_gpu": OnSmallGpu, "slow": Slow, "frozen": Frozen}[os.environ["SPOILED"]]
    sys.exit(main())
