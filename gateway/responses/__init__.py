"""OpenAI's Responses: a request as a chat, and a job's events as its items."""
