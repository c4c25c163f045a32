"""One policy rank's part in handing the weights to the rollout engines.

Rank 0 holds the connection to the engines. How a bucket of Hugging Face tensors comes together there:

- the ranks of the replica run on one host and the transport sends from host memory: rank 0's staging buffers are shared
  memory, and every rank copies its own rows into them;
- otherwise every rank sends its rows of the bucket to rank 0 as one message.

Either way the next bucket is put together while the one before is under way to the engines.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from openrlhf_ext.megatron.step.batch import sequence_batch
from openrlhf_ext.rollout.probe import check_sync, probe_tokens
from openrlhf_ext.rollout.sync import (
    Bucket,
    BucketPlan,
    CudaMemory,
    EnginesAtFault,
    Relay,
    SendReport,
    Staging,
    TensorSpec,
    WeightSender,
    WeightSyncError,
    largest_frame,
    make_sender,
)
from openrlhf_ext.rollout.sync.engine_calls import EngineCalls
from openrlhf_ext.rollout.sync.shared_memory import HostMemory
from openrlhf_ext.rollout.sync.stream import HEADER_BYTES

if TYPE_CHECKING:
    from openrlhf_ext.megatron.model.bucket_export import BucketExporter
    from openrlhf_ext.megatron.policy import MegatronPolicy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SyncSettings:
    """How weights reach the rollout engines and how the arrival is proved.

    Attributes:
        transport: a name of `weight_sync.SENDERS`.
        engine_tensor_parallel_size: workers per engine.
        bucket_bytes: size of a packed bucket.
        timeout_s: limit of connecting, of one update, and of one probe.
        probe_tolerance: largest difference in log-probs that rounding explains, nats.
        probe_length: tokens of the probe.
    """

    transport: str
    engine_tensor_parallel_size: int
    bucket_bytes: int
    timeout_s: float
    probe_tolerance: float
    probe_length: int


class WeightPublisher:
    """Sends one policy's weights; every public method is a collective of all its ranks and raises on all or none."""

    def __init__(self, policy: MegatronPolicy, settings: SyncSettings, engines: Sequence[Any]) -> None:
        """
        Args:
            policy: this rank's share; its parameters are read at every update.
            settings: how to send.
            engines: Ray handles of the rollout engines, the same list on every rank.
        """
        from openrlhf_ext.megatron.model.bucket_export import BucketExporter  # Megatron: see rank_actor

        self._policy, self._settings = policy, settings
        self._exporter = BucketExporter(policy.chunks, policy.shape)
        specs = [TensorSpec(name, shape, dtype) for name, shape, dtype in policy.hf_specs()]
        self._plan = BucketPlan.build(specs, settings.bucket_bytes)
        deadline = timedelta(seconds=policy.settings.collective_timeout_s)
        members = self._exporter.members
        self._group = dist.new_group(members, timeout=deadline) if len(members) > 1 else None
        self._host_group = dist.new_group(members, timeout=deadline, backend="gloo") if len(members) > 1 else None
        self._relay = Relay(self._plan, CudaMemory()) if settings.transport == "cuda_ipc" else None
        self._shared = self._share_staging() if settings.transport == "gloo" and self._group else None
        self._engines = list(engines)
        self._sender = self._make_sender(self._engines)

    @property
    def plan(self) -> BucketPlan:
        """What every update consists of."""
        return self._plan

    def connect(self) -> None:
        """Bring rank 0 and all engines together."""
        self._together(lambda: self._sender.connect())

    def publish(self, version: int) -> SendReport | None:
        """Replace the weights of all engines; the report on rank 0, None elsewhere.

        Raises:
            EnginesAtFault: with the positions of the engines that died, failed or hung.
            WeightSyncError: the update did not arrive for another reason; engines refuse to generate until one does.
        """
        self._together(lambda: None if self._sender.connected else self._sender.connect())
        return self._send(self._sender, version)

    def replace_engines(self, engines: Sequence[Any]) -> None:
        """Go on with other engines, which are connected by the next `publish`."""
        self.close()
        self._engines = list(engines)
        self._sender = self._make_sender(self._engines)

    def bring_up_to_date(self, fresh: Sequence[int], version: int) -> None:
        """Give the present weights to the engines at the positions `fresh`, and prove it; the others are not disturbed.

        Raises:
            EnginesAtFault: with positions among all engines.
        """
        chosen = [self._engines[i] for i in fresh]
        sender = self._make_sender(chosen)
        try:
            self._together(lambda: sender.connect())
            self._send(sender, version)
            self.prove(version, fresh)
        except EnginesAtFault as error:
            raise type(error)(str(error), [fresh[i] for i in error.engines]) from error
        finally:
            if sender is not None:
                sender.close()

    def prove(
        self,
        version: int,
        which: Sequence[int] | None = None,
        before_asking: Callable[[], None] = lambda: None,
        wake: bool = False,
    ) -> float:
        """Compare the engines' log-probs of a fixed prompt with the policy's.

        Args:
            version: of the weights, for messages.
            which: positions of the engines to ask; None: all.
            before_asking: called on every rank when the policy's own log-probs are there.
            wake: the engines sleep: wake them up before they are asked.

        Returns:
            The largest difference, in nats; 0 on ranks other than 0.

        Raises:
            WeightSyncMismatch: it exceeds the tolerance.
            EnginesAtFault: an engine died or did not answer; its position counts among those asked.
        """
        policy, settings = self._policy, self._settings
        tokens = probe_tokens(policy.shape.vocab_size, settings.probe_length, policy.settings.seed)
        row = sequence_batch([np.array(tokens)], [[(1, len(tokens))]])
        ours = policy.logprobs(row, temperature=1.0).logprobs_N
        before_asking()
        asked = self._engines if which is None else [self._engines[i] for i in which]

        def compare() -> float:
            what = f"scoring the probe with weights of version {version}"
            if wake:
                waking = f"waking up before {what}"
                EngineCalls.start(asked, "wake_up", [()] * len(asked), waking, settings.timeout_s).finish()
            calls = EngineCalls.start(asked, "probe_logprobs", [(tokens,)] * len(asked), what, settings.timeout_s)
            return check_sync(ours, calls.finish(), settings.probe_tolerance, version)

        return self._together(compare) or 0.0

    def close(self) -> None:
        """Leave the group; not a collective."""
        if self._sender is not None:
            self._sender.close()

    # ---- one update -------------------------------------------------------------------------------------------------

    def _send(self, sender: WeightSender | None, version: int) -> SendReport | None:
        work = self._work()
        if sender is not None:
            return self._together(lambda: sender.send_buckets(work, version))
        return self._together(work.follow, everywhere=True)

    def _work(self) -> _ReplicaWork:
        if self._shared is not None:
            return _SharedWriting(self._plan, self._exporter, self._shared, self._host_group)
        return _Gathering(self._plan, self._exporter, self._group, self._relay)

    def _make_sender(self, engines: Sequence[Any]) -> WeightSender | None:
        if dist.get_rank() != 0:
            return None
        return make_sender(
            self._settings.transport, self._plan, engines, self._settings.engine_tensor_parallel_size,
            self._settings.timeout_s, self._relay or self._shared,
        )  # fmt: skip

    def _together(self, function: Callable[[], Any], everywhere: bool = False) -> Any:
        """Run on rank 0, or on this rank too; if it fails on any rank, every rank raises."""
        result, error = None, None
        if everywhere or dist.get_rank() == 0:
            try:
                result = function()
            except Exception as caught:
                error = caught
        errors: list = [None] * dist.get_world_size()
        dist.all_gather_object(errors, _portable(error))
        if error is not None:
            raise error
        if found := [e for e in errors if e is not None]:
            raise found[0]
        return result

    # ---- staging buffers that all ranks see -------------------------------------------------------------------------

    def _share_staging(self) -> Staging | None:
        """Rank 0's buffers on every exporting rank; None if they are not all on one host, or cannot share memory."""
        if not self._exporter.takes_part:
            return None
        made = [HostMemory.create(largest_frame(self._plan)) for _ in range(2)] if dist.get_rank() == 0 else []
        handles = [[memory.handle for memory in made]]
        dist.broadcast_object_list(handles, src=0, group=self._host_group)
        opened, problem = made, None
        if dist.get_rank() != 0:
            try:
                opened = [HostMemory.open(handle) for handle in handles[0]]
            except OSError as error:
                problem = f"rank {dist.get_rank()}: {error}"
        problems: list = [None] * len(self._exporter.members)
        dist.all_gather_object(problems, problem, group=self._host_group)
        for memory in made:
            memory.close()
        if any(problems):
            if dist.get_rank() == 0:
                logger.info("weights are gathered by messages, not in shared memory: %s", list(filter(None, problems)))
            return None
        return opened[0].tensor, opened[1].tensor


def _portable(error: Exception | None) -> Exception | None:
    """The error in a form that other ranks can receive."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # the type cannot be pickled: its text can
        return WeightSyncError(f"{type(error).__name__}: {error}")
    return error


class _ReplicaWork:
    """The replica's joint work on one update: a `BucketSource` on rank 0, `follow` on every other rank."""

    def __init__(self, plan: BucketPlan) -> None:
        self._plan = plan
        self._filled = self._completed = 0

    def _do_fill(self, bucket: Bucket, content: Tensor | None) -> None:
        """This rank's part in filling; without `content` only what others wait for."""
        raise NotImplementedError

    def _do_complete(self, bucket: Bucket) -> None:
        """What every rank does when its part is filled; returns when the frame may be sent."""
        raise NotImplementedError

    def _own_content(self, bucket: Bucket) -> Tensor | None:
        """Where a rank other than 0 fills."""
        return None

    def fill(self, bucket: Bucket, content: Tensor) -> None:
        """See `BucketSource`; on rank 0, as the next two."""
        self._filled = bucket.index + 1
        self._do_fill(bucket, content)

    def complete(self, bucket: Bucket) -> None:
        """See `BucketSource`."""
        self._completed = bucket.index + 1
        self._do_complete(bucket)

    def drain(self) -> None:
        """See `BucketSource`."""
        for bucket in self._plan.buckets[self._completed :]:
            if bucket.index >= self._filled:
                self._do_fill(bucket, None)
            self._do_complete(bucket)
        self._filled = self._completed = len(self._plan.buckets)

    def follow(self) -> None:
        """A rank's part that does not send; a failure is raised when no other rank waits for this one any more."""
        failure: Exception | None = None
        for bucket in self._plan.buckets:
            if failure is None:
                try:
                    self._do_fill(bucket, self._own_content(bucket))
                except Exception as error:
                    failure = error
            self._do_complete(bucket)
        if failure is not None:
            raise failure


class _SharedWriting(_ReplicaWork):
    """Every exporting rank writes its rows into the shared staging buffers.

    A rank writes to a buffer after the barrier of the bucket before; rank 0 enters that one when the buffer is free.
    """

    def __init__(self, plan: BucketPlan, exporter: BucketExporter, staging: Staging, group: dist.ProcessGroup) -> None:
        super().__init__(plan)
        self._exporter, self._staging, self._group = exporter, staging, group

    def _own_content(self, bucket: Bucket) -> Tensor:
        return self._staging[bucket.index % 2][HEADER_BYTES:]

    def _do_fill(self, bucket: Bucket, content: Tensor | None) -> None:
        if content is not None:
            self._exporter.write(dict(bucket.unpack(content)))

    def _do_complete(self, bucket: Bucket) -> None:
        dist.barrier(group=self._group)


class _Gathering(_ReplicaWork):
    """Every exporting rank sends its rows of a bucket to rank 0; a relay copies the whole frame back to all ranks."""

    def __init__(
        self, plan: BucketPlan, exporter: BucketExporter, group: dist.ProcessGroup | None, relay: Relay | None
    ) -> None:
        super().__init__(plan)
        self._exporter, self._group, self._relay = exporter, group, relay

    def _do_fill(self, bucket: Bucket, content: Tensor | None) -> None:
        views = None if content is None else dict(bucket.unpack(content))
        self._exporter.gather([slot.spec.name for slot in bucket.slots], views, self._group)

    def _do_complete(self, bucket: Bucket) -> None:
        if self._relay is not None:
            self._relay.spread(bucket)
