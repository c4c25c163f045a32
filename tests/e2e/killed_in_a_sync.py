"""A training job one of whose engines is killed by SIGKILL when it has half of an update, once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from openrlhf_ext.cli.train_ppo_ray import main
from openrlhf_ext.rollout import launch
from openrlhf_ext.rollout.engine import RolloutEngine


class Killed(RolloutEngine):
    """Defined in the main module, so Ray sends it to the engine's process by value. On a GPU the
    worker, which gets the weights, is in another process than this actor."""

    async def __init__(self, *args: Any, **engine_args: Any) -> None:
        await super().__init__(
            *args, worker_extension_cls="tests.e2e.killed_worker.KilledExtension", **engine_args
        )


if __name__ == "__main__":
    os.environ["KILLED_FILE"] = str(
        Path(sys.argv[sys.argv.index("--ckpt.output_dir") + 1]).parent / "killed"
    )
    launch.RolloutEngine = Killed
    sys.exit(main())
