"""Lets Megatron's DistributedOptimizer be checkpointed when its inner optimizer is torch's Adam.

Dependency: megatron-core 0.16.1, file megatron/core/optimizer/distrib_optimizer.py. It matters where neither
TransformerEngine nor NVIDIA apex is installed; their FusedAdam keeps `step` in the parameter groups, torch's Adam keeps
one `step` tensor per parameter in its state.

Wrong there:
  :640-643  state_dict() asserts that the states hold exactly one step. A fresh torch Adam has no state yet, so loading
            a checkpoint into a new optimizer ends in AssertionError (sharded_state_dict() calls it, :1246, :1268).
  :819-825  load_state_dict() puts the same `step` tensor into the state of every parameter. torch then advances it once
            per parameter and step: Adam's bias correction is wrong after each resume, without an error.
  :937-940  _set_main_param_and_optimizer_states() copies every key of the state, `step` too, which the readers of the
            reshardable formats (:2101) leave out on purpose: KeyError.

Changes: state_dict() first gives parameters without a state the zero state that torch's Adam would create at the first
step; load_state_dict() ends by giving each parameter its own copy of `step`; a missing `step` keeps its present value.

Remove when: megatron-core handles the three cases itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from openrlhf_ext.patches.base import Patch
from openrlhf_ext.patches.environment import has_nvidia_apex, has_transformer_engine
from openrlhf_ext.patches.import_hooks import patch_finder

if TYPE_CHECKING:
    import torch

VERSIONS = ("0.16.1",)
PATCHED_MODULE = "megatron.core.optimizer.distrib_optimizer"


def _install() -> None:
    if patch_finder.has_wrapper(PATCHED_MODULE):
        return
    patch_finder.run_around(PATCHED_MODULE, _patch_after_import)
    if PATCHED_MODULE in sys.modules:
        _patch_module(sys.modules[PATCHED_MODULE])


def _need() -> tuple[bool, str]:
    if has_transformer_engine():
        return False, "TransformerEngine's FusedAdam is used"
    if has_nvidia_apex():
        return False, "NVIDIA apex's FusedAdam is used"
    return True, "without TransformerEngine and NVIDIA apex, Megatron uses torch's Adam"


PATCH = Patch(
    name="megatron_distributed_optimizer",
    dependency="megatron-core",
    versions=VERSIONS,
    problem=(
        "optimizer/distrib_optimizer.py:640-643 asserts on a fresh torch Adam, :819-825 shares one step tensor between "
        "all parameters after a load (wrong bias correction), :937-940 KeyError 'step'"
    ),
    change="zero Adam state before state_dict(), own step tensor for each parameter after load_state_dict()",
    removal="megatron-core handles torch's Adam in these three places",
    install=_install,
    need=_need,
)


@contextmanager
def _patch_after_import(module: ModuleType) -> Iterator[None]:
    yield
    _patch_module(module)


def _patch_module(module: ModuleType) -> None:
    if not module.HAVE_APEX_OR_TE:
        PATCH.require_known_version()
        patch_distributed_optimizer(module.DistributedOptimizer)


def patch_distributed_optimizer(optimizer_class: type) -> None:
    """Replace the three methods on Megatron's DistributedOptimizer class."""
    state_dict = optimizer_class.state_dict
    load_state_dict = optimizer_class.load_state_dict
    set_states = optimizer_class._set_main_param_and_optimizer_states

    @wraps(state_dict)
    def state_dict_of_initialised_adam(self: Any) -> dict[str, Any]:
        if _uses_torch_adam(self):
            initialise_adam_state(self.optimizer)
        return state_dict(self)

    @wraps(load_state_dict)
    def load_state_dict_with_own_steps(self: Any, state: dict[str, Any]) -> None:
        load_state_dict(self, state)
        if _uses_torch_adam(self):
            unshare_steps(self.optimizer)

    @wraps(set_states)
    def set_states_keeping_step(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        if _uses_torch_adam(self):
            group_index, group_order = self.model_param_group_index_map[model_param]
            main_param = self.optimizer.param_groups[group_index]["params"][group_order]
            present = self.optimizer.state.get(main_param, {})
            if "step" in present:
                tensors = {"step": present["step"], **tensors}
        set_states(self, model_param, tensors)

    optimizer_class.state_dict = state_dict_of_initialised_adam
    optimizer_class.load_state_dict = load_state_dict_with_own_steps
    optimizer_class._set_main_param_and_optimizer_states = set_states_keeping_step


def _uses_torch_adam(distributed_optimizer: Any) -> bool:
    import torch

    return isinstance(distributed_optimizer.optimizer, (torch.optim.Adam, torch.optim.AdamW))


def initialise_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter without a state the one that torch's Adam creates at its first step."""
    import torch

    for group in optimizer.param_groups:
        for param in group["params"]:
            if not optimizer.state.get(param):
                optimizer.state[param] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }


def unshare_steps(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter its own `step` tensor."""
    for state in optimizer.state.values():
        state["step"] = state["step"].detach().clone()
