"""Enqueue a job and read its events with nothing but redis-py; docs/protocol.md has the rules.

    python docs/examples/plain_redis.py [redis://127.0.0.1:6379/0 [MODEL]]

A service without Penstock keeps the text that
`python -m penstock.schemas.redis.script jobs/enqueue` prints in a file of its own.
"""

import base64
import hashlib
import json
import secrets
import subprocess
import sys

import redis

URL = sys.argv[1] if len(sys.argv) > 1 else "redis://127.0.0.1:6379/0"
MODEL = sys.argv[2] if len(sys.argv) > 2 else "penstock-5m"

printed = [sys.executable, "-m", "penstock.schemas.redis.script", "jobs/enqueue"]
script = subprocess.run(printed, capture_output=True, text=True, check=True).stdout
label = base64.b32encode(hashlib.blake2b(MODEL.encode(), digest_size=5).digest())[:6].decode()
unique = base64.b32encode(secrets.token_bytes(17))[:26].decode()
job_id, prefix = f"job_{label}0_{unique}".lower(), f"penstock:{{{MODEL}:0}}:"
channel = f"{prefix}job:{job_id}:events"
job = {"job_id": job_id, "model": MODEL, "prompts": ["Hello"], "params": {"max_tokens": 64}}
body = json.dumps(job)

with redis.Redis.from_url(URL, decode_responses=True) as server, server.pubsub() as readings:
    readings.subscribe(channel)  # before the job is there, so that nothing is missed
    digest = hashlib.sha256(body.encode()).hexdigest()
    outcome, _, _, reason, _ = server.eval(script, 1, prefix, job_id, digest, body, channel, "{}")
    print(f"{job_id}: {outcome} {reason}".rstrip())
    for message in readings.listen() if outcome == "accepted" else ():
        if message["type"] == "message":
            events = [json.loads(line)["event"] for line in message["data"].split("\n")]
            print("".join(event.get("text", "") for event in events), end="", flush=True)
            if events[-1]["type"] != "delta":
                print("\nended:", events[-1]["type"])
                break
