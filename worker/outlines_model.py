"""A model of outlines' kind over `LLM`: its types and terms in, texts out."""

from collections.abc import Iterator
from typing import Any

from outlines.inputs import Chat
from outlines.models.base import ModelTypeAdapter
from outlines.models.vllm_offline import VLLMOffline
from pydantic import ValidationError

from penstock.schemas.errors import InvalidJob
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.llm import LLM, RequestOutput


class LLMTypeAdapter(ModelTypeAdapter):
    """Turns inputs into conversations, and leaves types to `SamplingParams`."""

    def format_input(self, model_input: Any) -> list[dict[str, Any]]:
        if isinstance(model_input, str):
            return [{"role": "user", "content": model_input}]
        messages = model_input.messages if isinstance(model_input, Chat) else model_input
        if not isinstance(messages, list):
            kind = type(model_input).__name__
            raise InvalidJob(f"model_input: give a text or an outlines Chat, not {kind}")
        return messages

    def format_output_type(self, output_type: Any = None) -> dict[str, Any]:
        return {} if output_type is None else {"structured_outputs": output_type}


class OutlinesModel(VLLMOffline):
    """The model of an `LLM`, for `outlines.Generator` and to be called with a type.

        model = OutlinesModel(LLM("penstock-5m"))
        model("A number?", int, max_tokens=8)

    Keywords are the fields of SamplingParams. A text is asked as a chat where the model has a
    template. It does not stream. Outlines' generators take the classes that they know alone, so
    it is one of those for a model in the same process.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.type_adapter = LLMTypeAdapter()

    def generate(
        self, model_input: Any, output_type: Any = None, **inference_kwargs: Any
    ) -> str | list[str]:
        """Return the text of the answer, or of each of `n`."""
        texts = self.generate_batch([model_input], output_type, **inference_kwargs)[0]
        return texts if len(texts) != 1 else texts[0]

    def generate_batch(
        self, model_input: list[Any], output_type: Any = None, **inference_kwargs: Any
    ) -> list[list[str]]:
        params = self._params(output_type, inference_kwargs)
        return [
            [choice.text for choice in output.outputs]
            for output in self._outputs(model_input, params)
        ]

    def generate_stream(
        self, model_input: Any, output_type: Any = None, **inference_kwargs: Any
    ) -> Iterator[str]:
        raise NotImplementedError("LLM does not stream; a gateway does, by outlines.from_openai")

    def _params(self, output_type: Any, keywords: dict[str, Any]) -> SamplingParams:
        fields = keywords | self.type_adapter.format_output_type(output_type)
        try:
            return SamplingParams.model_validate(fields)
        except ValidationError as error:
            raise InvalidJob(str(error)) from error

    def _outputs(self, inputs: list[Any], params: SamplingParams) -> list[RequestOutput]:
        is_text = all(isinstance(model_input, str) for model_input in inputs)
        if is_text and not self.llm.text.has_chat_template:
            return self.llm.generate(inputs, params, use_tqdm=False)
        chats = [self.type_adapter.format_input(model_input) for model_input in inputs]
        return self.llm.chat(chats, params, use_tqdm=False)
