"""What the ranks of the sharded head tests run."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf_ext.head import linear_logprob_entropy, linear_token_loss
from tests.head.cases import Case
from tests.head.memory import peak_extra_bytes
from tests.head.naive import naive_logprob_entropy


def run(
    cases: list[Case], workspaces: list[int], lopsided_workspace: int
) -> tuple[list[dict[str, dict]], int | None]:
    """Every way through every case, with this rank's shard of the weight (and of the sequence); and
    the extra memory of the token loss where one rank holds all wanted tokens."""
    dist.init_process_group("gloo")
    ways_of_cases = [
        {name: way(case, workspace) for workspace in workspaces for name, way in ways(workspace)}
        for case in cases
    ]
    return ways_of_cases, lopsided_extra_bytes(lopsided_workspace)


def lopsided_extra_bytes(workspace: int, length: int = 1200, width: int = 2048) -> int | None:
    """Beyond the gradients; None where the kernel does not tell."""
    hidden = torch.randn(length, width).requires_grad_()
    weight = torch.randn(256, width).requires_grad_()
    rows, target = torch.randperm(length), torch.randint(0, 256, (length,))

    def token_loss() -> None:
        out = linear_token_loss(
            hidden,
            weight,
            target,
            lambda lp, _: lp / length,
            process_group=dist.group.WORLD,
            workspace_bytes=workspace,
            sequence_rows=rows,
            recompute=True,
        )
        torch.autograd.grad(out.value, (hidden, weight))

    dist.broadcast(rows, 0)
    token_loss()  # the first run loads libraries
    extra = peak_extra_bytes(token_loss)
    return None if extra is None else extra - hidden.nbytes - weight.nbytes


def ways(workspace: int):
    yield f"logprob {workspace}", logprob
    yield f"token loss {workspace}", token_loss
    yield f"token loss kept {workspace}", token_loss_kept
    yield f"sequence logprob {workspace}", sequence_logprob
    yield f"sequence token loss {workspace}", sequence_token_loss
    yield "naive", naive


def shard(case: Case) -> tuple[Tensor, int]:
    """This rank's rows of the padded vocabulary, and its true size."""
    size, vocab = dist.get_world_size(), len(case.weight)
    # padding must not matter
    padded = case.weight.new_full((-(-vocab // size) * size, case.weight.shape[1]), 7.0)
    padded[:vocab] = case.weight
    return padded.chunk(size)[dist.get_rank()].clone().requires_grad_(), vocab


def sequence(case: Case) -> tuple[Tensor, Tensor]:
    """This rank's run of a longer sequence, and where the case's tokens stand in it: in no order,
    most on one rank."""
    size, rank, count = dist.get_world_size(), dist.get_rank(), len(case.target)
    length = count + 3
    generator = torch.Generator().manual_seed(count)
    places = torch.randperm(length * size, generator=generator)
    places = torch.cat([places[places < length], places[places >= length]])[:count]
    places = places[torch.randperm(count, generator=generator)]
    whole = torch.full((length * size, case.hidden.shape[1]), 5.0, dtype=case.hidden.dtype)
    whole[places] = case.hidden.detach()
    return whole.chunk(size)[rank].clone().requires_grad_(), places


def logprob(case: Case, workspace: int) -> dict:
    hidden, (weight, vocab) = case.hidden.clone().requires_grad_(), shard(case)
    out = linear_logprob_entropy(
        hidden,
        weight,
        case.target,
        case.temperature,
        vocab,
        dist.group.WORLD,
        workspace,
        entropy_grad=True,
    )
    return _both(case, out, hidden, weight)


def naive(case: Case, workspace: int) -> dict:
    hidden, (weight, vocab) = case.hidden.clone().requires_grad_(), shard(case)
    out = naive_logprob_entropy(
        hidden, weight, case.target, case.temperature, vocab, dist.group.WORLD, entropy_grad=True
    )
    return _both(case, out, hidden, weight)


def sequence_logprob(case: Case, workspace: int) -> dict:
    (hidden, rows), (weight, vocab) = sequence(case), shard(case)
    out = linear_logprob_entropy(
        hidden,
        weight,
        case.target,
        case.temperature,
        vocab,
        dist.group.WORLD,
        workspace,
        entropy_grad=True,
        sequence_rows=rows,
    )
    return _both(case, out, hidden, weight) | {"rows": rows}


def token_loss(case: Case, workspace: int, recompute: bool | None = True) -> dict:
    hidden, (weight, vocab) = case.hidden.clone().requires_grad_(), shard(case)
    out = linear_token_loss(
        hidden,
        weight,
        case.target,
        case.loss,
        case.temperature,
        vocab,
        dist.group.WORLD,
        workspace,
        recompute=recompute,
    )
    return _loss(out, hidden, weight)


def token_loss_kept(case: Case, workspace: int) -> dict:
    return token_loss(case, workspace, recompute=False)


def sequence_token_loss(case: Case, workspace: int) -> dict:
    (hidden, rows), (weight, vocab) = sequence(case), shard(case)
    counts = torch.bincount(rows // len(hidden), minlength=dist.get_world_size()).tolist()
    out = linear_token_loss(
        hidden,
        weight,
        case.target,
        case.loss,
        case.temperature,
        vocab,
        dist.group.WORLD,
        workspace,
        sequence_rows=rows,
        rows_per_rank=counts,
        checks=workspace == 1,
    )
    return _loss(out, hidden, weight) | {"rows": rows}


def _both(case: Case, out, hidden: Tensor, weight: Tensor) -> dict:
    value = (out.logprob_T * case.slope + out.entropy_T * case.entropy_slope).sum()
    value.backward()
    return {
        "logprob": out.logprob_T.detach(),
        "entropy": out.entropy_T.detach(),
        "hidden": hidden.grad,
        "weight": weight.grad,
    }


def _loss(out, hidden: Tensor, weight: Tensor) -> dict:
    (2 * out.value).backward()
    return {
        "logprob": out.logprob_T,
        "entropy": out.entropy_T,
        "value": out.value.detach(),
        "hidden": hidden.grad / 2,
        "weight": weight.grad / 2,
    }


def refuse(case: Case) -> list[str]:
    """What every rank says of input that is wrong on one of them or on all."""
    dist.init_process_group("gloo")
    (hidden, rows), (weight, vocab) = sequence(case), shard(case)
    messages = []
    for change in ("rows", "counts", "nan hidden", "nan weight"):
        bad_hidden, bad_rows, bad_weight = (
            hidden.detach().clone(),
            rows.clone(),
            weight.detach().clone(),
        )
        if change == "rows":
            bad_rows[2] = hidden.shape[0] * dist.get_world_size()
        elif change == "nan hidden":
            owner, place = divmod(int(rows[4]), hidden.shape[0])
            if dist.get_rank() == owner:
                bad_hidden[place, 0] = float("nan")
        elif dist.get_rank() == 0:
            bad_weight[0, 0] = float("nan")
        try:
            linear_logprob_entropy(
                bad_hidden,
                bad_weight,
                case.target,
                1.0,
                vocab,
                dist.group.WORLD,
                1,
                sequence_rows=bad_rows,
                rows_per_rank=[0, len(rows)] if change == "counts" else None,
            )
            messages.append("accepted")
        except (ValueError, FloatingPointError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def megatron_main_grad() -> list[dict]:
    """The head under Megatron's DDP, tied to an embedding or not, on a tensor-parallel group of
    two."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=2
    )
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for tied in (False, True):
            for entry in ("logprob", "token loss"):
                module = _Tied(dtype, tied)
                model = DistributedDataParallel(
                    config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module
                )
                for _ in range(2):  # the second step starts from a clean buffer
                    model.zero_grad_buffer()
                    for seed in range(3):  # micro-batches
                        module.loss(entry, seed).backward()
                results.append(
                    {
                        "dtype": dtype,
                        "tied": tied,
                        "main_grad": module.weight.main_grad.clone(),
                        "want": module.autograd(),
                        "grad": module.weight.grad,
                        "flag": module.weight.grad_added_to_main_grad,
                    }
                )
    return results


class _Tied(torch.nn.Module):
    """An output embedding of 2 x 20 rows, in the tied case also looked up."""

    def __init__(self, dtype: torch.dtype, tied: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.whole = torch.randn(40, 8, generator=generator).to(dtype)
        self.tied, self.rank = tied, dist.get_rank()
        self.weight = torch.nn.Parameter(self.whole.chunk(2)[self.rank].clone())
        # Megatron's mark of a weight that is used twice on a stage
        self.weight.zero_out_wgrad = tied

    def _operands(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(30, 8, generator=generator).to(self.whole.dtype)
        target, looked_up = torch.randint(0, 37, (2, 30), generator=generator)
        return hidden, target, looked_up % 20, torch.randn(30, generator=generator) / 30

    def loss(self, entry: str, seed: int) -> Tensor:
        hidden, target, looked_up, slope = self._operands(seed)
        if entry == "logprob":
            logprob = linear_logprob_entropy(
                hidden.requires_grad_(), self.weight, target, 0.8, 37, dist.group.WORLD, 1
            ).logprob_T
            value = (logprob * slope).sum()
        else:
            value = linear_token_loss(
                hidden.requires_grad_(),
                self.weight,
                target,
                lambda lp, rows: lp * slope[rows],
                0.8,
                37,
                dist.group.WORLD,
                1,
            ).value
        if self.tied:
            value = value + self.weight[looked_up].float().square().sum()
        return value

    def autograd(self) -> Tensor:
        """This shard's gradient by float64 autograd through the whole weight."""
        whole = self.whole.double().requires_grad_()
        total = 0.0
        for seed in range(3):
            hidden, target, looked_up, slope = self._operands(seed)
            logprob = (hidden.double() @ whole[:37].t() / 0.8).log_softmax(-1)
            total = total + (logprob.gather(1, target[:, None])[:, 0] * slope).sum()
            if self.tied:
                total = total + sum(
                    whole.chunk(2)[rank][looked_up].square().sum() for rank in range(2)
                )
        return torch.autograd.grad(total, whole)[0].chunk(2)[self.rank]
