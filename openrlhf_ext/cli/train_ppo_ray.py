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

    name, options, correction = config.algorithm_options()
    violations = list(kl_place_violations(name, options))
    if violations:
        options = {key: value for key, value in options.items() if key != "kl"}
    try:
        algorithm = get_algorithm(name, correction=correction, **options)
        violations += [
            Violation((f"algo.{name}",), f"algo.{name}: {rule}") for rule in trainer_rules(config, algorithm)
        ]
    except ValueError as error:
        violations.append(Violation((f"algo.{name}",), f"algo.{name}: {error}"))
    models = {"actor.model_name_or_path": (config.actor.model_name_or_path, None)}
    if config.has_critic and config.critic.model_name_or_path is not None:
        models["critic.model_name_or_path"] = (config.critic.model_name_or_path, config.ds.value_head_prefix)
    for option, (model, value_head) in models.items():
        try:
            if os.path.isdir(model):
                check_model(model, value_head)
        except ValueError as error:
            violations.append(Violation((option,), f"{option}: {error}"))
    if violations:
        raise ConfigError(violations)


def kl_place_violations(name: str, options: dict) -> Iterator:
    """The KL penalty of ``algo.kl.*`` acts where the estimator defines one."""
    from openrlhf_ext.algorithms.registry import algorithm_class
    from openrlhf_ext.config import Violation

    place, legal = options.get("kl", {}).get("place"), algorithm_class(name).kl_places
    if place is None or place in legal:
        return
    remedy = "set algo.kl.init_coef 0"
    if legal:
        remedy = f"{'add' if 'loss' in legal else 'leave out'} algo.kl.use_loss, or {remedy}"
    yield Violation(
        ("algo.kl.init_coef", "algo.kl.use_loss", "algo.advantage.estimator"),
        f"algo.advantage.estimator {name} takes a KL penalty {'only in the ' + legal[0] if legal else 'nowhere'}: got "
        f"algo.kl.init_coef {options['kl']['coef']:g} and algo.kl.use_loss {str(place == 'loss').lower()}; {remedy}",
    )


def check_model(folder: str, value_head: str | None) -> None:
    """The model is one that is built, and the files hold its tensors; a folder without weights is warned about only.

    Args:
        value_head: HF name of a critic's value head, which the files need not hold; None for a policy.

    Raises:
        ValueError: says what does not fit.
    """
    from openrlhf_ext.megatron.accounting import describe, unaccounted_tensors
    from openrlhf_ext.megatron.hf_config import read_model_shape, read_value_shape
    from openrlhf_ext.megatron.hf_files import HFCheckpoint

    shape = read_model_shape(folder) if value_head is None else read_value_shape(folder, value_head)
    if any(name.endswith(".safetensors") for name in os.listdir(folder)):
        if problems := unaccounted_tensors(HFCheckpoint(folder), shape):
            raise ValueError(f"{folder}: {describe(problems)}")


def trainer_rules(config, algorithm) -> Iterator[str]:
    """What an algorithm asks for and the trainer does not give."""
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
    """Prints the resolved configuration, where every rank and engine goes, and the proof that the model fits there.

    Returns:
        0; 2 if the model cannot be laid out as configured.
    """
    from openrlhf_ext.config import format_config, placement_table

    print(format_config(config))
    print(placement_table(config))
    if not os.path.isdir(config.actor.model_name_or_path):
        print(f"model: {config.actor.model_name_or_path} is not on this machine, so no rank of it was built")
        return 0
    from openrlhf_ext import patches

    patches.apply()
    from openrlhf_ext.planning.layout_proof import LayoutProofError

    try:
        print("\n".join(layout_proofs(config)))
    except LayoutProofError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def layout_proofs(config) -> Iterator[str]:
    """Policy and critic, every distinct rank built on the meta device from config.json alone."""
    from openrlhf_ext.controller.settings import parallel_layout
    from openrlhf_ext.megatron.base import DTYPES
    from openrlhf_ext.planning.layout_proof import prove_layout
    from openrlhf_ext.planning.table import format_proof

    policy, megatron = config.actor.model_name_or_path, config.megatron
    layout = parallel_layout(config.world_size, megatron)
    proof = prove_layout(policy, layout, DTYPES[megatron.param_dtype], megatron.distributed_optimizer_enable)
    yield f"policy, {format_proof(proof)}"
    if not config.has_critic:
        return
    model, megatron = config.critic.model_name_or_path or policy, config.critic_layout
    if not os.path.isdir(model):
        yield f"critic: {model} is not on this machine, so no rank of it was built\n"
        return
    layout = parallel_layout(config.critic_ranks, megatron)
    dtype, head = DTYPES[megatron.param_dtype], config.ds.value_head_prefix
    yield f"critic, {format_proof(prove_layout(model, layout, dtype, megatron.distributed_optimizer_enable, head))}"


if __name__ == "__main__":
    sys.exit(main())
