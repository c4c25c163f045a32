"""Where the gradient of the output embedding is summed: in place in Megatron's ``main_grad`` where there is one.

Megatron's DDP gives a parameter a view of its gradient buffer (``main_grad``) and, for kernels that add to it
themselves, a flag ``grad_added_to_main_grad`` that keeps its hook from adding ``grad`` a second time. Autograd then
gets no gradient: the hook runs all the same, and a parameter that is used a second time (tied embeddings, marked by
``zero_out_wgrad``) has that gradient alone in ``grad``, which DDP adds. Megatron's own layers hand out a placeholder of
the weight's size instead, which only ``overlap_grad_reduce`` asks for (by an assertion).
(Protocol: megatron.core.tensor_parallel.layers, distributed.distributed_data_parallel.)
"""

from __future__ import annotations

import torch
from torch import Tensor


class WeightGradient:
    """Sum of a call's contributions to the gradient of its (V, H) weight.

    Attributes:
        total_VH: what to add contributions to: ``main_grad`` or a buffer of this call, in the compute format.
    """

    def __init__(self, weight_VH: Tensor, compute: torch.dtype) -> None:
        self._weight_VH = weight_VH
        main_grad = getattr(weight_VH, "main_grad", None)
        # a low-precision main_grad would round every block's contribution: sum those in a buffer, and let DDP add it
        self.in_main_grad = (
            main_grad is not None and main_grad.dtype == compute and hasattr(weight_VH, "grad_added_to_main_grad")
        )
        self.total_VH = main_grad if self.in_main_grad else torch.zeros_like(weight_VH, dtype=compute)

    def for_autograd(self) -> Tensor | None:
        """The gradient for autograd; None where ``main_grad`` has it. To be asked for in the backward pass then."""
        if not self.in_main_grad:
            return self.total_VH.to(self._weight_VH.dtype)
        self._weight_VH.grad_added_to_main_grad = True
        return None
