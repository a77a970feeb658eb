"""Receive webhooks and verify their signature, with the standard library alone.

    export WEBHOOK_SECRET=$(penstock webhooks secret --tenant default)
    python docs/examples/webhook_receiver.py [PORT]

Gateway and housekeeping call it with `--webhook-private http://127.0.0.1:PORT`.
"""

import base64
import hashlib
import hmac
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

PORT = int(sys.argv[1]) if len(sys.argv) > 1 else 9000
SECRET = base64.b64decode(os.environ["WEBHOOK_SECRET"].removeprefix("whsec_"))
TOLERANCE_S = 300


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        is_genuine = verify(self.headers["webhook-id"], self.headers["webhook-timestamp"], body,
                            self.headers["webhook-signature"])  # fmt: skip
        if is_genuine:  # a repeat has the same webhook-id
            event = json.loads(body)
            print(event["type"], event["data"]["id"], event["data"]["state"], flush=True)
        self.send_response(204 if is_genuine else 401)
        self.end_headers()


def verify(webhook_id: str, timestamp: str, body: bytes, given: str) -> bool:
    if abs(time.time() - int(timestamp)) > TOLERANCE_S:
        return False
    content = f"{webhook_id}.{timestamp}.".encode() + body
    mark = base64.b64encode(hmac.digest(SECRET, content, hashlib.sha256)).decode()
    return any(hmac.compare_digest(each, f"v1,{mark}") for each in given.split())


server = HTTPServer(("127.0.0.1", PORT), Handler)
print(f"listens on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
