"""A random model that answers within milliseconds, with a tokenizer of single bytes and a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.models import make_random_model

_SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]  # ids 0 to 2: what the random models expect
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tiny_text_model(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """Writes a random model with `byte_tokenizer` and returns its folder. Some of its token ids have no text.

    changes: fields of its configuration and their values.
    """
    path = make_random_model(family, folder, **changes)
    byte_tokenizer().save_pretrained(path)
    return path


def byte_tokenizer() -> Any:
    """One token for each byte of a text's UTF-8, three special ones, and nothing else."""
    vocab = {token: id_ for id_, token in enumerate([*_SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
