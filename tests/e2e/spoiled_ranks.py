"""A training job whose policy ranks are spoiled, as the variable SPOILED says."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from openrlhf_ext.cli.train_ppo_ray import main
from openrlhf_ext.driver import processes
from openrlhf_ext.driver.rollouts import Rollouts
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


class NotFinite(policy.PolicyActor):
    """One number of rank 1's gradient is NaN before the ranks add theirs up, once: in the fourth
    step, which is told by the version of the weights before it."""

    spoils = True

    def fit(self, *shares: Any) -> dict[str, float]:
        import torch.distributed as dist  # not at the top: the class goes to the ranks by value

        model = self.policy.config
        reduce = model.finalize_model_grads_func

        def spoiled(*arguments: Any, **options: Any) -> None:
            buffer = self.policy.models[0].buffers[0]
            buffer.grad_data[buffer.grad_data.numel() // 2] = float("nan")
            reduce(*arguments, **options)

        if self.spoils and self.version == 3:
            self.spoils = False
            if dist.get_rank() == 1:
                model.finalize_model_grads_func = spoiled
        try:
            return super().fit(*shares)
        finally:
            model.finalize_model_grads_func = reduce


class Inexact(policy.PolicyActor):
    """Attention of the second layer scales scores by 2^-22 more, and nobody
    compares the probe."""

    def init_model(self, *arguments: Any) -> dict[str, Any]:
        about = super().init_model(*arguments)
        attention = self.policy.chunks[0].decoder.layers[1].self_attention.core_attention
        attention.scale *= 1 + 2**-22
        return about

    def prove_sync(self) -> dict[str, float]:
        return {"weight_sync/probe_diff": 0.0, "weight_sync/version": float(self.version)}


def leave_out(numbers: str) -> None:
    """The prompts with these numbers, from the beginning."""
    make = Rollouts.__init__

    def made(self: Rollouts, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self.skip(map(int, numbers.split()))

    Rollouts.__init__ = made


if __name__ == "__main__":
    kinds = {
        "small_gpu": OnSmallGpu,
        "slow": Slow,
        "not_finite": NotFinite,
        "inexact": Inexact,
        "": policy.PolicyActor,
    }
    processes.PolicyActor = kinds[os.environ["SPOILED"]]
    leave_out(os.environ.get("LEFT_OUT", ""))
    sys.exit(main())
