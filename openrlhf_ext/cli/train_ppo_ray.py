"""``python -m openrlhf_ext.cli.train_ppo_ray --config FILE.yaml [--entity.name value ...]``: one training run."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator


def main(argv: list[str] | None = None) -> int:
    """Checks the configuration, then runs it.

    Returns:
        0; 1 if the run failed; 2 if the configuration is wrong; 130 after Ctrl-C.
    """
    from openrlhf_ext.config import ConfigError, load_config

    # read when tqdm and Ray are first imported, so set before
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("openrlhf_ext").setLevel(logging.INFO)
    try:
        config = load_config(sys.argv[1:] if argv is None else argv)
        if not config.logger.verbose:
            warnings.simplefilter("ignore")  # those of the libraries; ours are log records
        check(config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    for warning in config.warnings:
        logging.getLogger("openrlhf_ext").warning(warning)
    if config.dry_run:
        return dry_run(config)
    from openrlhf_ext.controller.job import run

    return run(config)


def check(config) -> None:
    """What only other rooms know: the algorithm's own options, and which models the policy builds."""
    from openrlhf_ext.algorithms import get_algorithm
    from openrlhf_ext.config import ConfigError, Violation
    from openrlhf_ext.megatron.hf_config import read_model_shape

    name, options, correction = config.algorithm_options()
    violations = []
    try:
        algorithm = get_algorithm(name, correction=correction, **options)
        violations += [
            Violation((f"algo.{name}",), f"algo.{name}: {rule}") for rule in trainer_rules(config, algorithm)
        ]
    except ValueError as error:
        violations.append(Violation((f"algo.{name}",), f"algo.{name}: {error}"))
    model = config.actor.model_name_or_path
    try:
        if os.path.isdir(model):
            read_model_shape(model)
    except ValueError as error:
        violations.append(Violation(("actor.model_name_or_path",), f"actor.model_name_or_path: {error}"))
    if violations:
        raise ConfigError(violations)


def trainer_rules(config, algorithm) -> Iterator[str]:
    """What an algorithm asks for and the trainer does not give."""
    if getattr(algorithm.options, "kl_coef", 0.0) > 0:
        yield f"kl_coef must be 0, there is no reference model yet: got {algorithm.options.kl_coef}"
    if getattr(algorithm.options, "zero_batch", False):
        yield "zero_batch must be false, there is no guiding policy: it needs the guide's log-probs"
    one_update = config.samples_per_rollout == config.train.batch_size and config.train.max_epochs == 1
    if algorithm.needs_prepare and not one_update:
        yield (
            "it chooses tokens by statistics of the policy that is about to be updated, which the controller has for "
            "one update per batch of rollouts only: train.batch_size must be rollout.batch_size * "
            f"rollout.n_samples_per_prompt = {config.samples_per_rollout} and train.max_epochs 1, got "
            f"{config.train.batch_size} and {config.train.max_epochs}"
        )
    prompts = config.initial_entropy_prompts
    if not isinstance(prompts, int) or isinstance(prompts, bool) or prompts < 0:
        yield f"initial_entropy_prompts must be a number of prompts, 0 or more (0 = do not measure), got {prompts!r}"


def dry_run(config) -> int:
    """Prints the resolved configuration and where every rank and engine goes."""
    from openrlhf_ext.config import format_config, placement_table

    print(format_config(config))
    print(placement_table(config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
