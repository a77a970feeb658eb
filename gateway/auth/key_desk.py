"""Makes and revokes API keys, for commands and for routes."""

from collections.abc import Callable

from pydantic import Field, ValidationError

from penstock.gateway.auth.api_key import DEFAULT_SCOPES, ApiKey, Scope
from penstock.gateway.auth.keyring import KeyStore
from penstock.schemas.account import Quota
from penstock.schemas.errors import InvalidJob, JobNotFound, NotServed, PenstockError
from penstock.schemas.job import DEFAULT_TENANT, PriorityClass
from penstock.schemas.wire.wire import Report


class KeyNotFound(JobNotFound):
    code = "key_not_found"

    def __init__(self, key_id: str) -> None:
        PenstockError.__init__(self, f"no key has the id {key_id!r}", "key_id")


class KeyRequest(Report):
    """The body that asks for a key."""

    name: str = Field("", max_length=256, description="for people")
    tenant: str = Field(DEFAULT_TENANT, description="whose jobs it makes and finds")
    scopes: tuple[Scope, ...] = Field(DEFAULT_SCOPES, description="admin: all")
    limits: Quota = Quota()
    max_priority: PriorityClass = Field("normal", description="what asks for more gets this")
    expires_in_s: int | None = Field(None, ge=1, description="from now; none: never")


class KeyChange(Report):
    """The body that changes a key; what is left out stays as it is."""

    name: str | None = Field(None, max_length=256, description="for people")
    limits: Quota = Field(Quota(), description="null: none of this kind from now on")


class KeyDesk:
    def __init__(self, store: KeyStore, secret: bytes | None) -> None:
        self._store = store
        self._secret = secret

    async def make(self, request: KeyRequest, name: str | None = None) -> tuple[str, ApiKey]:
        """Make a key. Return its text, which is to be shown once, and its record.

        One that was made under the same name is returned again, as it is now.

        Raises InvalidJob, NotServed.
        """
        if self._secret is None:
            raise NotServed("this server has no server secret, which keys are made with")
        now_s = await self._store.time_s()
        expires_s = None if request.expires_in_s is None else now_s + request.expires_in_s
        record = request.model_dump(exclude={"expires_in_s"})
        record |= {"created_s": now_s, "expires_s": expires_s}
        try:
            text, key = ApiKey.issue(self._secret, record, name)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            name = ".".join(str(step) for step in first["loc"])
            raise InvalidJob(f"{name}: {first['msg']}", name) from None
        return text, await self._store.add(key)

    async def revoke(self, key_id: str) -> ApiKey:
        """Mark a key as revoked. A second time changes nothing. Raises KeyNotFound."""
        now_s = await self._store.time_s()

        def revoked(key: ApiKey) -> ApiKey:
            return key if key.revoked_s else key.model_copy(update={"revoked_s": now_s})

        return await self._changed(key_id, revoked)

    async def change(self, key_id: str, changes: KeyChange) -> ApiKey:
        """Change a key, whose next jobs are under its new limits. Raises KeyNotFound."""

        def changed(key: ApiKey) -> ApiKey:
            limits = key.limits.model_copy(
                update={
                    name: getattr(changes.limits, name) for name in changes.limits.model_fields_set
                }
            )
            name = key.name if changes.name is None else changes.name
            return key.model_copy(update={"limits": limits, "name": name})

        return await self._changed(key_id, changed)

    async def _changed(self, key_id: str, edit: Callable[[ApiKey], ApiKey]) -> ApiKey:
        key = await self._store.change(key_id, edit)
        if key is None:
            raise KeyNotFound(key_id)
        return key

    async def all(self) -> list[ApiKey]:
        """Return all keys ever made, the oldest first."""
        return await self._store.all()
