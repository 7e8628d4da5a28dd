"""A tiny random model with a tokenizer of Llama's kind, the hardest to stream: a decoder that drops a text's first
space, and characters that take several tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from tests.support.models import make_random_model

_SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]  # ids 0 to 2: what the random models expect
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_CHARACTERS = "▁abcdefghijklmnopqrstuvwxyz.,:"
_WORDS = ["▁the", "▁sea", "▁is", "▁blue", "▁sky"]


def make_byte_fallback_model(folder: Path) -> Path:
    """Writes it and returns its folder. Some of its token ids have no text."""
    path = make_random_model("llama", folder)
    byte_fallback_tokenizer().save_pretrained(path)
    return path


def byte_fallback_tokenizer() -> Any:
    """Single characters, a few words, and bytes for every other character."""
    vocab = {token: id_ for id_, token in enumerate([*_SPECIAL_TOKENS, *_BYTES, *_CHARACTERS])}
    merges: dict[tuple[str, str], None] = {}
    for word in _WORDS:
        for length in range(1, len(word)):
            merges[word[:length], word[length]] = None
            vocab.setdefault(word[: length + 1], len(vocab))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=list(merges), unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
