"""``openrlhf-ext train_sft --config FILE.yaml [--section.name value ...]``: supervised fine-tuning.

On one machine the command starts its ranks itself, without Ray. On several nodes a launcher starts
it once per rank: ``torchrun --nnodes 4 --nproc_per_node 8 ... -m openrlhf_ext.cli.train_sft``.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

from openrlhf_ext.checkpoints import CheckpointError
from openrlhf_ext.cli.main import chosen_layout, show
from openrlhf_ext.config import ConfigError, Findings
from openrlhf_ext.config.files import downloaded
from openrlhf_ext.config.load import load
from openrlhf_ext.config.sft import SupervisedConfig
from openrlhf_ext.config.sft_rules import check_supervised
from openrlhf_ext.config.show import format_options
from openrlhf_ext.config.tokenizers import tokenizer_fault
from openrlhf_ext.inputs import InputError
from openrlhf_ext.redaction import redact
from openrlhf_ext.reporting import EventLog, TerminalHandler
from openrlhf_ext.run.checkpoints import check_resume, own_folders
from openrlhf_ext.run.corridor import CorridorLeft
from openrlhf_ext.run.ending import INTERRUPTED, hear_again, listened, report_interruption

logger = logging.getLogger(__name__)

_MODEL = "model.model_name_or_path"
_LAUNCHER = "OPENRLHF_EXT_LAUNCHER"  # of a rank that this command has started: its process id
_END_S = 30.0  # for the end of all ranks, when one has ended or was told to
_LOOK_S = 0.1


def main(argv: list[str] | None = None) -> int:
    """0; 1 = failed; 2 if the configuration is wrong; 130 after Ctrl-C, 143 after SIGTERM, 129
    after SIGHUP."""
    words = sys.argv[1:] if argv is None else argv
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    rank = os.environ.get("RANK", "0")
    is_first = not (rank.isdecimal() and int(rank))
    handlers = [TerminalHandler()]
    logging.basicConfig(level=logging.WARNING if is_first else logging.ERROR, handlers=handlers)
    logging.getLogger("openrlhf_ext").setLevel(logging.INFO if is_first else logging.ERROR)
    try:
        return start(words)
    except ConfigError as error:
        if is_first:
            show(error, file=sys.stderr)
        return 2
    except (CheckpointError, CorridorLeft, InputError, OSError) as error:
        if is_first:
            logger.error("the run failed: %s", error)
        return 1
    except Exception as error:
        from openrlhf_ext.groups.watchdog import RanksMissingError

        if not isinstance(error, RanksMissingError):
            raise
        # on every rank: those that are missing cannot say so
        logger.error("the run failed: %s", error)
        return 1
    except KeyboardInterrupt:
        if is_first:
            logger.warning("SIGINT: the run had not begun")
        return INTERRUPTED[signal.SIGINT]


def start(words: list[str]) -> int:
    """The same; raises ConfigError, CheckpointError, InputError."""
    config = load(SupervisedConfig, words, [check_supervised, _findings], choice=chosen_layout)
    if not config.dry_run and (folder := _downloaded(config)) is not None:
        # the rules and the layout are asked again: they are about the model, which is here now
        words = [*words, f"--{_MODEL}", folder]
        config = load(SupervisedConfig, words, [check_supervised, _findings], choice=chosen_layout)
    if not config.logger.verbose:
        warnings.simplefilter("ignore")
    if config.dry_run:
        return dry_run(config)
    if "WORLD_SIZE" not in os.environ and config.world_size > 1:
        return launch(config, words)
    if os.environ.get("RANK", "0") != "0":
        return run(config)
    for warning in config.warnings:
        logger.warning(warning)
    with own_folders(config):
        return run(config)


def _findings(config: SupervisedConfig) -> Findings:
    from openrlhf_ext.planning import fit
    from openrlhf_ext.run import corridor
    from openrlhf_ext.run.preflight import kernel_violations

    found = fit.findings(config)
    of_machine = () if config.dry_run else kernel_violations(config)
    return Findings((*found.violations, *corridor.violations(config), *of_machine), found.warnings)


def launch(config: SupervisedConfig, words: list[str]) -> int:
    """Starts this command once for every rank, hands signals on, and ends all if one fails."""
    from openrlhf_ext.groups.stores import open_store

    with own_folders(config):  # by rank 0, too, but then each rank would say what is wrong
        pass
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in listened()
    }
    store = open_store("127.0.0.1")  # lives as long as this process
    shared = {
        "WORLD_SIZE": str(config.world_size),
        "LOCAL_WORLD_SIZE": str(config.world_size),
        _LAUNCHER: str(os.getpid()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    command, ranks = [sys.executable, "-m", "openrlhf_ext.cli.train_sft", *words], []
    try:
        for rank in map(str, range(config.world_size)):
            ranks.append(
                subprocess.Popen(
                    command, env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank}
                )
            )
        _wait(ranks, received, config.megatron.collective_timeout_s)
    finally:
        _kill(ranks)
        hear_again(before)
    codes = [rank.returncode for rank in ranks]
    if not any(codes):
        return 0
    if not received:
        return 2 if 2 in codes else 1
    if codes[0] < 0:  # it could not say so
        with EventLog(config.logger.beside("events.jsonl"), goes_on=True) as events:
            report_interruption(config, events, received[0])
    return 128 + received[0]


def _wait(ranks: list[subprocess.Popen], received: list[int], save_s: float) -> None:
    """Until all have ended, or have had the time to: after a signal (``save_s`` more for the step
    under way and its checkpoint, but after Ctrl-C), or after one of them has failed."""
    told, ends = 0, math.inf
    while None in (codes := [rank.poll() for rank in ranks]) and time.monotonic() < ends:
        for number in received[told:]:
            told += 1
            for rank in ranks:
                rank.send_signal(number)
            ends = min(
                ends, time.monotonic() + _END_S + (0.0 if number == signal.SIGINT else save_s)
            )
        if any(codes) and not told and ends == math.inf:
            ends = time.monotonic() + _END_S  # the others notice, and say who is missing
            logger.error(
                "rank %d has ended with status %d",
                *next((r, code) for r, code in enumerate(codes) if code),
            )
        time.sleep(_LOOK_S)


def _kill(ranks: list[subprocess.Popen]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.wait()


def _downloaded(config: SupervisedConfig) -> str | None:
    """The folder of a model that is given by its hub name, None for a folder. Raises
    ConfigError."""
    name = config.model.model_name_or_path
    return None if name is None or Path(name).is_dir() else downloaded(_MODEL, name)


def run(config: SupervisedConfig) -> int:
    """This process as a rank."""
    from openrlhf_ext.groups.processes import die_with
    from openrlhf_ext.groups.stores import open_store
    from openrlhf_ext.imports import without_collection
    from openrlhf_ext.patches import apply

    apply()
    if _LAUNCHER in os.environ:
        die_with(int(os.environ[_LAUNCHER]))
    from openrlhf_ext.megatron.settings import training_environment

    os.environ |= training_environment(config)
    store = None
    if "WORLD_SIZE" not in os.environ:
        # lives as long as this process: `init_process_group` finds it
        store = open_store("127.0.0.1")
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
        }
    with without_collection():
        from openrlhf_ext.sft.train import run_rank
    return run_rank(config)


def dry_run(config: SupervisedConfig) -> int:
    """Prints warnings, the ranks and their proof, and the configuration; 2 if the model cannot be
    laid out so, 3 if a model or data that is not here leaves it open. Raises ConfigError: lists
    what going on would refuse."""
    from openrlhf_ext.cli.train_ppo_ray import layout_proofs
    from openrlhf_ext.imports import without_collection
    from openrlhf_ext.patches import apply
    from openrlhf_ext.run.preflight import trained_model, unseen_inputs

    apply()
    with without_collection():
        from openrlhf_ext.sft.data import fingerprint, read_examples

    model = config.model.model_name_or_path or ""
    there = Path(model).is_dir() and tokenizer_fault(model, chat=False) is None
    there = there and config.data.dataset is not None and not unseen_inputs(config)
    try:
        made = read_examples(config)[0] if there else None
    except InputError as error:
        show(f"would not start: {redact(str(error))}", file=sys.stderr)
        return 2

    examples = {} if made is None else {"examples": fingerprint(made)}
    resumption = check_resume(config, {"model": trained_model(config)}, examples)
    if (proofs := layout_proofs(config)) is None:
        return 2
    unseen = unseen_inputs(config)
    text = f"cannot say: {'; '.join(unseen)}: not on this machine" if unseen else "would start"
    lines = [*resumption, *(f"  - {warning}" for warning in config.warnings)]
    if made is not None:
        trained = int((made.ranges_R2[:, 1] - made.ranges_R2[:, 0]).sum())
        lines.append(
            f"examples: {len(made)}, of {len(made.tokens_M)} tokens, {trained} of which are "
            "trained on"
        )
    show("\n".join([redact(text), *lines, "", *proofs]))
    show(f"the resolved configuration:\n\n{format_options(config)}")
    return 3 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
