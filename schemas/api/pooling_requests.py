"""The requests for vectors: OpenAI's embeddings, and vLLM's, Jina's and Cohere's other routes.

As in `penstock.schemas.api.openai`, only the fields that the gateway itself reads are declared.
"""

from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from penstock.schemas.api.openai import FAIL_FAST, AskedOfModel
from penstock.schemas.wire.wire import Report

Input = (
    str
    | Annotated[list[int], FAIL_FAST]
    | Annotated[list[str], FAIL_FAST]
    | Annotated[list[Annotated[list[int], FAIL_FAST]], FAIL_FAST]
)
Texts = str | Annotated[list[str], FAIL_FAST]


class PoolingAsked(AskedOfModel):
    """The fields that all these requests share. `use_activation` has had several names."""

    use_activation: bool | None = Field(
        None,
        validation_alias=AliasChoices("use_activation", "normalize", "activation", "softmax"),
    )
    truncate_prompt_tokens: int | None = None


class ClassifyRequest(PoolingAsked):
    input: Input


class EmbeddingRequest(ClassifyRequest):
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] = "float"
    prompt_name: str | None = Field(None, description="of a text that goes before each input")


class PoolingRequest(EmbeddingRequest):
    task: Literal["embed", "classify"] | None = None


class ScoreRequest(PoolingAsked):
    queries: Texts = Field(validation_alias=AliasChoices("queries", "text_1", "data_1"))
    documents: Texts = Field(validation_alias=AliasChoices("documents", "text_2", "data_2"))


class Document(Report):
    text: str


class RerankRequest(PoolingAsked):
    query: str
    documents: Annotated[list[str | Document], FAIL_FAST] = Field(min_length=1)
    top_n: int | None = Field(None, ge=1, description="results, at most; none: all")
    return_documents: bool | None = None

    @property
    def texts(self) -> list[str]:
        return [doc if isinstance(doc, str) else doc.text for doc in self.documents]
