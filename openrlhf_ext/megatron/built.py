"""One rank's share of a decoder on Megatron-core: building, loading, and exporting its weights.

Every public method is a collective over all ranks of the model unless it says otherwise. Shape
suffixes: N = response tokens of a micro-batch that this rank predicts, L = tokens of a micro-batch
on this rank, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from openrlhf_ext.megatron.model.build import HiddenStateGPTModel, build_model, transformer_config
from openrlhf_ext.megatron.model.hf_files import HFRows, read_side_files, save_hf
from openrlhf_ext.megatron.model.hf_weights import HFExporter, Ownership, Value, load_hf
from openrlhf_ext.megatron.model.shape import ModelShape, read_model_shape
from openrlhf_ext.megatron.model.weight_map import hf_tensors
from openrlhf_ext.megatron.settings import ModelSettings
from openrlhf_ext.megatron.step.batch import PackedBatch
from openrlhf_ext.megatron.trained import trained_of
from openrlhf_ext.patches.environment import has_module

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TrainedChunk(DistributedDataParallel):
    """Megatron's DDP around a model chunk whose head is a function, not a module.

    Megatron reduces a bucket of gradients after the hooks of all its parameters have run, and
    gathers a bucket of updated parameters in a hook before the module that reads them. The head
    (``openrlhf_ext.head``) gets its weight as an argument: it adds the weight's gradient to
    ``main_grad`` itself and returns none to autograd, and no module hook waits for the weight.
    """

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        hook = super()._make_backward_post_hook(param)

        def gradient_is_there(*unused: Any) -> None:
            in_main_grad = param.grad is None and getattr(param, "grad_added_to_main_grad", False)
            if self.ddp_config.overlap_grad_reduce and in_main_grad:
                # Megatron's own hook asserts a placeholder of the weight's size in ``grad``
                # (megatron-core 0.19.2 distributed/distributed_data_parallel.py:488)
                self.param_to_bucket_group[param].register_grad_ready(param, self.force_all_reduce)
            else:
                hook(*unused)

        return gradient_is_there

    def await_parameter(self, parameter: torch.Tensor) -> None:
        if self.ddp_config.overlap_param_gather:
            self.param_to_bucket_group[parameter].finish_param_sync()

    def gather_parameters(self) -> None:
        """Gathers the parameters whose gather the last update deferred to the next forward pass. A
        collective of the data-parallel ranks."""
        if not self.ddp_config.overlap_param_gather:
            return
        for group in dict.fromkeys(self.param_to_bucket_group.values()):
            if not group.param_gather_dispatched or group.param_gather_handle is not None:
                group.start_param_sync(force_sync=True)


def no_sync(chunks: Sequence[torch.nn.Module]) -> Any:
    """Returns Megatron's ``no_sync_func``; without it ``overlap_grad_reduce`` reduces gradients at
    every micro-batch."""
    functions = [
        chunk.no_sync
        for chunk in chunks
        if isinstance(chunk, TrainedChunk) and chunk.ddp_config.overlap_grad_reduce
    ]
    return functions[0] if len(functions) == 1 else functions or None


class BuiltModel:
    """This rank's model chunks; a subclass with other parameters overrides how they are made.

    ``chunks`` are unwrapped (one without virtual pipeline stages), in the order of Megatron's
    schedules; the last chunk of the last stage returns hidden states. ``models`` are the chunks
    that the schedules run, DDP-wrapped if trained.
    """

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self.shape = self.read_shape()
        self.dtype = DTYPES[settings.megatron.param_dtype]
        self.device = (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
        for converter in settings.converters:
            converter.require()
        self._require_kernels()
        self.config = transformer_config(
            self.shape, settings.layout, self.dtype, settings.megatron, settings.converters
        )
        self.chunks = self.build_chunks()
        self.load_weights()
        self.trained = trained_of(self)
        self.trained.build()
        self.side_files = (
            read_side_files(settings.model_path, settings.chat_template)
            if dist.get_rank() == 0
            else {}
        )
        self.models = [self._wrap(chunk) for chunk in self.chunks]

    def _require_kernels(self) -> None:
        """Raises ModuleNotFoundError if this rank has a GPU and lacks what the layers need there:
        the driver may have started on a machine that could not tell."""
        for kind in self.shape.attention_counts if self.device.type == "cuda" else ():
            if kind.gpu_module is None:
                continue
            module, requirement = kind.gpu_module
            if not has_module(module):
                raise ModuleNotFoundError(
                    f"layers of {self.settings.model_path} need {requirement} on GPUs: pip install "
                    f"{requirement}"
                )

    def read_shape(self) -> ModelShape:
        return read_model_shape(self.settings.model_path)

    def build_chunks(self) -> list[HiddenStateGPTModel]:
        chunks = self.settings.layout.virtual_pipeline_size
        stages = [None] if chunks == 1 else range(chunks)
        converters, longest = self.settings.converters, self.settings.max_len
        return [
            build_model(self.shape, self.config, stage, converters=converters, longest=longest)
            for stage in stages
        ]

    def load_weights(self) -> None:
        load_hf(self.chunks, self.shape, self.settings.model_path)

    def _wrap(self, chunk: HiddenStateGPTModel) -> torch.nn.Module:
        whole = [(parameter, parameter.data) for parameter in self.trained.in_fp32(chunk)]
        module = Float16Module(self.config, chunk) if self.dtype != torch.float32 else chunk
        for parameter, values in whole:
            parameter.data = values
        megatron = self.settings.megatron
        if self.settings.optimizer is None:
            return module.requires_grad_(False)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=megatron.overlap_grad_reduce,
            overlap_param_gather=megatron.overlap_param_gather,
            bucket_size=megatron.ddp_bucket_size,
            use_distributed_optimizer=megatron.distributed_optimizer_enable,
            check_for_nan_in_grad=False,  # checked once per step, on the gradient norm
        )
        return TrainedChunk(self.config, ddp, module)

    @property
    def on_last_stage(self) -> bool:
        """Whether this rank's last chunk returns the hidden states that the head needs. Not a
        collective."""
        return parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    @property
    def last_chunk(self) -> HiddenStateGPTModel:
        """The chunk that returns hidden states; on the last stage only. Not a collective."""
        return self.chunks[-1]

    def output_embedding(self) -> Tensor:
        """Returns this rank's shard of the head's weight (last stage only), after its gather is
        complete.

        No module's forward pass reads this weight, so no Megatron hook waits for its gather.
        """
        weight, chunk = self.last_chunk.output_embedding(), self.models[-1]
        if isinstance(chunk, TrainedChunk):
            chunk.await_parameter(weight)
        return weight

    def response_states(self, hidden_LH: Tensor, part: PackedBatch) -> Tensor:
        """Returns the (N, H) hidden states that ``loss`` receives.

        Under sequence parallelism ``hidden_LH`` is this rank's piece of the model's output.
        """
        if self.config.sequence_parallel:
            # Every tensor-parallel rank then computes the same with the gathered states, so the
            # backward pass only splits the gradient.
            hidden_LH = gather_from_sequence_parallel_region(
                hidden_LH, tensor_parallel_output_grad=False
            )
        return hidden_LH[part.hidden_N]

    def gather_parameters(self) -> None:
        """Completes the parameter gather that the last update deferred; a no-op if nothing is
        deferred."""
        for chunk in self.models:
            if isinstance(chunk, TrainedChunk):
                chunk.gather_parameters()

    # ---- weight export

    def exporter(self, value: Value | None = None, most_streams: int = 1) -> HFExporter:
        return HFExporter(
            self.chunks, Ownership(self.shape, self.settings.layout, most_streams), value
        )

    def export(self, value: Value | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields whole HF tensors on global rank 0; all ranks must exhaust the iterator."""
        return iter(self.exporter(value))

    def export_rows(self) -> Iterator[HFRows]:
        return self.exporter().rows()

    def write_hf(
        self,
        target: str | Path,
        config_changes: Mapping[str, Any] | None = None,
        value: Value | None = None,
    ) -> dict[str, int]:
        """Writes all weights; see ``write_rows``."""
        rows = self.export_rows() if value is None else self.exporter(value).rows()
        return self.write_rows(
            rows, self.shape, self.dtype, self.side_files, target, config_changes=config_changes
        )

    @staticmethod
    def write_rows(
        rows: Iterator[HFRows],
        shape: ModelShape,
        dtype: torch.dtype,
        files: Mapping[str, bytes],
        target: str | Path,
        **more: Any,
    ) -> dict[str, int]:
        """Writes an HF checkpoint (``hf_files.save_hf``) from rank 0; no other rank waits for the
        disk.

        Returns on rank 0 the size in bytes of every file by its name; on the other ranks, which may
        return long before, an empty dict.
        """
        if dist.get_rank() == 0:
            return save_hf(rows, hf_tensors(shape), dtype, files, target, **more)
        for _ in rows:
            pass
        return {}
