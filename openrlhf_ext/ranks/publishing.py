"""Sends the weights from the policy's ranks to the rollout engines; rank 0 calls the engines.

The tensors leave in streams, each from the first of the ranks that hold it (`Ownership.streams`).
If these ranks all see the sender's staging buffers, every rank copies its own part of a bucket to
its place; otherwise every rank sends its part to the sender as one message. The next bucket is
assembled while the last one is under way to the engines.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf_ext.groups.watchdog import Gate, wait_for_all
from openrlhf_ext.megatron.step.batch import sequence_batch
from openrlhf_ext.options.sections import WeightSync
from openrlhf_ext.rollout.probe import check_sync, limit_of_probe
from openrlhf_ext.rollout.sync import find_transport
from openrlhf_ext.rollout.sync.base import EnginesAtFault, WeightSyncError, WeightTransferFailed
from openrlhf_ext.rollout.sync.plan import Bucket, BucketPlan, WeightSyncMismatch
from openrlhf_ext.rollout.sync.sender import EngineCalls, SendReport, WeightSender

if TYPE_CHECKING:
    from openrlhf_ext.megatron.policy import MegatronPolicy
    from openrlhf_ext.megatron.trained import Form

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SyncSettings:
    """How weights reach engines of ``workers`` workers each, and how the sync is checked: both
    sides score the tokens of ``probe`` and must agree to ``tolerance`` nats. ``travels``: the form
    in which adapters reach the engines, whose type is ``dtype``."""

    transport: str
    workers: int
    options: WeightSync
    tolerance: float
    probe: tuple[int, ...]
    travels: Form
    dtype: str


class WeightPublisher:
    """Sends one policy's weights with one ``plan``. Every public method is a collective and raises
    on all ranks or none."""

    def __init__(
        self, policy: MegatronPolicy, settings: SyncSettings, engines: Sequence[Any]
    ) -> None:
        from openrlhf_ext.megatron.model.hf_weights import Part  # Megatron: see ranks/actor.py

        self._policy, self._settings = policy, settings
        transport = find_transport(settings.transport)
        trained, dtype = policy.trained, _engines_dtype(settings)
        self._exporter = trained.engine_exporter(settings.travels, dtype, transport.most_streams)
        specs = [(tensor.name, tensor.shape, tensor.dtype) for tensor in self._exporter.metadata()]
        streams = self._exporter.streams_of_tensors()
        self.plan = BucketPlan.build(specs, settings.options.bucket_mib << 20, streams)
        self._parts = {
            bucket.index: [Part(slot.name, slot.start, slot.stop) for slot in bucket.slots]
            for bucket in self.plan.buckets
        }
        patience_s = policy.settings.megatron.collective_timeout_s
        self._staging = transport.staging(self.plan, self._exporter.streams, patience_s)
        self._gate = Gate(self._exporter.root)
        self._engines = list(engines)
        self._sender = self._make_sender(self._engines)
        self._last_sums: list[int] | None = None
        self._baseline: float | None = None

    def connect(self) -> None:
        self._connect(self._sender)

    def publish(self, version: int, trained: bool) -> SendReport | None:
        """Replaces the weights of all engines; returns the report on rank 0, None elsewhere.
        ``trained``: steps since the last update were long enough to move some parameter. Raises
        WeightSyncMismatch if an engine does not hold the sent weights, or if no bit has changed
        although ``trained``; EnginesAtFault; WeightSyncError: engines refuse to generate until an
        update arrives."""
        if not self._sender.connected:
            self._connect(self._sender)
        return self._send(
            self._sender, version, lambda report: self._require_change(report, version, trained)
        )

    def replace_engines(self, engines: Sequence[Any]) -> None:
        """Switches to other engines; the next `publish` connects them."""
        self._sender.close()
        self._engines = list(engines)
        self._sender = self._make_sender(self._engines)

    def bring_up_to_date(self, fresh: Sequence[int], version: int) -> None:
        """Sends the current weights to these engines and checks them; EnginesAtFault has positions
        among all engines."""
        sender = self._make_sender([self._engines[i] for i in fresh])
        try:
            self._connect(sender)
            self._send(sender, version)
            self.prove(version, fresh)
        except EnginesAtFault as error:
            raise type(error)(str(error), [fresh[i] for i in error.engines]) from error
        finally:
            sender.close()

    def prove(
        self,
        version: int,
        which: Sequence[int] | None = None,
        before_asking: Callable[[], None] = lambda: None,
        wake: bool = False,
    ) -> float:
        """Compares the engines' log-probs of the probe with the policy's: returns `check_sync`,
        nats; 0 on ranks other than 0.

        The first call, when engines have the weights from disk, sets the baseline of the later ones
        (`limit_of_probe`). Calls ``before_asking`` on every rank once the policy's own log-probs
        are computed; ``wake`` wakes sleeping engines. Raises WeightSyncMismatch; EnginesAtFault
        with positions among the engines of ``which``.
        """
        settings = self._settings
        tokens, tolerance, timeout_s = (
            settings.probe,
            settings.tolerance,
            settings.options.timeout_s,
        )
        row = sequence_batch([np.array(tokens)], [[(1, len(tokens))]])
        trained, dtype = self._policy.trained, _engines_dtype(settings)
        counted = self._policy.schedule.take_count()
        with trained.as_in_engines(settings.travels, dtype, version):
            ours = self._policy.logprobs(row, temperature=1.0).logprobs_N
        # do not count the probe: a resumed run runs it once more
        self._policy.schedule.counted = counted
        before_asking()
        asked = self._engines if which is None else [self._engines[i] for i in which]

        def compare() -> float:
            what = f"scoring the probe with weights of version {version}"
            if wake:
                waking = f"waking up before {what}"
                EngineCalls.start(asked, "wake_up", [()] * len(asked), waking, timeout_s).finish()

            def score(length: int) -> list[list[float]]:
                text = (tokens[:length],)
                return EngineCalls.start(
                    asked, "probe_logprobs", [text] * len(asked), what, timeout_s
                ).finish()

            limit = limit_of_probe(tolerance, self._baseline)
            found = check_sync(ours, score(len(tokens)), tolerance, version, limit, score)
            if self._baseline is None:
                self._baseline = found
            return found

        found = self._together(compare)[0]
        return found if dist.get_rank() == 0 else 0.0

    # ---- one update

    def _make_sender(self, engines: Sequence[Any]) -> WeightSender:
        settings = self._settings
        return WeightSender(
            settings.transport,
            self.plan,
            self._staging,
            engines,
            settings.workers,
            settings.options.timeout_s,
            self._exporter.stream,
            dist.get_rank() == self._exporter.root,
        )

    def _connect(self, sender: WeightSender) -> None:
        with _closed_on_failure(sender):
            link = self._together(sender.meet)[0]
            self._together(lambda: sender.join(link), everywhere=True)

    def _send(
        self,
        sender: WeightSender,
        version: int,
        check: Callable[[SendReport], None] = lambda _: None,
    ) -> SendReport | None:
        with _closed_on_failure(sender):

            def stream() -> list[int]:
                if dist.get_rank() == 0:
                    sender.begin(version)
                return sender.stream(self._fill, version)

            sums, errors = self._outcomes(stream, everywhere=True)

            def finish() -> SendReport:
                if (failure := _decisive(errors)) is not None:
                    sender.explain(failure)
                # one rank has each number, and the others have 0
                report = sender.finish(version, [sum(column) for column in zip(*sums, strict=True)])
                check(report)
                return report

            report = self._together(finish)[0]
        return report if dist.get_rank() == 0 else None

    def _require_change(self, report: SendReport, version: int, trained: bool) -> None:
        is_sure = self._policy.trained.shows_every_step(self._settings.travels)
        if trained and is_sure and report.sums == self._last_sums:
            raise WeightSyncMismatch(
                "the policy was trained, with a learning rate and a gradient that were not "
                f"zero, but weights {version} are those of the update before to the last bit: "
                "the optimizer's values do not reach the parameters, or the rate "
                "(actor.adam.lr) is far below the resolution of megatron.param_dtype"
            )
        self._last_sums = report.sums

    def _fill(self, bucket: Bucket, content: Tensor | None) -> None:
        parts = self._parts[bucket.index]
        targets = None if content is None else [slot.view(content) for slot in bucket.slots]
        if not self._staging.shared:
            self._gate.next()  # no rank sends before the stream's sender receives
            self._exporter.gather(parts, targets)
        elif targets is not None:
            self._exporter.write(parts, targets)

    def _together(self, function: Callable[[], Any], everywhere: bool = False) -> list[Any]:
        """Runs the function on rank 0, or ``everywhere``; returns every rank's result, None where
        it does not run. If it fails on any rank, every rank raises."""
        results, errors = self._outcomes(function, everywhere)
        if (failure := _decisive(errors)) is not None:
            raise failure
        return results

    def _outcomes(
        self, function: Callable[[], Any], everywhere: bool
    ) -> tuple[list[Any], list[Exception | None]]:
        """Runs the function on rank 0, or on all ranks; returns every rank's result and error. Idle
        ranks do not wait in a collective: on a GPU that would take computing time from an engine
        that shares it."""
        result, error = None, None
        if everywhere or dist.get_rank() == 0:
            try:
                result = function()
            except Exception as caught:
                error = caught
        wait_for_all()
        found: list = [None] * dist.get_world_size()
        dist.all_gather_object(found, (result, _portable(error)))
        errors = [each[1] for each in found]
        errors[dist.get_rank()] = error
        return [each[0] for each in found], errors


def _engines_dtype(settings: SyncSettings) -> torch.dtype:
    from openrlhf_ext.megatron.built import DTYPES  # Megatron: see ranks/actor.py

    return DTYPES[settings.dtype]


@contextmanager
def _closed_on_failure(sender: WeightSender) -> Iterator[None]:
    try:
        yield
    except Exception:
        sender.close()
        raise


def _decisive(errors: Sequence[Exception | None]) -> Exception | None:
    """Returns the first root cause; errors that only report another's failure come last."""
    found = [error for error in errors if error is not None]
    return next(
        (error for error in found if not isinstance(error, WeightTransferFailed)),
        next(iter(found), None),
    )


def _portable(error: Exception | None) -> Exception | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # pickle the text of a type that cannot be pickled
        return WeightSyncError(f"{type(error).__name__}: {error}")
    return error
