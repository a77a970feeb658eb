"""A receiver of webhooks that keeps what it was sent."""

import json
import threading
from collections import defaultdict
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from stage import Wait


@dataclass
class Post:
    headers: dict[str, str]
    content: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def event(self) -> dict[str, object]:
        event: dict[str, object] = json.loads(self.content)
        return event


class Receiver:
    """A web server that keeps what it was sent. `answers` says how each path answers, in order."""

    def __init__(self) -> None:
        self.posts: dict[str, list[Post]] = defaultdict(list)
        self.answers: dict[str, list[int | tuple[int, str] | Wait]] = defaultdict(list)
        self.at_once: dict[str, int] = defaultdict(int)
        self.most_at_once = 0  # of one webhook
        self.most_in_flight = 0
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.receive(self, Post(headers, content))

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def receive(self, handler: BaseHTTPRequestHandler, post: Post) -> None:
        with self._lock:
            self.posts[handler.path].append(post)
            self.at_once[post.id] += 1
            self.most_at_once = max(self.most_at_once, self.at_once[post.id])
            self.most_in_flight = max(self.most_in_flight, sum(self.at_once.values()))
            answers = self.answers[handler.path]
            answer = answers.pop(0) if answers else 204
        if isinstance(answer, Wait):
            answer.wait(60)
            answer = 204
        status, retry_after = answer if isinstance(answer, tuple) else (answer, "")
        with self._lock:
            self.at_once[post.id] -= 1
        handler.send_response(status)
        if retry_after:
            handler.send_header("Retry-After", retry_after)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
