"""`make bench-media`: what the media processes do a second, how soon an image's first token comes, and what text waits.

A random SmolVLM with the size of SmolVLM-256M's parts, in float32, and its processor's own settings.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image
from rich.console import Console
from rich.table import Table
from tokenizers import AddedToken
from transformers import AutoModelForImageTextToText, SmolVLMConfig
from transformers.models.smolvlm import SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.messages import EngineRequest
from deepinfer_backend.media.decoding import DecodingLimits
from deepinfer_backend.media.medium import Medium
from deepinfer_backend.media.pool import MultiModalProcessor
from deepinfer_backend.media.processing import PromptProcessor
from deepinfer_backend.media.prompt import MediaPrompt
from deepinfer_backend.models.loader import load_tokenizer, resolve_model

_PLACEHOLDERS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_ROWS_AND_COLS = tuple(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7))
_NUM_STREAMS = 16
_PROMPT = "<image> What is in the picture?"


def make_model(folder: Path) -> Path:
    tokenizer: Any = load_tokenizer(resolve_model(None))
    added = [AddedToken(token, special=True, normalized=False) for token in (*_PLACEHOLDERS, *_ROWS_AND_COLS)]
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    processor = SmolVLMProcessor(
        SmolVLMImageProcessor(size={"longest_edge": 512}, max_image_size={"longest_edge": 512}),
        tokenizer,
        SmolVLMVideoProcessor(size={"longest_edge": 512}, max_image_size={"longest_edge": 512}),
        image_seq_len=64,
    )
    config = SmolVLMConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": 49_280,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
        },
        vision_config={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 512,
            "patch_size": 16,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=4,
    )
    path = folder / "smolvlm"
    processor.save_pretrained(path)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def jpeg(seed: int, width: int = 1024, height: int = 768) -> bytes:
    """Noise over blocks of color: about as large a file as a photograph of that size."""
    rng = np.random.default_rng(seed)
    blocks = Image.fromarray(rng.integers(0, 256, (height // 64, width // 64, 3), dtype=np.uint8))
    pixels = np.asarray(blocks.resize((width, height))).astype(np.int16) + rng.integers(-9, 10, (height, width, 1))
    file = BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def prompt_of(data: bytes) -> MediaPrompt:
    return MediaPrompt([Medium("image.0", "image", data)], text=_PROMPT)


def images_per_second(path: Path, num_workers: int, files: list[bytes]) -> float:
    processor = MultiModalProcessor(path, EngineConfig(model=str(path), num_media_workers=num_workers))
    try:
        for count in (2 * num_workers, len(files)):  # the first of them start the processes
            began_s = time.perf_counter()
            for number in range(count):
                processor.submit(str(number), prompt_of(files[number % len(files)]))
            num_done = 0
            while num_done < count:
                for _, processed in processor.fetch():
                    processor.release(processed)
                    num_done += 1
                time.sleep(0.001)
        return len(files) / (time.perf_counter() - began_s)
    finally:
        processor.close()


def processor_alone(path: Path, files: list[bytes]) -> float:
    """The same work in this process, one after the other, with one thread: what a media process can do at most."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        processor = PromptProcessor(path, DecodingLimits(2**26, 36_000, 32))
        processor.process(prompt_of(files[0]))
        began_s = time.perf_counter()
        for file in files:
            processor.process(prompt_of(file))
        return len(files) / (time.perf_counter() - began_s)
    finally:
        torch.set_num_threads(num_threads)


def first_token_ms(llm: LLM, text: str, data: bytes | None) -> float:
    began_s = time.perf_counter()
    media = None if data is None else {"image": data}
    llm.generate(text, SamplingParams(temperature=0, max_tokens=1), multi_modal_data=media, use_tqdm=False)
    return (time.perf_counter() - began_s) * 1e3


class TextStreams:
    """Streams of text on the engine of an LLM, whose steps are timed while something else goes on or not."""

    def __init__(self, llm: LLM, num_steps: int) -> None:
        self._engine = llm.llm_engine
        self._image = jpeg(0)
        self._num_steps = num_steps
        self._number = 0

    def steps(self, feed: Callable[[int], None]) -> tuple[list[float], float]:
        """(ms of each decode step, ms a step that taking in media cost it); feed(step): called before each."""
        params = SamplingParams(temperature=0, max_tokens=self._num_steps + 8, ignore_eos=True)
        for index in range(_NUM_STREAMS):
            self._number += 1
            prompt = np.random.default_rng(index).integers(3, 40_000, 32, dtype=np.int32)
            self._engine.add_request(EngineRequest(f"text {self._number}", prompt, params))
        while self._engine.scheduler.num_waiting:
            self._engine.step()
        before_s, times = self._engine.timers.seconds["multi_modal_fetch"], []
        for step in range(self._num_steps):
            feed(step)
            began_s = time.perf_counter()
            self._engine.step()
            times.append((time.perf_counter() - began_s) * 1e3)
        fetch_ms = (self._engine.timers.seconds["multi_modal_fetch"] - before_s) * 1e3 / self._num_steps
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._engine.flush_inflight_reqs()
        self._engine.take_results()
        return times, fetch_ms

    def submit_bad_image(self, step: int) -> None:
        """A whole image, which a text has no place for: it is decoded, and the model computes nothing of it."""
        media = MediaPrompt([Medium("image.0", "image", self._image)], text="no placeholder")
        params = SamplingParams(max_tokens=1)
        request_id = f"bad {self._number} {step}"
        self._engine.add_request(EngineRequest(request_id, np.empty(0, np.int32), params, media=media))


@contextmanager
def opened(path: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": 2**30}
    with LLM(str(path), **options) as llm:
        yield llm


def main(
    num_runs: Annotated[int, typer.Option(help="Times that each is measured; the median counts.")] = 5,
    num_images: Annotated[int, typer.Option(help="Of a run of the media processes.")] = 100,
) -> None:
    table = Table("what", "figure")
    files = [jpeg(seed) for seed in range(num_images)]
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder))
        alone = statistics.median(processor_alone(path, files) for _ in range(num_runs))
        table.add_row("JPEG files of 1024 × 768 a second, the processor alone", f"{alone:.0f}")
        for num_workers in (1, 2):
            ours = statistics.median(images_per_second(path, num_workers, files) for _ in range(num_runs))
            table.add_row(f"  {num_workers} media process(es), ÷ that", f"{ours:.0f}, {ours / alone:.2f}")
        with opened(path) as llm:
            for name, figure in _first_tokens(llm, num_runs):
                table.add_row(name, figure)
            for name, figure in _steps(llm, num_runs):
                table.add_row(name, figure)
    Console().print(table)


def _first_tokens(llm: LLM, num_runs: int) -> Iterator[tuple[str, str]]:
    first_token_ms(llm, _PROMPT, jpeg(1_000))  # starts a media process
    text = "word " * 80
    measured: dict[str, list[float]] = {"text": [], "new": [], "known": [], "prompt": []}
    for run in range(num_runs):
        file = jpeg(2_000 + run)
        measured["text"].append(first_token_ms(llm, f"{run} {text}", None))
        measured["new"].append(first_token_ms(llm, _PROMPT, file))
        measured["known"].append(first_token_ms(llm, f"{run}: {_PROMPT}", file))
        measured["prompt"].append(first_token_ms(llm, _PROMPT, file))
    medians = {name: statistics.median(values) for name, values in measured.items()}
    names = {
        "text": "first token of a text of about as many tokens, ms",
        "new": "  with a new image",
        "known": "  with an image whose embedding is cached",
        "prompt": "  with a prompt that the prefix cache has",
    }
    for name, shown in names.items():
        yield shown, f"{medians[name]:.0f}, ÷ a new image {medians[name] / medians['new']:.2f}"


def _steps(llm: LLM, num_runs: int) -> Iterator[tuple[str, str]]:
    streams = TextStreams(llm, 60)
    streams.steps(lambda _: None)
    alone, beside, fetches = [], [], []
    for _ in range(num_runs):
        alone.append(statistics.median(streams.steps(lambda _: None)[0]))
        times, fetch_ms = streams.steps(lambda step: streams.submit_bad_image(step) if step % 2 == 0 else None)
        beside.append(statistics.median(times))
        fetches.append(fetch_ms)
    without, with_media = statistics.median(alone), statistics.median(beside)
    yield f"a decode step of {_NUM_STREAMS} texts, ms", f"{without:.1f}"
    yield "  while the media processes are busy", f"{with_media:.1f}, {with_media / without:.2f}"
    yield "  of which the engine takes in what they made, ms", f"{statistics.median(fetches):.3f}"


if __name__ == "__main__":
    typer.run(main)
