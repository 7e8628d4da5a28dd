"""Tokenizers for tests: the bundled model's, and small ones whose decoders do what others' do."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from deepinfer_backend.models.loader import load_tokenizer, resolve_model


@cache
def bundled_tokenizer() -> Any:
    """Shared: a test must leave it as it is."""
    return load_tokenizer(resolve_model(None))


def sentencepiece_like_tokenizer() -> Any:
    """Words begin with "▁"; a text's first space is dropped; "<s>" is put in front of each text; "<tool>" is no
    special token."""
    words = ["<unk>", "<s>", "</s>", "▁the", "▁sea", "▁is", "▁a", "s", "▁user:", "▁", "<", "/", ">"]
    tokenizer = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Metaspace()])
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
