"""Streams that clients break off, each in its own way: the request ends, and holds nothing. They
run where the clients are installed (`make clients`)."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from hybrid.server.service import Server
from support.scripted import Script
from support.served import ASKED, Poster, served

LONG = "</think>\n\n" + "one word after the other, " * 120


@pytest.fixture(scope="module")
def parts(tiny: Any) -> Iterator[tuple[Script, Poster, Server]]:
    script = Script(tiny)
    with served(script.engine) as (url, server):
        yield script, Poster(url), server


@pytest.fixture
def left(parts: tuple[Script, Poster, Server]) -> Iterator[Callable[[], None]]:
    """A check that the latest request was broken off, and that nothing is held for it. The next answer is long."""
    script, post, server = parts
    script.says(LONG)

    def check() -> None:
        engine, cache = server.engine.engine, server.engine.engine.cache
        for _ in range(600):
            stats, memory = engine.stats(), cache.stats()
            held = stats.running, stats.waiting, memory.pages_private, memory.states_private, len(server.records)
            if not any(held):
                break
            time.sleep(0.05)
        assert not any(held), held
        ended = post.get("/live").json()["ended"][0]
        assert ended["state"] == "abort" and ended["reason"] == "the client left"
        assert ended.get("completion_tokens", 0) < len(script.tokens(LONG))
        script.says(LONG)

    yield check
    script.says()


def test_streams_that_a_client_of_openai_breaks_off(parts: tuple[Script, Poster, Server], left: Any) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{parts[1].address}/v1", api_key="none", max_retries=0)
    with client.chat.completions.create(model="tiny", messages=ASKED, stream=True) as stream:
        next(iter(stream))
    left()
    with client.responses.create(model="tiny", input="x", stream=True) as stream:
        next(iter(stream))
    left()


def test_streams_that_a_client_of_anthropic_breaks_off(parts: tuple[Script, Poster, Server], left: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=parts[1].address, api_key="none", max_retries=0)
    with client.messages.stream(model="tiny", max_tokens=1000, messages=ASKED) as stream:
        next(iter(stream.text_stream))
    left()


def test_streams_that_a_client_of_litellm_breaks_off(parts: tuple[Script, Poster, Server], left: Any) -> None:
    litellm = pytest.importorskip("litellm")
    address = parts[1].address
    for name, base in (("openai/tiny", f"{address}/v1"), ("anthropic/tiny", address)):
        settings = {"model": name, "api_base": base, "api_key": "none", "max_tokens": 1000, "messages": ASKED}
        stream = litellm.completion(stream=True, **settings)
        next(stream)
        stream.close()
        left()

        async def begin(settings: Any) -> None:
            async with aclosing(await litellm.acompletion(stream=True, **settings)) as stream:
                await anext(aiter(stream))

        asyncio.run(begin(settings))
        left()


def test_streams_that_an_agent_of_openai_breaks_off(parts: tuple[Script, Poster, Server], left: Any) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)

    async def run(kind: Any) -> None:
        client = openai.AsyncOpenAI(base_url=f"{parts[1].address}/v1", api_key="none", max_retries=0)
        agent = agents.Agent(name="teller", model=kind(model="tiny", openai_client=client))
        streamed = agents.Runner.run_streamed(agent, "Tell.")
        async for event in streamed.stream_events():
            if event.type == "raw_response_event":
                streamed.cancel()
        await asyncio.to_thread(left)

    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        asyncio.run(run(kind))


def test_streams_that_an_agent_of_pydantic_breaks_off(parts: tuple[Script, Poster, Server], left: Any) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{parts[1].address}/v1", api_key="none")
    agent = pydantic_ai.Agent(OpenAIChatModel("tiny", provider=provider))

    async def run() -> None:
        async with agent.run_stream("Tell.") as streamed:
            texts: AsyncIterator[str] = streamed.stream_text(delta=True)
            await anext(texts)
            await streamed.cancel()
        await asyncio.to_thread(left)

    asyncio.run(run())


def test_streams_that_a_model_of_smolagents_breaks_off(parts: tuple[Script, Poster, Server], left: Any) -> None:
    smolagents = pytest.importorskip("smolagents")
    chat = smolagents.OpenAIModel(model_id="tiny", api_base=f"{parts[1].address}/v1", api_key="none")
    message = smolagents.ChatMessage(role="user", content="Tell.")
    stream = chat.generate_stream([message])
    next(stream)
    stream.close()
    left()
