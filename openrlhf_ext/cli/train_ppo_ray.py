"""``python -m openrlhf_ext.cli.train_ppo_ray --config FILE.yaml [--entity.name value ...]``: one training run."""

from __future__ import annotations

import logging
import os
import sys


def main(argv: list[str] | None = None) -> int:
    """Checks the configuration, then runs it. Exit code 2: the configuration is wrong; 1: the run failed; 130: Ctrl-C."""
    from openrlhf_ext.config import ConfigError, load_config

    # read when tqdm and Ray are first imported, so set before
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    try:
        config = load_config(sys.argv[1:] if argv is None else argv)
        check_algorithm(config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    for warning in config.warnings:
        logging.getLogger("openrlhf_ext").warning(warning)
    if config.dry_run:
        return dry_run(config)
    from openrlhf_ext.controller.job import run

    return run(config)


def check_algorithm(config) -> None:
    """The algorithm's own options, which only ``openrlhf_ext.algorithms`` knows."""
    from openrlhf_ext.algorithms import get_algorithm
    from openrlhf_ext.config import ConfigError, Violation

    name, options, correction = config.algorithm_options()
    try:
        get_algorithm(name, correction=correction, **options)
    except ValueError as error:
        raise ConfigError([Violation((f"algo.{name}",), f"algo.{name}: {error}")]) from error


def dry_run(config) -> int:
    """Prints the resolved configuration and where every rank and engine goes."""
    from openrlhf_ext.config import format_config, placement_table

    print(format_config(config))
    print(placement_table(config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
