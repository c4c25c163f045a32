"""``openrlhf-ext train --config FILE.yaml [--section.name value ...]``: one training run."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from openrlhf_ext.cli.main import chosen_layout, show
from openrlhf_ext.config import (
    ConfigError,
    Findings,
    RunConfig,
    format_config,
    load_config,
    placement_table,
)
from openrlhf_ext.config.files import model_folder
from openrlhf_ext.config.trained import TrainedConfig
from openrlhf_ext.driver import guard, preflight
from openrlhf_ext.driver.trials import Tried, with_user_code
from openrlhf_ext.inputs import InputError
from openrlhf_ext.redaction import redact
from openrlhf_ext.reporting import TerminalHandler
from openrlhf_ext.run.preflight import unseen_inputs


def main(argv: list[str] | None = None) -> int:
    """0; 1 if the run failed; 2 if the configuration is wrong; 3 if a dry run cannot say that it is
    right; 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP; 128 + n if signal n killed the
    driver, 137 also if it had to be ended."""
    # read when tqdm, Ray and torch are first used, so set before
    os.environ.setdefault("TQDM_DISABLE", "1")
    # a step's host tensors take larger, fewer pages
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # threads that wait for each other leave the cores to engines
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    logging.basicConfig(level=logging.WARNING, handlers=[TerminalHandler()])
    logging.getLogger("openrlhf_ext").setLevel(logging.INFO)
    return _reporting_faults(lambda: start(sys.argv[1:] if argv is None else argv))


def _reporting_faults(do: Callable[[], int]) -> int:
    try:
        return do()
    except ConfigError as error:
        show(error, file=sys.stderr)
        return 2


def start(argv: list[str]) -> int:
    """The same; raises ConfigError where the configuration is wrong."""
    # files of the user's, and what these start, may print: standard output of a dry run for
    # programs is JSON alone
    is_for_programs = any(word.split("=")[0] == "--dry_run_json" for word in argv)
    with _stdout_to_stderr() if is_for_programs else contextlib.nullcontext():
        config = _loaded(argv)
    if not config.logger.verbose:
        warnings.simplefilter("ignore")  # those of the libraries; ours are log records
    if config.dry_run:  # shows the warnings itself
        return dry_run(config, *preflight.tried(config))
    for warning in config.warnings:
        logging.getLogger("openrlhf_ext").warning(warning)
    if config.dry_run_json:
        with _stdout_to_stderr():
            tried = preflight.tried(config)
        return dry_run_json(config, *tried)
    return guard.run(config, train)


def _loaded(argv: list[str]) -> RunConfig:
    seen: list[RunConfig] = []

    def rules(config: RunConfig) -> Findings:
        seen.append(config)
        return findings(config)

    try:
        return load_config(argv, more_rules=rules, choice=chosen_layout)
    except ConfigError as error:
        raise (with_user_code(error, seen[0]) if seen else error) from None


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def findings(config: RunConfig) -> Findings:
    """What the driver and the planner know beyond the configuration's own rules."""
    from openrlhf_ext.planning import fit

    found = (preflight.findings(config), fit.findings(config))
    return Findings(
        tuple(v for one in found for v in one.violations),
        tuple(w for one in found for w in one.warnings),
    )


def train(config: RunConfig, watched: guard.Guard, restart: int) -> int:
    from openrlhf_ext.driver.job import run

    return _reporting_faults(lambda: run(config, watched, restart))


def dry_run(config: RunConfig, trials: Sequence[Tried] = (), resumption: Sequence[str] = ()) -> int:
    """Prints whether the run would start, memory and warnings; then places and their proof; then
    the configuration.

    ``trials``: what came out of the user's own files; ``resumption``: what a run that goes on says.
    Returns 2 if the model cannot be laid out as configured, or does not fit on the GPUs of this
    machine; 3 if that cannot be said: a model or data is not here, or a file of the user's raised.
    """
    from openrlhf_ext.imports import without_collection
    from openrlhf_ext.patches import apply

    apply()
    with without_collection():
        from openrlhf_ext.planning.fit import verdict

    if (proofs := layout_proofs(config)) is None:
        return 2
    found = verdict(config)
    warned = [f"  - {warning}" for warning in config.warnings]
    unknown = [f"{name}, which is not on this machine" for name in unseen_inputs(config)]
    unknown += [
        f"{trial.option} raised an exception in its trial" for trial in trials if trial.raised
    ]
    text = f"cannot say: {'; '.join(unknown)}" if unknown and found.starts else found.text
    lines = [*found.details, *resumption, *(redact(str(trial)) for trial in trials)]
    show("\n".join([redact(text), *lines, *(["warnings:", *warned] if warned else []), ""]))
    show(placement_table(config))
    show("\n".join(proofs))
    show(f"the resolved configuration:\n\n{format_config(config)}\n{redact(text)}")
    return 2 if not found.starts else 3 if unknown else 0


def dry_run_json(config: RunConfig, trials: Sequence[Tried], resumption: Sequence[str]) -> int:
    """The same; unless the run would not start, prints what its first event would say, for
    programs."""
    from openrlhf_ext.driver.about import about_run

    with contextlib.redirect_stdout(io.StringIO()):
        status = dry_run(config, trials, resumption)
    if status != 2:
        print(json.dumps(about_run(config)))
    return status


def layout_proofs(config: TrainedConfig) -> list[str] | None:
    """What is said of each model (``_layout_proofs``); None if one cannot be laid out, which is
    said."""
    from openrlhf_ext.tools.plan.layout_proof import LayoutProofError

    try:
        return [*_layout_proofs(config)]
    except (LayoutProofError, InputError) as error:
        show(
            f"would not start: the model cannot be laid out as configured\n{error}", file=sys.stderr
        )
        return None


def _layout_proofs(config: TrainedConfig) -> Iterator[str]:
    """The models that are trained and the reward model, every distinct rank built on the meta
    device from config.json alone."""
    from openrlhf_ext.megatron.built import DTYPES
    from openrlhf_ext.megatron.model.shape import read_model_shape
    from openrlhf_ext.megatron.settings import layer_converters
    from openrlhf_ext.tools.plan.layout_proof import format_proof, prove_layout

    dtype, distributed = (
        DTYPES[config.megatron.param_dtype],
        config.megatron.distributed_optimizer_enable,
    )
    on_host = config.ds.optimizer_on_host
    models: list[tuple[str, str | None, Any, str | None]] = [
        ("policy", config.model_path, config.layout, None)
    ]
    if isinstance(config, RunConfig):
        head = config.ds.value_head_prefix
        models += (
            [("critic", config.critic_model, config.critic_layout, head)]
            if config.has_critic
            else []
        )
        reward = ("reward model", config.reward.model_name_or_path, config.reward_layout, head)
        models += [reward] if config.has_reward_model else []
    for what, name, layout, value_head in models:
        if (folder := model_folder(name or "")) is None:
            yield redact(f"{what}: {name} is not on this machine, so no rank of it was built\n")
        else:
            layers = (
                layer_converters(config, read_model_shape(folder).family)
                if value_head is None
                else ()
            )
            proof = prove_layout(folder, layout, dtype, distributed, value_head, layers, on_host)
            yield f"{what}, {format_proof(proof)}"


if __name__ == "__main__":
    sys.exit(main())
