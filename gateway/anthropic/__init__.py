"""Anthropic's Messages: a request as a chat, and a job's events as its answer."""
