"""LLM: the offline class. Adds all prompts, runs rounds until they are drained, returns results in prompt order."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from tqdm import tqdm

from deepinfer_backend._core import RequestOutput
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.chat import Chat
from deepinfer_backend.engine.engine_client import EngineClient, EngineOutputs, InprocEngineClient
from deepinfer_backend.engine.input_processor import InputProcessor, Prompt, TextWithMedia
from deepinfer_backend.engine.messages import EmbeddingParams, EngineRequest, MediaReady
from deepinfer_backend.engine.output_processor import OutputProcessor
from deepinfer_backend.engine.parallel_engines import ParallelEngineClient
from deepinfer_backend.errors import DeepInferError, InvalidRequestError, shown
from deepinfer_backend.media.medium import Medium, from_object
from deepinfer_backend.models.loader import load_tokenizer, resolve_tokenizer
from deepinfer_backend.models.vision_families import KINDS
from deepinfer_backend.outputs import Completion, CompletionSequence, TextDelta
from deepinfer_backend.sampling_params import SamplingParams

if TYPE_CHECKING:
    from deepinfer_backend.engine.llm_engine import LLMEngine

_POLL_TIMEOUT_S = 1.0  # of engines in processes of their own

Message = Mapping[str, Any]
MultiModalData = Mapping[str, Any]
Results = list[str] | list[list[str]] | list[str | list[str]] | list[list[RequestOutput]]


class LLM:
    """A language model in this process; with data_parallel_size or tensor_parallel_size over 1 in others.

    model: a folder in Hugging Face format, a hub id or a .gguf file; none is the bundled model.
    decode_sequence: whether `generate` returns texts, or lists of RequestOutput. engine_args: fields of EngineConfig.

    Not for several threads at once. Use it as a context manager, or call `close`, to end its device thread.

    Raises:
        ConfigError, UnsupportedModelError: the model cannot run with these arguments.
    """

    def __init__(self, model: str | None = None, *, decode_sequence: bool = True, **engine_args: Any) -> None:
        self.decode_sequence = decode_sequence
        config = EngineConfig(model=model, **engine_args)
        self._client: EngineClient
        if config.data_parallel_size * config.tensor_parallel_size > 1:
            self._client = ParallelEngineClient(config)
        else:
            self._client = InprocEngineClient(config)
        self.model_path = Path(self._client.info.model_path)
        self.tokenizer = None
        if not config.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(resolve_tokenizer(config.tokenizer, self.model_path))
        self._input_processor = InputProcessor(self.tokenizer, self._client.info, config)
        self._output_processor = OutputProcessor(self.tokenizer)
        self._num_requests = 0

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, if it is in this process."""
        assert isinstance(self._client, InprocEngineClient), "the engines are in processes of their own"
        return self._client.engine

    def close(self) -> None:
        self._client.close()

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        multi_modal_data: MultiModalData | Sequence[MultiModalData | None] | None = None,
        use_tqdm: bool = True,
    ) -> Results:
        """One result per prompt, in order: its text, or the list of its n texts where n is over 1.

        multi_modal_data: of a prompt, or of each: its images and videos, by "image" and "video", one or a list; bytes,
        paths, data URLs, arrays of uint8 [height, width, 3], PIL images, of a video also a list of these or an array
        [num_frames, height, width, 3]. In the prompt the model's own placeholders stand for them.

        With `decode_sequence=False` a result is the prompt's RequestOutputs, as they came; those of several sequences
        are told apart by `sequence_index`. `complete` takes the same and tells more.

        Raises:
            InvalidRequestError: names the index of the first bad prompt; no work was started.
            EngineError: a step failed.
        """
        given = _prompts(prompts, prompt_token_ids, multi_modal_data)
        return self._results(self._requests(given, sampling_params), use_tqdm)

    def complete(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        multi_modal_data: MultiModalData | Sequence[MultiModalData | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """One Completion per prompt, in order: every sequence with its text, tokens, log-probabilities and end.

        Either prompts or prompt_token_ids. sampling_params: one for all prompts, or one each. multi_modal_data: as
        `generate` takes it.

        Raises:
            InvalidRequestError: names the index of the first bad prompt; no work was started.
            EngineError: a step failed.
        """
        requests = self._requests(_prompts(prompts, prompt_token_ids, multi_modal_data), sampling_params)
        return [_completion(request, deltas) for request, deltas, _ in self._run(requests, use_tqdm)]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Results:
        """`generate` for one conversation or several, through the model's own chat template.

        A message's content is a text, or a list of parts: {"type": "text", "text": …}, {"type": "image", "image": …}
        and {"type": "video", "video": …} with what `generate` takes, or {"type": "image_url", "image_url": {"url": …}}
        with a data URL.

        tools, chat_template_kwargs: passed on to the template, for all conversations.

        Raises:
            InvalidRequestError: the model has no chat template, or the template refuses the messages.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        prompts = []
        for index, conversation in enumerate(conversations):
            with _naming_prompt(index):
                prompts.append(Chat.from_objects(conversation, tools, chat_template_kwargs))
        return self._results(self._requests(prompts, sampling_params), use_tqdm)

    def embed(self, prompts: str | Sequence[str] | Sequence[Sequence[int]], use_tqdm: bool = True) -> list[list[float]]:
        """One embedding per prompt (text or token ids), in order: [hidden_size] numbers, scaled to length 1.

        Raises:
            InvalidRequestError: names the index of the first bad prompt; no work was started.
            EngineError: a step failed.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        requests = self._requests(prompts, None, EmbeddingParams())
        return [deltas[0].embedding or [] for _, deltas, _ in self._run(requests, use_tqdm)]

    def generate_stream(self, prompt: str, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one prompt, piece by piece. Closing the iterator early aborts the request.

        Raises:
            InvalidRequestError: the request is wrong, or has more than one text.
        """
        params = sampling_params or SamplingParams()
        if params.n > 1:
            raise InvalidRequestError(f"n is {params.n}: must be 1 for a stream of one text; use generate")
        request = self._request(0, prompt, params, stream=True)
        for delta, _ in self._stream([request]):
            if delta.text:
                yield delta.text

    def _requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        embedding: EmbeddingParams | None = None,
    ) -> list[EngineRequest]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequestError(f"sampling_params has {len(params)} entries: must be one, or {len(prompts)}")
        return [
            self._request(index, prompt, params[index], embedding=embedding) for index, prompt in enumerate(prompts)
        ]

    def _request(
        self,
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        *,
        stream: bool = False,
        embedding: EmbeddingParams | None = None,
    ) -> EngineRequest:
        request_id = str(self._num_requests)
        self._num_requests += 1
        with _naming_prompt(index):
            return self._input_processor.process(request_id, prompt, params, stream=stream, embedding=embedding)

    def _results(self, requests: list[EngineRequest], use_tqdm: bool) -> Results:
        runs = self._run(requests, use_tqdm)
        if not self.decode_sequence:
            return [outputs for _, _, outputs in runs]
        return [
            deltas[0].text if request.sampling_params.n == 1 else [delta.text for delta in deltas]
            for request, deltas, _ in runs
        ]

    def _run(
        self, requests: list[EngineRequest], use_tqdm: bool
    ) -> list[tuple[EngineRequest, list[TextDelta], list[RequestOutput]]]:
        """(request, its whole sequences in order, its outputs as they came) of each."""
        sequences: dict[str, dict[int, TextDelta]] = {request.request_id: {} for request in requests}
        outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
        prompts = {request.request_id: request for request in requests}
        with tqdm(total=len(requests), desc="Processed prompts", disable=not use_tqdm) as progress:
            for delta, new_outputs in self._stream(requests, prompts):
                request_id = new_outputs[0].request_id
                outputs[request_id] += new_outputs
                if delta.sequence_index in sequences[request_id]:
                    sequences[request_id][delta.sequence_index].append(delta)
                else:
                    sequences[request_id][delta.sequence_index] = delta
                if delta.ends_request:
                    progress.update()
        return [
            (
                prompts[request.request_id],
                [delta for _, delta in sorted(sequences[request.request_id].items())],
                outputs[request.request_id],
            )
            for request in requests
        ]

    def _stream(
        self, requests: list[EngineRequest], prompts: dict[str, EngineRequest] | None = None
    ) -> Iterator[tuple[TextDelta, list[RequestOutput]]]:
        """Every delta of these requests with the outputs it was made of, at least one, until all have ended.

        prompts: the requests by their ids, to be told what their media became.

        Whoever stops reading early, or an error, aborts the rest and leaves the engine drained.
        """
        unfinished = {request.request_id for request in requests}
        try:
            for request in requests:
                self._output_processor.add_request(request, time.monotonic_ns())
                self._client.add_request(request)
            while unfinished:
                round_outputs = self._next_round(unfinished)
                for result in round_outputs.results:
                    if prompts is not None and isinstance(result, MediaReady):
                        token_ids = np.frombuffer(result.prompt_token_ids, np.int32)
                        prompts[result.request_id] = msgspec.structs.replace(
                            prompts[result.request_id], prompt_token_ids=token_ids
                        )
                processed = self._output_processor.process(round_outputs.outputs, round_outputs.results)
                self._client.abort_requests(processed.request_ids_to_abort)
                self._client.abort_sequences(processed.sequences_to_abort)
                outputs: defaultdict[tuple[str, int], list[RequestOutput]] = defaultdict(list)
                for output in round_outputs.outputs:
                    outputs[output.request_id, output.sequence_index].append(output)
                for request_id, delta in processed.deltas:
                    yield delta, outputs[request_id, delta.sequence_index][: max(1, len(delta.token_ids))]
                    if delta.ends_request:
                        unfinished.discard(request_id)
        finally:
            self._client.abort_requests(list(unfinished))
            for request_id in unfinished:
                self._output_processor.remove_request(request_id)
            for request in requests:
                self._client.forget_request(request.request_id)
            self._client.get_outputs(timeout_s=0.0)

    def _next_round(self, request_ids: Collection[str]) -> EngineOutputs:
        """What it brought for these; outputs of others, aborted earlier, may still be on their way."""
        while (round_outputs := self._client.get_outputs(_POLL_TIMEOUT_S)) is None:
            pass
        for failure in round_outputs.failures:
            if failure.request_id in request_ids:
                raise failure.error
        outputs = [output for output in round_outputs.outputs if output.request_id in request_ids]
        results = [result for result in round_outputs.results if result.request_id in request_ids]
        return EngineOutputs(outputs, [], None, results)


@contextmanager
def _naming_prompt(index: int) -> Iterator[None]:
    try:
        yield
    except DeepInferError as error:
        raise type(error)(f"prompt {index}: {error.message}") from None


def _prompts(
    prompts: str | Sequence[str] | None,
    prompt_token_ids: Sequence[Sequence[int]] | None,
    multi_modal_data: MultiModalData | Sequence[MultiModalData | None] | None,
) -> Sequence[Prompt]:
    if prompts is not None and prompt_token_ids is None:
        texts = [prompts] if isinstance(prompts, str) else prompts
        return texts if multi_modal_data is None else _with_media(texts, multi_modal_data)
    if multi_modal_data is not None:
        raise InvalidRequestError("multi_modal_data is set: must be left out without prompts")
    if prompts is None and prompt_token_ids is not None:
        return prompt_token_ids
    raise InvalidRequestError("need exactly one of prompts and prompt_token_ids")


def _with_media(
    texts: Sequence[str], multi_modal_data: MultiModalData | Sequence[MultiModalData | None]
) -> list[Prompt]:
    data = [multi_modal_data] if isinstance(multi_modal_data, Mapping) else multi_modal_data
    if len(data) != len(texts):
        raise InvalidRequestError(f"multi_modal_data has {len(data)} entries: must have {len(texts)}, one a prompt")
    prompts: list[Prompt] = []
    for index, (text, of_text) in enumerate(zip(texts, data, strict=True)):
        with _naming_prompt(index):
            media = _media_of(of_text or {})
            prompts.append(TextWithMedia(text, media) if media else text)
    return prompts


def _media_of(data: MultiModalData) -> list[Medium]:
    media = []
    for kind in KINDS:
        given = data.get(kind)
        is_one = given is not None and (not isinstance(given, list) or _is_video_of_frames(kind, given))
        values = [given] if is_one else given or []
        media += [from_object(kind, f"{kind}.{number}", value) for number, value in enumerate(values)]
    for name in data:
        if name not in KINDS:
            raise InvalidRequestError(f"multi_modal_data has {shown(name)}: must be one of {', '.join(KINDS)}")
    return media


def _is_video_of_frames(kind: str, given: list[Any]) -> bool:
    """A list of images is one video, a list of anything else several."""
    return kind == "video" and any(hasattr(each, "convert") or getattr(each, "ndim", 0) == 3 for each in given)


def _completion(request: EngineRequest, deltas: list[TextDelta]) -> Completion:
    params = request.sampling_params
    has_cumulative_logprob = params.logprobs is not None or params.beam_width > 1
    return Completion(
        prompt_token_ids=request.prompt_token_ids.tolist(),
        num_cached_tokens=deltas[0].num_cached_tokens,
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None),
        sequences=[
            CompletionSequence(
                index=delta.sequence_index,
                text=delta.text,
                token_ids=delta.token_ids,
                cumulative_logprob=delta.cumulative_logprob if has_cumulative_logprob else None,
                logprobs=delta.logprobs if params.logprobs is not None else None,
                finish_reason=delta.finish_reason or "",
                stop_reason=delta.stop_reason,
                times=delta.times,
                num_draft_tokens=delta.num_draft_tokens,
                num_accepted_draft_tokens=delta.num_accepted_draft_tokens,
            )
            for delta in deltas
        ],
    )
