"""Stream a chat with OpenAI's client.

    pip install openai
    python docs/examples/openai_client.py [http://127.0.0.1:8000/v1 [MODEL]]

The API key is read from OPENAI_API_KEY. Where no key was ever made, any word is let in.
"""

import os
import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"

client = OpenAI(base_url=URL, api_key=os.environ.get("OPENAI_API_KEY", "none"))
served = [each.id for each in client.models.list() if getattr(each, "task", "") == "generate"]
if len(sys.argv) <= 2 and not served:
    sys.exit(f"{URL}: no model that answers chats is served at present")
model = sys.argv[2] if len(sys.argv) > 2 else served[0]
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Explain quantum computing in simple terms."}],
    max_tokens=100,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n{model} made {chunk.usage.completion_tokens} tokens")
