"""A training job one of whose engines is killed by SIGKILL when it has half of an update, once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from openrlhf_ext.cli.train_ppo_ray import main
from openrlhf_ext.rollout import launch
from openrlhf_ext.rollout.engine import RolloutEngine


class Killed(RolloutEngine):
    """Defined in the main module, so Ray sends it to the engine's process by value."""

    done: Path

    def is_first(self) -> bool:
        """Of two engines that ask at the same moment, one is: creating a file decides."""
        try:
            self.done.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    async def receive_weights(self, version: int, *sizes: Any) -> Any:
        from openrlhf_ext.rollout.sync.stream import WeightReceiver

        receive = WeightReceiver._whole_tensors

        def half(receiver: WeightReceiver, bucket: Any, content: Any) -> Any:
            yield from receive(receiver, bucket, content)
            if bucket.index == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        if version == 2 and self.is_first():
            WeightReceiver._whole_tensors = half
        return await super().receive_weights(version, *sizes)


if __name__ == "__main__":
    Killed.done = Path(sys.argv[sys.argv.index("--ckpt.output_dir") + 1]).parent / "killed"
    launch.RolloutEngine = Killed
    sys.exit(main())
