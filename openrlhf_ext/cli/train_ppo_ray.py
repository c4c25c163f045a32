"""``python -m openrlhf_ext.cli.train_ppo_ray --config FILE.yaml [--entity.name value ...]``: one training run."""

from __future__ import annotations

import logging
import os
import sys
import warnings

NOT_IN_TRAINER = (
    "not supported by the trainer yet: it selects tokens with statistics of the whole mini-batch under the current "
    "policy; use an estimator without such a selection, for example grpo, dapo, gtpo_entropy or high_entropy_tokens"
)


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
        if algorithm.needs_prepare:
            violations.append(Violation((f"algo.{name}",), f"algo.advantage.estimator {name} is {NOT_IN_TRAINER}"))
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


def dry_run(config) -> int:
    """Prints the resolved configuration and where every rank and engine goes."""
    from openrlhf_ext.config import format_config, placement_table

    print(format_config(config))
    print(placement_table(config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
