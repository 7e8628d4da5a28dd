"""The process that decodes and preprocesses media; a `MultiModalProcessor` has several of them.

Run as `python -m deepinfer_backend.media.worker`. Frames as in `helper_process`, of msgpack: first `MediaWorkerStart`,
answered by `MediaWorkerReady`; then a `MediaPrompt` after another, each answered by `ProcessedPrompt` or
`MediaRefused`.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from deepinfer_backend.errors import InvalidRequestError
from deepinfer_backend.helper_process import read_frame, take_over_output, write_frame
from deepinfer_backend.media.prompt import (
    MediaPrompt,
    MediaRefused,
    MediaWorkerReady,
    MediaWorkerStart,
    ProcessedPrompt,
)
from deepinfer_backend.models.model_files import one_line

if TYPE_CHECKING:
    from deepinfer_backend.media.processing import PromptProcessor

_NICENESS = 10
_MAX_EXTRA_MEMORY_BYTES = 4 * 2**30


def main() -> None:
    prompts, answers = sys.stdin.buffer, take_over_output()
    start = msgspec.msgpack.decode(read_frame(prompts), type=MediaWorkerStart)
    try:
        processor = _load(start)
    except Exception as error:
        write_frame(answers, msgspec.msgpack.encode(MediaRefused(one_line(error))))
        return
    os.nice(_NICENESS)
    _limit_memory()
    write_frame(answers, msgspec.msgpack.encode(MediaWorkerReady()))
    while frame := read_frame(prompts):
        write_frame(answers, msgspec.msgpack.encode(_process(processor, frame)))


def _load(start: MediaWorkerStart) -> PromptProcessor:
    import torch

    from deepinfer_backend.media.decoding import DecodingLimits
    from deepinfer_backend.media.processing import PromptProcessor

    torch.set_num_threads(1)
    limits = DecodingLimits(start.max_image_pixels, start.max_video_frames, start.num_video_frames)
    return PromptProcessor(Path(start.model_path), limits)


def _process(processor: PromptProcessor, frame: bytes) -> ProcessedPrompt | MediaRefused:
    prompt = msgspec.msgpack.decode(frame, type=MediaPrompt)
    try:
        return processor.process(prompt)
    except InvalidRequestError as error:
        return MediaRefused(error.message)
    except MemoryError:
        return MediaRefused(f"{prompt.media[0].field}: its request's media need too much memory to be read")


def _limit_memory() -> None:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = num_pages * resource.getpagesize() + _MAX_EXTRA_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # A crash is an answer here, not a finding.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
