"""From a model to its multi-token-prediction module: texts are written, the module learns from them, it is stored."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from deepinfer_backend.errors import UnsupportedModelError
from deepinfer_backend.models.loader import load_config, resolve_model
from deepinfer_backend.models.runnable_model import open_weights
from deepinfer_backend.mtp_training.module import TrainedMtp
from deepinfer_backend.mtp_training.recorder import WrittenText
from deepinfer_backend.mtp_training.writing import write_texts

_WRITING_SHARE = 0.45  # of the time
_HELD_OUT_SHARE = 0.04
_NUM_DRAFTS = 2  # that are learned; later ones are made as the last of these
_FIRST_DRAFT_SHARE = 0.7  # of the training: a second one costs as much as the first, which is worth more
_OUTPUT_SHARE = 0.25  # of the positions: the output layer costs more than all the rest
_BATCH_TOKENS = 512
_LEARNING_RATE = 2e-3
_WARM_UP_STEPS = 50
_REPORT_INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of the held-out texts: how often the likeliest draft is the token that the model itself finds likeliest.

    by_position: of a first draft, and of a second one whether the first was right or not.
    """

    by_position: list[float]

    def __str__(self) -> str:
        return ", ".join(f"{share:.3f}" for share in self.by_position)


def train_mtp(
    folder: Path,
    *,
    model: str | None,
    minutes: float,
    draft_vocab_size: int,
    seed: int,
    report: Callable[[str], None],
) -> Acceptance:
    """Writes the module into `folder`. `report` is told how things stand, a line at a time.

    It learns the model's own distribution of the token after the next (Hinton et al. 2015) and of the one after that.

    Raises:
        UnsupportedModelError: the model cannot be loaded, or is not a Llama.
        InvalidRequestError: it has no tokenizer or no chat template.
    """
    torch.manual_seed(seed)
    began_s = time.monotonic()
    path = resolve_model(model)
    if (model_type := load_config(path).model_type) != "llama":
        raise UnsupportedModelError(f"model_type is {model_type}: a module is made for llama alone")
    texts = write_texts(path, began_s + 60 * minutes * _WRITING_SHARE, random.Random(seed))
    num_tokens = sum(len(text.token_ids) for text in texts)
    report(f"the model has written {len(texts)} texts, {num_tokens} tokens in all")
    num_held_out = max(1, round(_HELD_OUT_SHARE * len(texts)))
    held_out, learned = texts[:num_held_out], texts[num_held_out:]
    module = _make_module(path, learned, draft_vocab_size, report)
    _train(module, learned, held_out, began_s + 60 * minutes, random.Random(seed), report)
    acceptance = acceptance_of(module, held_out)
    module.save(folder, {"held_out_acceptance": str(acceptance), "training_tokens": str(num_tokens)})
    return acceptance


@torch.no_grad()
def acceptance_of(module: TrainedMtp, texts: list[WrittenText]) -> Acceptance:
    num_right, num_drafts = [0] * _NUM_DRAFTS, [0] * _NUM_DRAFTS
    for text in texts:
        token_ids, hidden_states = text.token_ids.long(), text.hidden_states
        right = module.model_logits(hidden_states[1:], of_drafts_alone=False).argmax(dim=-1)
        drafts = module.states(token_ids[None, 1:-1], hidden_states[None, :-1], _NUM_DRAFTS)
        for number, states in enumerate(drafts):
            logits = module.model_logits(states[0, number:], of_drafts_alone=True)
            likeliest = module.draft_token_ids[logits.argmax(dim=-1)]
            num_right[number] += int((likeliest == right[number:]).sum())
            num_drafts[number] += len(likeliest)
    return Acceptance([right / drafts for right, drafts in zip(num_right, num_drafts, strict=True)])


def _make_module(
    path: Path, texts: list[WrittenText], draft_vocab_size: int, report: Callable[[str], None]
) -> TrainedMtp:
    config = load_config(path)
    source = open_weights(path)
    output_weight = "lm_head.weight" if "lm_head.weight" in source.names() else "model.embed_tokens.weight"
    counts = torch.bincount(torch.cat([text.token_ids for text in texts]), minlength=config.vocab_size)
    draft_token_ids = counts.topk(min(draft_vocab_size, config.vocab_size)).indices.sort().values
    covered = counts[draft_token_ids].sum() / counts.sum()
    report(f"{len(draft_token_ids)} tokens may be proposed: {covered:.2%} of what was written")
    return TrainedMtp(config, source, output_weight, draft_token_ids)


def _train(
    module: TrainedMtp,
    texts: list[WrittenText],
    held_out: list[WrittenText],
    deadline_s: float,
    rng: random.Random,
    report: Callable[[str], None],
) -> None:
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    began_s = next_report_s = time.monotonic()
    num_tokens = 0
    for step, batch in enumerate(_batches(texts, rng)):
        now_s = time.monotonic()
        if now_s > deadline_s:
            return
        progress = (now_s - began_s) / (deadline_s - began_s)
        warm = min(1.0, (step + 1) / _WARM_UP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * warm * 0.5 * (1 + math.cos(math.pi * progress))
        loss = _loss(module, batch, 1 if progress < _FIRST_DRAFT_SHARE else _NUM_DRAFTS)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        num_tokens += sum(len(text.token_ids) for text in batch)
        if now_s >= next_report_s:
            next_report_s = now_s + _REPORT_INTERVAL_S
            acceptance = acceptance_of(module, held_out)
            report(
                f"{progress:4.0%} of the training, step {step}, {num_tokens} tokens: "
                f"loss {loss.item():.3f}, held-out drafts right {acceptance}"
            )


def _batches(texts: list[WrittenText], rng: random.Random) -> Iterator[list[WrittenText]]:
    """Texts of similar lengths together, for ever."""
    while True:
        order = sorted(texts, key=lambda text: (len(text.token_ids) // 32, rng.random()))
        batches: list[list[WrittenText]] = [[]]
        for text in order:
            batches[-1].append(text)
            if len(batches[-1]) * len(text.token_ids) >= _BATCH_TOKENS:
                batches.append([])
        whole = [batch for batch in batches if batch]
        rng.shuffle(whole)
        yield from whole


def _loss(module: TrainedMtp, texts: list[WrittenText], num_drafts: int) -> torch.Tensor:
    """The mean over drafts of the Kullback-Leibler divergence from the model's distribution over draft tokens."""
    token_ids = _padded([text.token_ids[1:-1].long() for text in texts])
    hidden_states = _padded([text.hidden_states[:-1] for text in texts])
    following_states = _padded([text.hidden_states[1:] for text in texts])
    lens = torch.tensor([len(text.token_ids) - 2 for text in texts])
    positions = torch.arange(token_ids.shape[1])
    losses = []
    for number, states in enumerate(module.states(token_ids, hidden_states, num_drafts)):
        is_draft = (positions >= number) & (positions < lens[:, None])
        is_learned = is_draft & (torch.rand(is_draft.shape) < _OUTPUT_SHARE)
        with torch.no_grad():
            right = module.model_logits(following_states[is_learned], of_drafts_alone=True).log_softmax(dim=-1)
        drafts = module.model_logits(states[is_learned], of_drafts_alone=True).log_softmax(dim=-1)
        losses.append(functional.kl_div(drafts, right, reduction="batchmean", log_target=True))
    return torch.stack(losses).mean()


def _padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
