"""The requests to a model's tokenizer, with vLLM's names."""

from typing import Annotated

from pydantic import Field

from penstock.schemas.api.openai import FAIL_FAST, AskedOfModel, ChatRequest
from penstock.schemas.params.sampling import TokenId


class TokenizeRequest(AskedOfModel):
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = Field(False, description="the tokens as strings too")


class TokenizeChatRequest(ChatRequest):
    """A chat, in place of a prompt."""

    return_token_strs: bool = Field(False, description="the tokens as strings too")


class DetokenizeRequest(AskedOfModel):
    tokens: Annotated[list[TokenId], FAIL_FAST]
