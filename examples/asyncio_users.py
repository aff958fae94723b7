#!/usr/bin/env python
"""Many users of one engine in asyncio: they stream at the same time, and one of them leaves in the middle.

python examples/asyncio_users.py [--model FOLDER_OR_HUB_ID] [--users 8]
"""

import argparse
import asyncio

import hybrid

DOCUMENT = (
    "The import statement combines two operations; it searches for the named module, then binds the results. " * 6
)
TOPICS = ("module", "statement", "search", "name", "result", "operation", "import", "binding")


async def user(engine: hybrid.AsyncEngine, number: int) -> None:
    """Stream one answer, and print it."""
    question = f"{DOCUMENT}\n\nThe {TOPICS[number % len(TOPICS)]} is"
    text = ""
    async for output in engine.stream(question, hybrid.SamplingParams(max_new_tokens=24), request_id=f"user-{number}"):
        text += output.delta  # a server would send this piece to its client
        if number == 2 and len(output.token_ids) >= 4:
            print(f"user 2 left after {len(output.token_ids)} tokens")
            raise asyncio.CancelledError  # as when a client disconnects: the request is aborted
    hit = f"{output.usage.cached_tokens} of {output.usage.prompt_tokens} tokens cached"
    print(f"user {number}: {text!r} ({output.finish_reason}, {hit})")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="folder or hub id (default: the model inside the package)")
    parser.add_argument("--users", type=int, default=8, help="number of users (default: 8)")
    args = parser.parse_args()

    engine = hybrid.AsyncEngine.from_pretrained(args.model, cache=hybrid.CacheConfig(memory="64MiB"))
    async with engine:
        await engine.generate(DOCUMENT, hybrid.SamplingParams(max_new_tokens=1))  # known before the first user asks
        users = [asyncio.create_task(user(engine, number)) for number in range(args.users)]
        await asyncio.gather(*users, return_exceptions=True)
        while engine.stats().running:  # the abort is done by the engine's thread
            await asyncio.sleep(0.01)
        stats = engine.stats()
        print(f"{stats.finished['stop'] + stats.finished['length'] - 1} answers, {stats.finished['abort']} aborted")
        print(
            f"first token after {stats.time_to_first_token.mean:.3f} s, {stats.tokens_per_second:.0f} tokens per second"
        )
        await engine.call(lambda own: own.cache.audit())


if __name__ == "__main__":
    asyncio.run(main())
