"""LLM: the offline class. Adds all prompts, runs rounds until they are drained, returns results in prompt order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from deepinfer_backend._core import RequestOutput
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.engine_client import EngineOutputs, InprocEngineClient
from deepinfer_backend.engine.input_processor import InputProcessor
from deepinfer_backend.engine.messages import EngineRequest
from deepinfer_backend.engine.output_processor import OutputProcessor
from deepinfer_backend.errors import DeepInferError, InvalidRequestError
from deepinfer_backend.models.loader import load_tokenizer, resolve_tokenizer
from deepinfer_backend.outputs import TextDelta
from deepinfer_backend.sampling_params import SamplingParams

Message = dict[str, str]


class LLM:
    """A language model in this process.

    model: a folder in Hugging Face format, a hub id or a .gguf file; none is the bundled model.
    decode_sequence: whether `generate` returns texts, or lists of RequestOutput. engine_args: fields of EngineConfig.

    Not for several threads at once. Use it as a context manager, or call `close`, to end its device thread.

    Raises:
        ConfigError, UnsupportedModelError: the model cannot run with these arguments.
    """

    def __init__(self, model: str | None = None, *, decode_sequence: bool = True, **engine_args: Any) -> None:
        self.decode_sequence = decode_sequence
        self._client = InprocEngineClient(EngineConfig(model=model, **engine_args))
        self.llm_engine = self._client.engine
        self.model_path = Path(self._client.info.model_path)
        self.tokenizer = load_tokenizer(resolve_tokenizer(engine_args.get("tokenizer"), self.model_path))
        self._input_processor = InputProcessor(self.tokenizer, self._client.info)
        self._output_processor = OutputProcessor(self.tokenizer)
        self._num_requests = 0

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        multi_modal_data: Any = None,
        use_tqdm: bool = True,
    ) -> list[str] | list[list[RequestOutput]]:
        """One result per prompt, in order: its text, or its RequestOutputs with `decode_sequence=False`.

        Either prompts or prompt_token_ids. sampling_params: one for all prompts, or one each.

        Raises:
            InvalidRequestError: names the index of the first bad prompt; no work was started.
            EngineError: a step failed.
        """
        if multi_modal_data is not None:
            raise InvalidRequestError("multi_modal_data: not supported")
        if (prompts is None) == (prompt_token_ids is None):
            raise InvalidRequestError("need exactly one of prompts and prompt_token_ids")
        if isinstance(prompts, str):
            prompts = [prompts]
        num_prompts = len(prompts if prompts is not None else prompt_token_ids or ())
        params = self._params_for_each(sampling_params, num_prompts)
        requests = [
            self._request(
                index,
                prompts[index] if prompts is not None else None,
                prompt_token_ids[index] if prompt_token_ids is not None else None,
                params[index],
            )
            for index in range(num_prompts)
        ]
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[str] | list[list[RequestOutput]]:
        """`generate` for one conversation or several, through the model's own chat template.

        Raises:
            InvalidRequestError: the model has no chat template, or the template refuses the messages.
        """
        conversations = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        return self.generate(
            prompt_token_ids=[self._apply_chat_template(messages) for messages in conversations],
            sampling_params=sampling_params,
            use_tqdm=use_tqdm,
        )

    def generate_stream(self, prompt: str, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one prompt, piece by piece. Closing the iterator early aborts the request."""
        request = self._request(0, prompt, None, sampling_params or SamplingParams())
        for delta, _ in self._stream([request]):
            if delta.text:
                yield delta.text

    def _apply_chat_template(self, messages: Any) -> list[int]:
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise InvalidRequestError("messages: this model has no chat template; use generate")
        try:
            token_ids: list[int] = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )["input_ids"]
        except Exception as error:
            raise InvalidRequestError(f"messages: the model's chat template refuses them: {error}") from error
        return token_ids

    @staticmethod
    def _params_for_each(
        params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * num_prompts
        if len(params) != num_prompts:
            raise InvalidRequestError(f"sampling_params has {len(params)} entries: must be one, or {num_prompts}")
        return params

    def _request(
        self, index: int, prompt: str | None, token_ids: Sequence[int] | None, params: SamplingParams
    ) -> EngineRequest:
        request_id = str(self._num_requests)
        self._num_requests += 1
        try:
            return self._input_processor.process(
                request_id, prompt=prompt, prompt_token_ids=token_ids, sampling_params=params
            )
        except DeepInferError as error:
            raise type(error)(f"prompt {index}: {error.message}") from None

    def _run(self, requests: list[EngineRequest], use_tqdm: bool) -> list[str] | list[list[RequestOutput]]:
        texts = {request.request_id: "" for request in requests}
        outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
        with tqdm(total=len(requests), desc="Processed prompts", disable=not use_tqdm) as progress:
            for delta, new_outputs in self._stream(requests):
                texts[new_outputs[0].request_id] += delta.text
                outputs[new_outputs[0].request_id] += new_outputs
                if delta.finish_reason is not None:
                    progress.update()
        if self.decode_sequence:
            return [texts[request.request_id] for request in requests]
        return [outputs[request.request_id] for request in requests]

    def _stream(self, requests: list[EngineRequest]) -> Iterator[tuple[TextDelta, list[RequestOutput]]]:
        """Every delta of these requests with the outputs it was made of, until all have ended.

        Whoever stops reading early, or an error, aborts the rest and leaves the engine drained.
        """
        unfinished = {request.request_id for request in requests}
        try:
            for request in requests:
                self._output_processor.add_request(request)
                self._client.add_request(request)
            while unfinished:
                round_outputs = self._next_round()
                processed = self._output_processor.process(round_outputs.outputs)
                self._client.abort_requests(processed.request_ids_to_abort)
                outputs: defaultdict[str, list[RequestOutput]] = defaultdict(list)
                for output in round_outputs.outputs:
                    outputs[output.request_id].append(output)
                for request_id, delta in processed.deltas:
                    yield delta, outputs[request_id][: len(delta.token_ids)]
                    if delta.finish_reason is not None:
                        unfinished.discard(request_id)
        finally:
            self._client.abort_requests(list(unfinished))
            for request_id in unfinished:
                self._output_processor.remove_request(request_id)
            self._client.get_outputs(timeout_s=0.0)

    def _next_round(self) -> EngineOutputs:
        round_outputs = self._client.get_outputs(timeout_s=0.0)
        assert round_outputs is not None
        if round_outputs.failures:
            raise round_outputs.failures[0].error
        return round_outputs
