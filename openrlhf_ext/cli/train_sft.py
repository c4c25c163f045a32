"""``openrlhf-ext train_sft --config FILE.yaml [--section.name value ...]``: supervised fine-tuning.

On one machine the command starts its ranks itself, by torchrun where there are several, without Ray. On several nodes a
launcher starts it once for every rank: ``torchrun --nnodes 4 --nproc_per_node 8 ... -m openrlhf_ext.cli.train_sft``.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from openrlhf_ext.checkpoints import CheckpointError
from openrlhf_ext.config import ConfigError, RunConfig, Violation
from openrlhf_ext.config.files import downloaded
from openrlhf_ext.config.sft import SupervisedConfig, in_own_names, load_supervised
from openrlhf_ext.config.show import format_options
from openrlhf_ext.inputs import InputError
from openrlhf_ext.redaction import redact
from openrlhf_ext.reporting import TerminalHandler
from openrlhf_ext.run.checkpoints import check_resume, own_folders

logger = logging.getLogger(__name__)

_MODEL = "model.model_name_or_path"


def main(argv: list[str] | None = None) -> int:
    """0; 1 if the run failed; 2 if the configuration is wrong; 143 after SIGTERM."""
    words = sys.argv[1:] if argv is None else argv
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    is_first = os.environ.get("RANK", "0") == "0"
    handlers = [TerminalHandler()]
    logging.basicConfig(level=logging.WARNING if is_first else logging.ERROR, handlers=handlers)
    logging.getLogger("openrlhf_ext").setLevel(logging.INFO if is_first else logging.ERROR)
    try:
        return start(words)
    except ConfigError as error:
        if is_first:
            print(error, file=sys.stderr)
        return 2
    except (CheckpointError, InputError) as error:
        if is_first:
            logger.error("the run failed: %s", error)
        return 1


def start(words: list[str]) -> int:
    """The same; raises ConfigError, CheckpointError, InputError."""
    config = load_supervised(words, _choice, _too_large)
    if not config.dry_run and (folder := _downloaded(config)) is not None:
        # the rules and the layout are asked again: they are about the model, which is here now
        words = [*words, f"--{_MODEL}", folder]
        config = load_supervised(words, _choice, _too_large)
    if not config.logger.verbose:
        warnings.simplefilter("ignore")
    if config.dry_run:
        return dry_run(config)
    if "WORLD_SIZE" not in os.environ and config.world_size > 1:
        with own_folders(config):  # by rank 0, too, but then torchrun's report hides what is wrong
            pass
        return launch(config.world_size, words)
    if os.environ.get("RANK", "0") != "0":
        return run(config)
    for warning in config.warnings:
        logger.warning(warning)
    with own_folders(config):
        return run(config)


def _choice(policy: RunConfig) -> Mapping[str, Any]:
    """What ``megatron.layout auto`` comes to."""
    from openrlhf_ext.tools.plan import fit

    return fit.choice(policy)


def _too_large(policy: RunConfig) -> Iterator[Violation]:
    """States that exceed a GPU; there are no engines, for which the planner would have other words."""
    from openrlhf_ext.tools.plan import fit

    found = fit.findings(policy).violations
    yield from (one for one in found if not any(name.startswith("vllm.") for name in one.options))


def launch(ranks: int, words: list[str]) -> int:
    """Becomes torchrun, which starts this command once for every rank and ends all if one fails."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks),
        "-m", "openrlhf_ext.cli.train_sft", *words,
    ]  # fmt: skip
    sys.stdout.flush()
    os.execv(command[0], command)


def _downloaded(config: SupervisedConfig) -> str | None:
    """The folder of a model that is given by its hub name, None for a folder. Raises ConfigError."""
    name = config.model.model_name_or_path
    return None if name is None or Path(name).is_dir() else downloaded(_MODEL, name)


def run(config: SupervisedConfig) -> int:
    """This process as a rank."""
    from openrlhf_ext.imports import without_collection
    from openrlhf_ext.patches import apply
    from openrlhf_ext.stores import open_store

    apply()
    from openrlhf_ext.megatron.settings import training_environment

    os.environ |= training_environment(config.policy)
    store = None
    if "WORLD_SIZE" not in os.environ:
        store = open_store("127.0.0.1")  # lives as long as this process: `init_process_group` finds it
        os.environ |= {
            "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
        }  # fmt: skip
    with without_collection():
        from openrlhf_ext.sft.train import run_rank
    return run_rank(config)


def dry_run(config: SupervisedConfig) -> int:
    """Prints warnings, the ranks and their proof, and the configuration; 2 if the model cannot be laid out so, 3 if a
    model or data that is not here leaves it open. Raises ConfigError: lists what going on would refuse."""
    from openrlhf_ext.cli.train_ppo_ray import layout_proofs
    from openrlhf_ext.driver.preflight import trained_models, unseen_inputs
    from openrlhf_ext.imports import without_collection
    from openrlhf_ext.patches import apply

    apply()
    with without_collection():
        from openrlhf_ext.sft.data import fingerprint, read_examples
        from openrlhf_ext.tools.plan.layout_proof import LayoutProofError

    def examples() -> dict[str, str]:
        there = config.data.dataset is not None and not unseen_inputs(config.policy)
        return {"examples": fingerprint(read_examples(config)[0])} if there else {}

    resumption = check_resume(config, {"model": trained_models(config.policy)["policy"]}, examples)
    try:
        proofs = [*layout_proofs(config.policy)]
    except (LayoutProofError, InputError) as error:
        print(f"would not start: the model cannot be laid out as configured\n{error}", file=sys.stderr)
        return 2
    unseen = [*map(in_own_names, unseen_inputs(config.policy))]
    text = f"cannot say: {'; '.join(unseen)}: not on this machine" if unseen else "would start"
    lines = [*resumption, *(f"  - {warning}" for warning in config.warnings)]
    print("\n".join([redact(text), *lines, "", *proofs]))
    print(f"the configuration as it was resolved:\n\n{format_options(config)}")
    return 3 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
