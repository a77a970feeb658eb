"""penstock webhooks: commands for one tenant's webhook receivers and what they were sent."""

import sys
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from pydantic import Field

from penstock.gateway.commands.terminal import CommandRefused, run
from penstock.gateway.webhooks.outbound import ALLOW_FLAGS
from penstock.gateway.webhooks.webhooks import Webhooks
from penstock.schemas.counted import counted
from penstock.schemas.process.exit_status import BAD_USAGE
from penstock.schemas.process.nearby import ANYWHERE
from penstock.schemas.process.start import Settings, load_settings, write_log_to_stderr
from penstock.schemas.redis.connection import connect
from penstock.schemas.redis.url import RedisUrlSetting

USAGE = """\
usage: penstock webhooks VERB [SUBJECT] [--tenant NAME] [--redis-url URL]

  add URL        send every event of the tenant there; prints the secret that signs them
  list           the tenant's receivers, and what was sent lately, the newest first
  remove ID      no more events to a receiver
  redeliver ID   send a webhook again, under the same id
  secret         what signs the tenant's webhooks; `secret new` draws another
"""


class WebhooksSettings(Settings):
    """Manage the receivers of one tenant's events."""

    redis_url: RedisUrlSetting = Field(
        ANYWHERE, description="where the queue is; unset: of the `penstock up` that runs here"
    )
    tenant: str = Field("default", min_length=1)


async def add(webhooks: Webhooks, tenant: str, url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CommandRefused(f"{url}: a receiver's URL begins like https://example.com/")
    endpoint = await webhooks.add(tenant, url)
    print(f"{endpoint.id}  {endpoint.url}\nsecret: {await webhooks.secret(tenant)}")
    print(f"It is called where gateways and housekeeping have {ALLOW_FLAGS}.", file=sys.stderr)


async def show(webhooks: Webhooks, tenant: str, _: str) -> None:
    endpoints, deliveries = await webhooks.endpoints(tenant), await webhooks.webhooks(tenant)
    for endpoint in endpoints:
        print(f"{endpoint.id}  {endpoint.url}")
    for webhook in deliveries:
        attempts = counted(webhook.attempts, "attempt")
        answer = f", {webhook.answer}" if webhook.answer else ""
        print(f"{webhook.id}  {webhook.state}  {attempts}{answer}  {webhook.url}")
    if not endpoints and not deliveries:
        sentence = "has no receiver of all its events, and was sent no webhook lately"
        print(f"tenant {tenant!r} {sentence}", file=sys.stderr)


async def remove(webhooks: Webhooks, tenant: str, endpoint_id: str) -> None:
    _refuse_unknown(await webhooks.remove(tenant, endpoint_id), tenant, endpoint_id)


async def redeliver(webhooks: Webhooks, tenant: str, webhook_id: str) -> None:
    _refuse_unknown(await webhooks.redeliver(tenant, webhook_id), tenant, webhook_id)


async def secret(webhooks: Webhooks, tenant: str, option: str) -> None:
    if option not in ("", "new"):
        raise CommandRefused(f"{option}: `secret` shows what signs, `secret new` draws another")
    if option == "new":
        await webhooks.forget_secret(tenant)
    print(await webhooks.secret(tenant))


Verb = Callable[[Webhooks, str, str], Awaitable[None]]
COMMANDS: dict[str, Verb] = {
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
    if verb not in COMMANDS or (verb in NEED_A_SUBJECT and not subject):
        asked = verb in ("-h", "--help")
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else BAD_USAGE
    settings = load_settings(WebhooksSettings, f"penstock webhooks {verb}", rest)
    write_log_to_stderr("webhooks", settings)

    async def work() -> None:
        async with connect(settings.redis_url) as redis:
            await COMMANDS[verb](Webhooks(redis), settings.tenant, subject)

    return run(f"penstock webhooks {verb}", work())


def _refuse_unknown(is_there: bool, tenant: str, subject: str) -> None:
    if not is_there:
        raise CommandRefused(f"{subject} is not known of tenant {tenant!r}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
