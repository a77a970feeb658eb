"""penstock webhooks: an operator's view of one tenant's receivers and of what they were sent."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence

from pydantic import Field

from gateway.webhooks import Webhooks
from schemas.connection import connect
from schemas.exit_status import BAD_USAGE
from schemas.process import Settings, load_settings, write_log_to_stderr
from schemas.servers import Redis

USAGE = """\
usage: penstock webhooks VERB [SUBJECT] [--tenant NAME] [--redis-url URL]

  add URL        send every event of the tenant there; prints the secret that signs them
  list           the tenant's receivers, and what was sent lately, the newest first
  remove ID      no more events to a receiver
  redeliver ID   send a webhook again, under the same id
  secret         what signs the tenant's webhooks; `secret new` draws another
"""


class WebhooksSettings(Settings):
    """Receivers of one tenant's events."""

    redis_url: str = Field("redis://127.0.0.1:6379/0", description="where the jobs are")
    tenant: str = Field("default", min_length=1)


async def add(webhooks: Webhooks, tenant: str, url: str) -> int:
    endpoint = await webhooks.add(tenant, url)
    print(f"{endpoint.id}  {endpoint.url}\nsecret: {await webhooks.secret(tenant)}")
    return 0


async def show(webhooks: Webhooks, tenant: str, _: str) -> int:
    for endpoint in await webhooks.endpoints(tenant):
        print(f"{endpoint.id}  {endpoint.url}")
    for webhook in await webhooks.webhooks(tenant):
        tried = f"{webhook.attempts} attempts" if webhook.attempts != 1 else "1 attempt"
        answer = f", {webhook.answer}" if webhook.answer else ""
        print(f"{webhook.id}  {webhook.state}  {tried}{answer}  {webhook.url}")
    return 0


async def remove(webhooks: Webhooks, tenant: str, endpoint_id: str) -> int:
    return _known(await webhooks.remove(tenant, endpoint_id), tenant, endpoint_id)


async def redeliver(webhooks: Webhooks, tenant: str, webhook_id: str) -> int:
    return _known(await webhooks.redeliver(tenant, webhook_id), tenant, webhook_id)


async def secret(webhooks: Webhooks, tenant: str, which: str) -> int:
    if which == "new":
        await webhooks.forget_secret(tenant)
    print(await webhooks.secret(tenant))
    return 0


Verb = Callable[[Webhooks, str, str], Awaitable[int]]
VERBS: dict[str, Verb] = {
    "add": add,
    "list": show,
    "remove": remove,
    "redeliver": redeliver,
    "secret": secret,
}
NEED_A_SUBJECT = {"add", "remove", "redeliver"}


def main(argv: Sequence[str]) -> int:
    verb, *rest = argv or ["--help"]
    subject = rest.pop(0) if rest and not rest[0].startswith("-") else ""
    if verb not in VERBS or (verb in NEED_A_SUBJECT and not subject):
        asked = verb in ("-h", "--help")
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else BAD_USAGE
    settings = load_settings(WebhooksSettings, f"penstock webhooks {verb}", rest)
    write_log_to_stderr("webhooks", settings.log_level)

    async def run() -> int:
        redis: Redis = connect(settings.redis_url)
        try:
            return await VERBS[verb](Webhooks(redis), settings.tenant, subject)
        finally:
            await redis.aclose()

    return asyncio.run(run())


def _known(is_there: bool, tenant: str, subject: str) -> int:
    if not is_there:
        print(f"{subject} is not known of tenant {tenant!r}", file=sys.stderr)
    return 0 if is_there else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
