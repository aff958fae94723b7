"""64 clients of OpenAI's and Anthropic's SDKs at once. They run where the SDKs are installed (`make clients`)."""

import asyncio
from typing import Any

import pytest

from hybrid import CacheConfig, SamplingParams
from support.served import served

NUM_CLIENTS, LENGTH = 64, 12


def test_64_clients_at_once_have_the_answers_of_the_engine_alone(tiny: Any) -> None:
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    config = CacheConfig(page_size=16, chunk_size=16, memory="32MiB", deterministic=True)
    shared = {"role": "system", "content": "You are a reference of Python. " * 4}
    chats = [
        [*([shared] if at % 2 else []), {"role": "user", "content": f"What is number {at}?"}]
        for at in range(NUM_CLIENTS)
    ]
    params = [  # Anthropic's API has no seed
        SamplingParams(temperature=0, max_new_tokens=LENGTH)
        if at % 4 == 3
        else SamplingParams(seed=at, temperature=1, max_new_tokens=LENGTH)
        for at in range(NUM_CLIENTS)
    ]
    prompts = [{"messages": chat, "split_special_tokens": True} for chat in chats]
    alone = [output.text for output in tiny.with_cache(config).generate(prompts, params, progress=False)]
    barrier = asyncio.Barrier(NUM_CLIENTS)

    async def of_openai(address: str, chat: Any, at: int, is_stream: bool) -> str:
        http = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(
            base_url=f"{address}/v1", api_key="none", max_retries=0, http_client=http
        ) as client:
            body = {"model": "tiny", "messages": chat, "max_completion_tokens": LENGTH}
            body |= {"seed": at, "temperature": 1}
            await barrier.wait()
            if not is_stream:
                return (await client.chat.completions.create(**body)).choices[0].message.content
            chunks = await client.chat.completions.create(**body, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def of_anthropic(address: str, chat: Any, at: int, is_stream: bool) -> str:
        http = anthropic.DefaultAsyncHttpxClient(verify=False)
        async with anthropic.AsyncAnthropic(
            base_url=address, api_key="none", max_retries=0, http_client=http
        ) as client:
            *system, user = chat
            body = {"model": "tiny", "messages": [user], "max_tokens": LENGTH, "extra_body": {"temperature": 0}}
            body |= {"system": system[0]["content"]} if system else {}
            await barrier.wait()
            if not is_stream:
                return (await client.messages.create(**body)).content[0].text
            async with client.messages.stream(**body) as stream:
                return "".join([text async for text in stream.text_stream])

    async def ask(address: str) -> list[str]:
        clients = [of_anthropic if at % 4 == 3 else of_openai for at in range(NUM_CLIENTS)]
        asked = zip(clients, chats, strict=True)
        return await asyncio.gather(*(client(address, chat, at, at % 8 < 5) for at, (client, chat) in enumerate(asked)))

    with served(tiny.with_cache(config), requests=NUM_CLIENTS) as (url, server):
        assert asyncio.run(ask(url)) == alone  # none was refused: as many as clients run or wait
        ended = server.records.counts["", "requests_length"] + server.records.counts["", "requests_stop"]
        assert ended == NUM_CLIENTS
    assert len({*alone}) > NUM_CLIENTS / 2
