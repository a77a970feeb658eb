"""The head of a request as the routes see it: a path without the root path, and GET for HEAD."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class PlainHead:
    """Takes the root path off a path that has it, and answers HEAD with the head of GET's answer.

    A proxy may leave the root path on or take it off: both are served. All that is within, as the
    check of a key's scope, sees one path and one method.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root = self._root_path
        is_asked = scope["type"] != "lifespan"
        if root and is_asked and f"{scope['path']}/".startswith(f"{root}/"):
            scope = {**scope, "path": scope["path"].removeprefix(root) or "/"}
        if scope["type"] == "http" and scope["method"] == "HEAD":
            await self._answer_head(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer_head(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head alone. `receive` then says that the caller left, which ends a stream."""
        is_sent = False

        async def send_head(message: Message) -> None:
            nonlocal is_sent
            if not is_sent:
                is_sent = True
                await send(message)
                await send({"type": "http.response.body", "body": b""})

        await self._app({**scope, "method": "GET"}, receive, send_head)
