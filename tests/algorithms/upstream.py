"""OpenRLHF's own estimators and policy loss on given batches, in a process of its own.

    python -m tests.algorithms.upstream CASES RESULTS

`ours` starts that process. It imports the installed openrlhf with empty modules in place of
flash_attn and deepspeed, which neither the estimators nor the losses call.
"""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch


def upstreams(cases: list[dict[str, Any]], folder: Path) -> list[dict[str, torch.Tensor]]:
    """What upstream makes of each case.

    A case has padded tensors (B, T) `old`, `new`, `ref`, `rollout`, `values`, `mask`, and (B,)
    `rewards`, `truncated`, rows of a group behind one another; and options `estimator`, `samples`,
    `gamma`, `lambd`, `no_std_norm`, `reward_clip`, `stop_properly`, `overlong`, `max_new_tokens`,
    `kl_coef`, `kl_estimator`, `use_loss`, `unbiased_gradient`, `loss` (arguments of PolicyLoss).

    Returns:
        Of each case `advantages` (B, T), `loss` and `grad` (B, T) of the loss in `new`.
    """
    torch.save(cases, folder / "cases.pt")
    command = [
        sys.executable,
        "-m",
        "tests.algorithms.upstream",
        folder / "cases.pt",
        folder / "results.pt",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "results.pt", weights_only=True)


def without_kernels() -> None:
    for name in ("deepspeed", "flash_attn"):
        if name not in sys.modules:
            sys.meta_path.insert(0, _Empty(name))


class _Empty:
    """Finds any module of a package that is not wanted here, and makes it of mocks."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        from importlib.machinery import ModuleSpec

        if name.partition(".")[0] == self.package:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: mock.MagicMock(name=f"{spec.name}.{name}")  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def _options(case: dict[str, Any]) -> types.SimpleNamespace:
    space = types.SimpleNamespace
    advantage = space(
        estimator=case["estimator"],
        gamma=case["gamma"],
        lambd=case["lambd"],
        no_std_norm=case["no_std_norm"],
    )
    reward = space(
        clip_range=case["reward_clip"],
        overlong_buffer_len=case["overlong"],
        overlong_penalty_factor=1.0,
        stop_properly_penalty_coef=case["stop_properly"],
    )
    rollout = space(n_samples_per_prompt=case["samples"], max_new_tokens=case["max_new_tokens"])
    return space(
        algo=space(advantage=advantage), reward=reward, rollout=rollout, data=space(max_len=None)
    )


def run(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Advantages and loss of a case, by upstream's code."""
    from openrlhf.models.loss import PolicyLoss, aggregate_loss
    from openrlhf.models.utils import compute_approx_kl
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    mask, old, new = case["mask"], case["old"], case["new"].clone().requires_grad_()
    in_reward = case["kl_coef"] > 0 and not case["use_loss"]
    kl = (
        compute_approx_kl(old, case["ref"], kl_estimator=case["kl_estimator"])
        if in_reward
        else torch.zeros_like(old)
    )
    experience = Experience(
        action_mask=mask,
        values=case["values"],
        rewards=case["rewards"],
        truncated=case["truncated"],
        response_length=mask.sum(-1),
        kl=kl,
        index=list(range(len(mask))),
        info={},
    )
    maker = RemoteExperienceMaker.__new__(RemoteExperienceMaker)
    maker.strategy = types.SimpleNamespace(args=_options(case))
    maker.advantage_estimator = case["estimator"]
    maker.kl_ctl = types.SimpleNamespace(value=case["kl_coef"] if in_reward else 0.0)
    (experience,) = maker.compute_advantages_and_returns([experience])
    totals = {"batch_num_tokens": mask.sum(), "global_batch_size": len(mask)}
    loss, *_ = PolicyLoss(**case["loss"])(
        new, old, experience.advantages, mask, case["rollout"], **totals
    )
    if case["kl_coef"] > 0 and case["use_loss"]:
        arguments = {
            "kl_estimator": case["kl_estimator"],
            "unbiased_gradient": case["unbiased_gradient"],
        }
        kl = compute_approx_kl(new, case["ref"], log_probs_old=old, **arguments)
        loss = loss + case["kl_coef"] * aggregate_loss(kl, mask, **totals)
    (grad,) = torch.autograd.grad(loss, new)
    return {"advantages": experience.advantages * mask, "loss": loss.detach(), "grad": grad * mask}


if __name__ == "__main__":
    without_kernels()
    torch.save([run(case) for case in torch.load(sys.argv[1], weights_only=True)], sys.argv[2])
