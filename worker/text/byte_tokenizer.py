"""The tokenizer of the fake engine: a token for each byte, a begin and an end, a plain template."""

from pydantic import JsonValue
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.schemas.job import Chat
from penstock.worker.engine.fake import BOS, EOS
from penstock.worker.text.messages import plain_messages


class ByteTokenizer:
    """Tokens 0 to 255 are the bytes. Conversations are lines of role and content."""

    is_there = True
    source = ""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        unprintable = [byte for byte in range(256) if byte not in set(printable)]
        letters = {chr(byte): byte for byte in printable}
        letters |= {chr(256 + place): byte for place, byte in enumerate(unprintable)}
        self.tokenizer = Tokenizer(models.BPE({**letters, "</s>": EOS, "<s>": BOS}, []))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens([AddedToken("</s>"), AddedToken("<s>")])

    def describe(self) -> dict[str, JsonValue]:
        return {"tokenizer_class": type(self).__name__, "eos_token": "</s>", "bos_token": "<s>"}

    def write(self, chat: Chat) -> str:
        lines = [
            f"{message['role']}: {message.get('content') or ''}\n"
            for message in plain_messages(chat.messages)
        ]
        return "".join(lines) + ("assistant: " if chat.add_generation_prompt else "")
