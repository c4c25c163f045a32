from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from openrlhf_ext.options.sections import Reward
from openrlhf_ext.rewards.executor import HttpReward, open_grader
from openrlhf_ext.rewards.grading import (
    RewardInvalid,
    RewardPoolClosed,
    RewardServerError,
    RewardTimeout,
)
from tests.patience import PATIENCE_S

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def serve(handler: Handler) -> tuple[web.AppRunner, str]:
    app = web.Application()
    app.router.add_post("/reward", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/reward"


def grade_with(
    handler: Handler, urls: tuple[str, ...] = (), samples: int = 1, **options: float
) -> list[object]:
    async def run() -> list[object]:
        runner, url = await serve(handler)
        grader = HttpReward((*urls, url), **{"timeout_s": PATIENCE_S, "pause_s": 0.01, **options})
        try:
            return [await grader.grade("2+2=4", "2+2=", "4") for _ in range(samples)]
        finally:
            await grader.aclose()
            await runner.cleanup()

    return asyncio.run(run())


def test_request_and_answer_have_upstreams_format() -> None:
    seen = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response({"rewards": [0.5], "scores": [1], "extra_logs": {"format": [1.0]}})

    (result,) = grade_with(handler)
    assert seen == [{"query": ["2+2=4"], "prompts": ["2+2="], "labels": ["4"]}]
    assert (result.reward, result.score, result.extra_logs) == (0.5, 1.0, {"format": 1.0})


def test_a_busy_server_is_asked_again() -> None:
    calls = []

    async def handler(_: web.Request) -> web.Response:
        calls.append(1)
        return web.Response(status=503) if len(calls) < 3 else web.json_response({"rewards": 1.0})

    assert grade_with(handler)[0].reward == 1.0
    assert len(calls) == 3


def test_an_unreachable_server_is_passed_over() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"rewards": 1.0})

    results = grade_with(handler, urls=("http://127.0.0.1:9/reward",), samples=3)
    assert [result.reward for result in results] == [1.0] * 3


def test_errors_say_what_the_server_said_and_carry_the_sample() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=500, text="model not loaded")

    with pytest.raises(
        RewardServerError, match=r"500 .*model not loaded \(request 2, the last\)"
    ) as caught:
        grade_with(handler, retries=1)
    assert (caught.value.prompt, caught.value.completion, caught.value.label) == ("2+2=", "4", "4")


def test_no_message_of_a_server_has_its_password(caplog) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(text="<html>")

    secret = "w0rd:x%40y"
    with pytest.raises(
        RewardServerError, match=r"reward server http://\(hidden\)@127.0.0.1:9/f: "
    ) as caught:
        grade_with(handler, urls=(f"http://me:{secret}@127.0.0.1:9/f",) * 2, retries=1)
    shown = "".join(traceback.format_exception(caught.value))
    assert "(request 1 of 2)" in caplog.text
    assert not [part for part in ("w0rd", "x@y", "x%40y") if part in caplog.text + shown]
    with pytest.raises(ValueError) as refused:
        open_grader(Reward(remote_url=f"http://me:{secret}@h/f,reward.py"))
    assert "http://(hidden)@h/f" in str(refused.value) and "w0rd" not in str(refused.value)


def test_a_refused_request_is_not_repeated() -> None:
    calls = []

    async def handler(_: web.Request) -> web.Response:
        calls.append(1)
        return web.Response(status=422, text="no labels")

    with pytest.raises(RewardServerError, match="422"):
        grade_with(handler)
    assert len(calls) == 1


def test_a_slow_server_passes_the_deadline() -> None:
    async def handler(_: web.Request) -> web.Response:
        await asyncio.sleep(3600)
        return web.Response()

    with pytest.raises(RewardTimeout, match=r"within 0.1 s \(--reward.timeout_s\)"):
        grade_with(handler, timeout_s=0.1, retries=1)


@pytest.mark.parametrize("text", ["[1.0]", '{"rewards": null}', '{"rewards": NaN}', "<html>"])
def test_an_invalid_answer_is_refused(text: str) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(text=text)

    with pytest.raises(RewardInvalid):
        grade_with(handler)


@pytest.mark.parametrize(
    ("text", "charset"),
    [
        ("[" * 200_000, "utf-8"),
        ("1e400", "utf-8"),
        ('{"rewards": 1}', "base64"),
        ('{"rewards": 1}', "none-such"),
        ("\u00e9", "latin-1"),
        ("\u00e9", "utf-8"),
        ("", "utf-8"),
        (f'{{"rewards": {"[" * 900}{"]" * 900}}}', "utf-8"),
        (f'{{"rewards": {"9" * 5000}}}', "utf-8"),
    ],
)
@pytest.mark.parametrize("status", [200, 404, 500])
def test_whatever_a_server_sends_is_a_failure_of_the_sample(
    text: str, charset: str, status: int
) -> None:
    async def handler(_: web.Request) -> web.Response:
        kind = {"Content-Type": f"application/json; charset={charset}"}
        return web.Response(status=status, body=text.encode("latin-1"), headers=kind)

    with pytest.raises(RewardInvalid if status == 200 else RewardServerError):
        grade_with(handler, retries=0)


@pytest.mark.parametrize("status", [200, 404, 500])
def test_a_body_without_an_end_is_read_up_to_its_bound(status: int) -> None:
    sent = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        while True:
            await response.write(b"9" * (1 << 16))
            sent += 1 << 16

    with pytest.raises(
        RewardInvalid if status == 200 else RewardServerError, match="4 MiB|answered [45]0"
    ):
        grade_with(handler, retries=0)
    assert sent < 16 << 20


def test_grading_after_close_is_refused() -> None:
    async def run() -> None:
        grader = HttpReward(["http://127.0.0.1:9"])
        await grader.aclose()
        await grader.grade("", "", "")

    with pytest.raises(RewardPoolClosed):
        asyncio.run(run())
