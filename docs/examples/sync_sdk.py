"""Enqueue a job from code without an event loop. The same idempotency key gives the same job.

python docs/examples/sync_sdk.py [redis://127.0.0.1:6379/0 [MODEL]]
"""

import sys

from penstock import SyncClient

URL = sys.argv[1] if len(sys.argv) > 1 else "redis://127.0.0.1:6379/0"
MODEL = sys.argv[2] if len(sys.argv) > 2 else None  # the only one that is served

with SyncClient(URL) as client:
    asked = {"model": MODEL, "max_tokens": 30, "background": True, "idempotency_key": "example-1"}
    job_id = client.enqueue("The capital of Norway is", **asked)
    assert client.enqueue("The capital of Norway is", **asked) == job_id
    result = client.result(job_id)
    print(f"{job_id} ended as {result.state}: {result.choices[0].text}")
