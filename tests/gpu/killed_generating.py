"""A training job whose engine is killed by SIGKILL while it generates, once, with the weights of
the first update."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil

from openrlhf_ext.cli.train_ppo_ray import main
from openrlhf_ext.rollout import launch
from openrlhf_ext.rollout.engine import RolloutEngine

_REQUESTS = 8  # of the step, so that some have begun
_ENGINE = "EngineCore"  # in its title; on a CPU the engine is in the actor's own process


class Killed(RolloutEngine):
    """Defined in the main module, so Ray sends it to the engine's process by value."""

    done: Path
    asked = 0

    async def generate(self, *args: Any, **named: Any) -> Any:
        if self._weight_version == 1 and not self.done.exists():
            self.asked += 1
            if self.asked == _REQUESTS:
                asyncio.get_running_loop().call_later(0.05, self._kill)
        return await super().generate(*args, **named)

    def _kill(self) -> None:
        self.done.touch()
        children = psutil.Process().children(recursive=True)
        engines = [child for child in children if _ENGINE in " ".join(child.cmdline())]
        os.kill(engines[0].pid if engines else os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    Killed.done = Path(sys.argv[sys.argv.index("--ckpt.output_dir") + 1]).parent / "killed"
    launch.RolloutEngine = Killed
    sys.exit(main())
