"""LangChain's standard tests of an embedding integration, against the service at a URL."""

import os

from langchain_openai import OpenAIEmbeddings
from langchain_tests.integration_tests import EmbeddingsIntegrationTests


class TestPenstock(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[OpenAIEmbeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, object]:
        return {
            "model": os.environ["PENSTOCK_TEST_MODEL"],
            "base_url": os.environ["TEST_API_BASE_URL"],
            "api_key": "none",
            # Else texts are cut by the tokenizer of OpenAI's own models.
            "check_embedding_ctx_length": False,
        }
