"""A training job whose policy ranks take longer to load than a test may take."""

from __future__ import annotations

import sys
import time
from typing import Any

from openrlhf_ext.cli.train_ppo_ray import main
from openrlhf_ext.driver import processes
from openrlhf_ext.ranks import policy


class Slow(policy.PolicyActor):
    """Ray sends this class to the ranks by value: what it changes is there, not in the driver."""

    def init_model(self, *_: Any) -> dict[str, Any]:
        time.sleep(3600)
        raise AssertionError("nobody ended this")


if __name__ == "__main__":
    processes.PolicyActor = Slow
    sys.exit(main())
