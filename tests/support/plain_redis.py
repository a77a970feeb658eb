"""The queue by redis-py and the Lua files of this project, nothing more."""

import base64
import hashlib
import json
import secrets

import redis

from penstock.schemas.redis.script import script_text


class Plain:
    """What docs/protocol.md says, in code."""

    def __init__(self, url: str, model: str, lane: int = 0) -> None:
        self.redis = redis.Redis.from_url(url, decode_responses=True)
        self.model = model
        self.prefix = f"penstock:{{{model}:{lane}}}:"
        digest = hashlib.blake2b(model.encode(), digest_size=5).digest()
        self.label = base64.b32encode(digest).decode().lower()[:6] + str(lane)
        self.script = self.redis.register_script(script_text("jobs/enqueue")[0])

    def new_id(self) -> str:
        unique = base64.b32encode(secrets.token_bytes(17)).decode().lower()[:26]
        return f"job_{self.label}_{unique}"

    def enqueue(self, job_id: str, reply_to: str, **fields: object) -> list[str]:
        job = json.dumps({"job_id": job_id, "model": self.model, **fields})
        digest = hashlib.sha256(job.encode()).hexdigest()
        arguments = [job_id, digest, job, reply_to, json.dumps({"timeout_ms": 60_000})]
        reply: list[str] = self.script(keys=[self.prefix], args=arguments)
        return reply

    def events(self, pubsub: redis.client.PubSub, job_id: str) -> list[dict[str, object]]:
        """What arrives for a job, to its end."""
        events: list[dict[str, object]] = []
        while not events or events[-1]["type"] == "delta":
            message = pubsub.get_message(ignore_subscribe_messages=True, timeout=60)
            assert message is not None, "nothing came for 5 seconds"
            lines = [json.loads(line) for line in message["data"].split("\n")]
            events += [line["event"] for line in lines if line["job_id"] == job_id]
        return events
