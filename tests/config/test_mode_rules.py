"""Colocated and streaming training: which options go together."""

from __future__ import annotations

import pytest

from openrlhf_ext.config import placement_table

COLOCATED = ("--train.colocate_all", "--ds.enable_sleep", "--vllm.enable_sleep")
TWO_ENGINES = ("--vllm.num_engines", "2")  # as many as the run of conftest.py has ranks


def test_a_colocated_run_has_as_many_engine_workers_as_policy_ranks(load, problems):
    assert load(*COLOCATED, *TWO_ENGINES).warnings == ()
    assert problems(*COLOCATED, "--vllm.tensor_parallel_size", "2") == []
    (message,) = problems(*COLOCATED)
    assert "got 2 and 1 * 1 = 1" in message and "change vllm.num_engines" in message


def test_a_colocated_run_whose_parts_do_not_sleep_is_warned_about(load):
    (warning,) = load("--train.colocate_all", "--vllm.enable_sleep", *TWO_ENGINES).warnings
    assert "vllm.gpu_memory_utilization must leave room" in warning


@pytest.mark.parametrize("option", ["ds.enable_sleep", "vllm.enable_sleep"])
def test_only_sharers_sleep(problems, option):
    (message,) = problems(f"--{option}")
    assert message.startswith(option) and "add --train.colocate_all" in message


def test_partial_rollouts_are_asynchronous_and_asynchronous_runs_are_not_colocated(problems):
    assert problems("--train.async_enable", "--train.partial_rollout_enable", "--train.async_queue_size", "2") == []
    assert "exclude each other" in problems("--train.async_enable", *COLOCATED, *TWO_ENGINES)[0]


def test_openrlhfs_names_come_to_a_number_of_versions_that_a_token_may_lag(load, problems):
    def streaming(*words: str):
        config = load(*words)
        return config.max_staleness, config.partial_rollouts

    assert streaming() == (0, True)
    assert streaming("--train.max_staleness", "2") == (2, True)
    assert streaming("--train.async_enable") == (1, False)
    assert streaming("--train.async_enable", "--train.async_queue_size", "3") == (3, False)
    assert streaming("--train.async_enable", "--train.partial_rollout_enable") == (1, True)
    assert streaming("--train.async_enable", "--train.max_staleness", "2") == (2, False)
    two_names = ("--train.async_enable", "--train.max_staleness", "2", "--train.async_queue_size", "3")
    assert "two names of one number, got 2 and 3" in problems(*two_names)[0]
    assert "train.max_staleness 0 forbids" in problems("--train.async_enable", "--train.max_staleness", "0")[0]
    assert "exclude each other" in problems("--train.max_staleness", "1", *COLOCATED, *TWO_ENGINES)[0]


def test_late_groups_are_corrected_or_dropped(load, problems):
    uncorrected = ("--train.max_staleness", "1", "--algo.advantage.is_correction_level", "off")
    (message,) = problems(*uncorrected)
    assert "train.late_groups train needs an importance correction" in message and "drop" in message
    assert problems(*uncorrected, "--train.late_groups", "drop") == []
    (warning,) = load("--train.late_groups", "drop").warnings
    assert "train.late_groups has no effect: got drop, and train.max_staleness is 0: no group is late" in warning


def test_an_engine_can_be_asked_for_a_whole_group(problems):
    (message,) = problems("--vllm.max_requests", "3", "--rollout.n_samples_per_prompt", "4")
    assert "vllm.max_requests must be at least rollout.n_samples_per_prompt" in message and "got 3 and 4" in message


def test_tensor_parallel_groups_fit_into_a_node(problems):
    two_nodes = ("--actor.num_nodes", "2", "--megatron.tensor_parallel_size", "2", "--actor.num_gpus_per_node")
    assert problems(*two_nodes, "2") == []
    (message,) = problems(*two_nodes, "1")
    assert "every layer would wait for the network: got 2 and 1" in message


def test_asynchronous_runs_correct_their_samples_unless_told_not_to(load):
    def correction(*words: str):
        return load(*words).algorithm_options()[2]

    assert correction() is None
    assert correction("--train.async_enable") == {
        "level": "token", "mode": "mask", "gating": "ratio", "threshold": [0.5, 5.0],
    }  # fmt: skip
    assert correction("--train.async_enable", "--algo.advantage.is_correction_level", "off") is None
    assert correction("--train.async_enable", "--algo.advantage.is_correction_level", "seq")["level"] == "seq"
    assert correction("--train.async_enable", "--algo.advantage.is_correction_mode", "clip")["mode"] == "clip"


def test_options_without_effect_are_told(load):
    (warning,) = load("--train.async_queue_size", "2").warnings
    assert warning.startswith("train.async_queue_size has no effect: got 2, and train.async_enable is off")
    (warning,) = load(
        "--train.async_enable", "--train.partial_rollout_enable", "--train.full_determinism_enable"
    ).warnings
    assert "two runs differ" in warning


def test_an_engine_that_hangs_is_found_before_its_batch_is_given_up(load):
    shorter = ("--rollout.timeout_s", "200")
    (warning,) = load(*shorter).warnings
    assert "vllm.hang_timeout_s 300 is not below rollout.timeout_s 200" in warning
    assert load(*shorter, "--vllm.hang_timeout_s", "100").warnings == ()
    assert load(*shorter, "--vllm.max_restarts", "0").warnings == ()


def test_the_placement_shows_which_ranks_share_gpus_with_which_engine(load):
    table = placement_table(load(*COLOCATED, *TWO_ENGINES))
    assert "2 vLLM engines x tp 1, bf16, on the GPUs of these policy ranks\n" in table
    assert "  engine  policy ranks\n       0             0\n       1             1\n" in table
    assert "GPUs of their own, placed by Ray" in placement_table(load())
