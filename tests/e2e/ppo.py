"""PPO with a critic, then grpo with a KL penalty, on rollouts of an agent:
``python -m tests.e2e.ppo FOLDER``."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from openrlhf_ext.config import load_config
from openrlhf_ext.driver import job, settings
from openrlhf_ext.driver.cluster import RaySession
from openrlhf_ext.reporting import EventLog
from tests.e2e.jobs import Task

# the policy has tensor parallelism 2, the critic two copies on ranks of its own
CRITIC = {
    "algo__advantage__estimator": "gae", "algo__advantage__lambd": 0.95, "critic__num_gpus_per_node": 2,
    "critic__megatron__tensor_parallel_size": 1, "critic__adam__lr": 1e-3, "critic__freezing_steps": 0,
    "critic__save_value_network": "true", "train__batch_size": 16,
}  # fmt: skip
# two turns of six tokens; its first three responses fail, each in a way of its own
AGENT = """
import asyncio
from copy import deepcopy
from openrlhf_ext.compat import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    made = 0

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        self.made += 1
        number = self.made
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        feedback = hf_tokenizer(" no ", add_special_tokens=False)["input_ids"]
        ranges, logprobs, text = [], [0.0] * len(tokens), ""
        params = deepcopy(sampling_params)
        params.max_tokens = 6
        for turn in range(2):
            output = (await llm_engine.generate(tokens, params)).outputs[0]
            if number == 1:
                raise ZeroDivisionError("the environment broke")
            if number == 2:
                await asyncio.sleep(3600)
            ranges.append((len(tokens), len(tokens) + len(output.token_ids)))
            tokens = tokens + list(output.token_ids)
            logprobs += [scores[token].logprob for token, scores in zip(output.token_ids, output.logprobs)]
            text += output.text
            if turn == 0:
                tokens, logprobs = tokens + feedback, logprobs + [0.0] * len(feedback)
        share = sum(c.isalnum() for c in text) / max(1, len(text))
        return {
            "observation_tokens": tokens, "action_ranges": ranges, "rollout_log_probs": logprobs,
            "reward": None if number == 3 else share, "scores": float(share > 0.4),
            "truncated": False, "extra_logs": {"turns": len(ranges)},
        }
"""
ON_AGENT = {"reward__remote_url": "null", "reward__timeout_s": 5}
ADAPTIVE_KL = {"algo__kl__init_coef": 0.05, "algo__kl__target": 0.01, "algo__kl__horizon": 100}
IN_LOSS = {"algo__kl__init_coef": 0.1, "algo__kl__estimator": "k3", "algo__kl__use_loss": "true"}


def main(folder: Path) -> None:
    task = Task(folder)
    (folder / "agent.py").write_text(AGENT)
    agent = {**ON_AGENT, "train__agent_func_path": folder / "agent.py"}
    base = load_config(task.options("ppo", **CRITIC, **ADAPTIVE_KL, **agent))
    session = RaySession(
        policy_ranks=base.training_ranks, engines=1, env=settings.worker_env(base), verbose=False
    )
    with session:
        parts = job.build_parts(base, session, EventLog())
        for config in (base, load_config(task.options("grpo", **IN_LOSS, **agent))):
            loop = job.build_loop(dataclasses.replace(parts, config=config))
            loop.run()
            loop.recorder.close()
        parts.auxiliary.save(base)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
