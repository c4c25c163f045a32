"""A checkpoint that vLLM serves on CPU, and the agent and the engine that the engine tests run."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from vllm import SamplingParams

from openrlhf_ext.rewards.agent import agent_executor
from openrlhf_ext.rollout.engine import RolloutEngine
from openrlhf_ext.rollout.response import GroupRequest, Response
from openrlhf_ext.rollout.sync.plan import Receipt
from tests.patience import PATIENCE_S

VOCAB = 512


def save_checkpoint(path: Path, tied: bool, vocab: int = VOCAB) -> None:
    """A random Qwen2 with head size 32 (vLLM's CPU attention has no smaller one) and a byte-level
    tokenizer."""
    random_model(0, tied, vocab).save_pretrained(path)
    save_tokenizer(path)


def save_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(["what is 12 times 31? Answer: 372"], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>"
    ).save_pretrained(path)


def random_model(seed: int, tied: bool, vocab: int = VOCAB) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=None,
        initializer_range=0.1,
    )
    return Qwen2ForCausalLM(config).float().eval()


@torch.no_grad()
def logprobs(model: PreTrainedModel, tokens: list[int], temperature: float = 1.0) -> Tensor:
    """(T-1,) log-prob of every token but the first, by transformers."""
    logits_TV = model(torch.tensor([tokens])).logits[0, :-1].float() / temperature
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]


class CountingExecutor:
    """Generates once for each sample, and grades by waiting."""

    def __init__(self, grading_s: float) -> None:
        self.grading_s = grading_s

    async def respond(self, request: GroupRequest, tokenizer: Any, engine: Any) -> list[list[int]]:
        assert tokenizer.decode(tokenizer("12")["input_ids"]) == "12"
        return await asyncio.gather(
            *(self._respond(request, i, engine) for i in range(request.samples))
        )

    async def _respond(self, request: GroupRequest, sample: int, engine: Any) -> list[int]:
        params = engine.sampling_params(
            request.sampling,
            max_tokens=request.sampling.max_new_tokens,
            detokenize=False,
            ignore_eos=True,
            seed=request.seed_of(sample),
        )
        output = await engine.generate([ord(letter) for letter in request.prompt], params)
        await asyncio.sleep(self.grading_s)
        return list(output.outputs[0].token_ids)

    def take_failures(self) -> list[str]:
        return ["no grade"]


def lose_weights(worker: Any) -> None:
    for parameter in worker.model_runner.get_model().parameters():
        parameter.data.fill_(math.nan)


class SabotagedEngine(RolloutEngine):
    """An engine whose failures can be switched on."""

    forget_to_reset = False
    halted = False
    events: list[Any] | None = None

    async def note_events(self) -> list[Any] | None:
        """What happened since the last call: versions of updates, lengths of finished requests,
        answered probes."""
        self.events, noted = [], self.events
        return noted

    async def sleep(self, level: int = 1) -> None:
        """On CPU vLLM loses nothing; here a sleep at level 2 leaves what it leaves on a GPU:
        buffers, no weights."""
        await super().sleep(level)
        if level == 2:
            await self.llm.collective_rpc(lose_weights)

    async def halt(self) -> None:
        """Until it takes weights: what is in flight now is then, too."""
        self.halted = True
        await self.pause_generation()

    async def receive_weights(self, version: int) -> Receipt:
        if self.halted:
            self.halted = False
            await self.resume_generation()
        receipt = await super().receive_weights(version)
        if self.events is not None:
            self.events.append(f"update {version}")
            self.answer = asyncio.create_task(self.probe_logprobs(self._probe_tokens))
            self.answer.add_done_callback(lambda _: self.events.append("probe"))
        return receipt

    async def generate(self, *args: Any) -> Any:
        output = await super().generate(*args)
        if self.events is not None:
            self.events.append(len(output.outputs[0].token_ids))
        return output

    async def generate_all(self, token_ids: list[int], lengths: list[int]) -> None:
        """One request for each length, in this order: calls from outside may be begun in another
        one."""
        params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
        await asyncio.gather(*(self.generate(token_ids, each) for each in params))

    async def episodes(self, agent: str, request: GroupRequest) -> list[Response]:
        """Of an agent's file."""
        return await agent_executor(agent, PATIENCE_S, 0, 0.0).respond(
            request, self._tokenizer, self
        )

    async def batch_limits(self) -> tuple[int, int]:
        scheduler = self.llm._engine.vllm_config.scheduler_config
        return scheduler.max_num_seqs, scheduler.max_num_batched_tokens

    async def sabotage(
        self, *, forget_to_reset: bool = False, request_timeout_s: float = PATIENCE_S
    ) -> None:
        self.forget_to_reset = forget_to_reset
        self._request_timeout_s = request_timeout_s

    async def reset_prefix_cache(self) -> None:
        if not self.forget_to_reset:
            await super().reset_prefix_cache()
