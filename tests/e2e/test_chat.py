"""What most recipes are: a Llama in bf16, prompts through a chat template, groups that teach
nothing filtered out."""

from __future__ import annotations

import json
import math

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from openrlhf_ext.reporting.lines import read_lines
from tests.e2e.jobs import ONE_RANK, Job, Task
from tests.models import CHAT_TEMPLATE, make_tiny_policy

pytestmark = pytest.mark.e2e

PROMPTS = 24
# of every three prompts one is answered right by all completions, one by none, one by every other
# completion or so
REWARD = """
import zlib

def reward_func(queries, prompts, labels, **kwargs):
    completion = queries[0].removeprefix(prompts[0])
    score = [1.0, 0.0, float(zlib.crc32(completion.encode()) % 2)][int(labels[0]) % 3]
    return {"rewards": 2 * score - 1, "scores": score, "extra_logs": {"number": int(labels[0])}}
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Task, Job]:
    """A finished run of it; the vocabulary is larger than the tokenizer's, as with most real
    models."""
    task = Task.make(tmp_path_factory.mktemp("chat"), reward=REWARD)
    make_tiny_policy(task.folder / "llama", "llama", chat_template=CHAT_TEMPLATE, vocab_size=320)
    rows = [{"question": f"What is {i} + 1?", "answer": str(i)} for i in range(PROMPTS)]
    Dataset.from_list(rows).to_parquet(task.folder / "prompts.parquet")
    options = task.options(
        "run",
        **ONE_RANK,
        actor__model_name_or_path=task.folder / "llama",
        megatron__param_dtype="bf16",
        data__prompt_dataset=task.folder / "prompts.parquet",
        data__max_len=256,
        data__apply_chat_template="true",
        algo__advantage__estimator="dapo",
        algo__dynamic_filtering_enable="true",
        rollout__batch_size=2,
        rollout__top_p=0.9,
        train__batch_size=8,
        logger__samples_every=1,
        logger__samples_groups=0,
        logger__tensorboard_dir=task.folder / "tensorboard",
        ckpt__save_steps=1,
        ckpt__path=task.folder / "ckpt",
    )
    run = Job([*options, "--ckpt.save_hf", "--ckpt.disable_ds"], task.folder / "log")
    assert run.finish() == 0, run.text
    return task, run


def records_of(task: Task) -> list[dict]:
    return [record for record in task.metrics("run") if "loss/policy" in record]


def test_only_groups_that_are_partly_right_are_trained_on(job: tuple[Task, Job]) -> None:
    task, _ = job
    records = records_of(task)
    trained = [sample for _, sample in read_lines(task.folder / "run/samples.jsonl")]
    groups = [trained[start : start + 4] for start in range(0, len(trained), 4)]
    assert len(records) >= 2
    assert (
        len(groups) + records[-1]["groups/dropped_filtered"]
        == records[-1]["prompts/consumed"]
        <= PROMPTS
    )
    for group in groups:
        assert (
            len({sample["prompt"] for sample in group})
            == 1
            < len({sample["score"] for sample in group})
        )
    for record in records:
        assert 0 < record["groups/kept_fraction"] < 1 and 0 < record["accuracy/mean"] < 1
        assert record["grad_norm"] > 0 and record["algorithm/degenerate_groups"] == 0
        # the engine's distribution has lost what is beyond top_p, so that its log-probs are larger
        # by that
        assert record["mismatch/mean_abs"] == pytest.approx(-math.log(0.9), rel=0.2)


def test_the_model_reads_the_chat_template(job: tuple[Task, Job]) -> None:
    task, _ = job
    begin = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n"
    )
    prompts = {sample["prompt"] for _, sample in read_lines(task.folder / "run/samples.jsonl")}
    asked = {
        f"{begin}<|im_start|>user\nWhat is {i} + 1?<|im_end|>\n<|im_start|>assistant\n"
        for i in range(PROMPTS)
    }
    assert prompts and prompts < asked


def test_every_checkpoint_is_there_in_hugging_face_form_and_so_are_tensorboard_s_files(
    job: tuple[Task, Job],
) -> None:
    task, _ = job
    steps = len(records_of(task))
    folders = sorted(path.name for path in (task.folder / "ckpt").glob("global_step*"))
    assert folders == [f"global_step{step}_hf" for step in range(max(1, steps - 2), steps + 1)], (
        "of the last three"
    )
    newest, final = task.folder / "ckpt" / folders[-1], task.folder / "run"
    assert json.loads((newest / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    before, after, end = (
        load_file(path / "model.safetensors") for path in (task.folder / "llama", newest, final)
    )
    assert before.keys() == after.keys() == end.keys() and all(
        torch.equal(after[name], end[name]) for name in end
    )
    assert any(not torch.equal(before[name].bfloat16(), after[name]) for name in after), (
        "no step moved anything"
    )
    (events,) = (path for path in (task.folder / "tensorboard").rglob("*") if path.is_file())
    assert b"reward/mean" in events.read_bytes()
