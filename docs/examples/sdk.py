"""Enqueue a job with the asynchronous SDK, follow it, and follow it again from the middle.

    python docs/examples/sdk.py [redis://127.0.0.1:6379/0 [MODEL]]

`penstock up` prints the URL of its Redis. MODEL may be left out where one model is served.
"""

import asyncio
import sys

from penstock import Client

URL = sys.argv[1] if len(sys.argv) > 1 else "redis://127.0.0.1:6379/0"
MODEL = sys.argv[2] if len(sys.argv) > 2 else None


async def main() -> None:
    async with Client.from_url(URL) as client:
        job_id = await client.enqueue(
            "Once upon a time", model=MODEL, max_tokens=60, background=True
        )
        async for event in client.stream(job_id):
            if event.type == "delta":
                print(event.text, end="", flush=True)
        result = await client.result(job_id)
        print(f"\n{job_id} ended as {result.state}: {result.usage}")

        # Any process may read the job again, from any token, for as long as it is kept.
        rest = [event async for event in client.stream(job_id, starting_after=1)]
        print("after the first token:", "".join(e.text for e in rest if e.type == "delta"))


asyncio.run(main())
