"""A training job whose policy ranks find themselves on a GPU of 4 GiB."""

from __future__ import annotations

import sys
from typing import Any

from openrlhf_ext.cli.train_ppo_ray import main
from openrlhf_ext.driver import processes
from openrlhf_ext.ranks import policy


class OnSmallGpu(policy.PolicyActor):
    """Ray sends this class to the ranks by value: it changes their module, not the driver's."""

    def init_model(self, *arguments: Any) -> dict[str, Any]:
        policy.device_bytes = lambda: 4 << 30
        return super().init_model(*arguments)


if __name__ == "__main__":
    processes.PolicyActor = OnSmallGpu
    sys.exit(main())
