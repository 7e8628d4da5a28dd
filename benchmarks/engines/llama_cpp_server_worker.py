"""llama.cpp's server: HTTP streams, one slot for each. It is started again when the number of streams changes."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue

from benchmarks.engines.worker import serve
from benchmarks.workload import Figures, TokenClock, Work

_START_TIMEOUT_S = 120.0
_BLOCK = 256


class LlamaCppServerRunner:
    """Owns the server. A thread for each stream reads it; the clock is read there and counted afterwards."""

    def __init__(self, num_threads: int, tool: str, model: str, version: str, options: Sequence[str] = ()) -> None:
        self.version = version
        self._command = [tool, "-m", model, "-t", str(num_threads), "-tb", str(num_threads), "-b", "4096", "-ub", "512"]
        self._command += ["-cram", "0", "-bs", "--offline", *options]
        self._server: subprocess.Popen[bytes] | None = None
        self._shape = (0, 0)
        self._port = 0

    def close(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait()
            self._server = None

    def run(self, work: Work) -> Figures:
        context = -(-(max(map(len, work.prompts)) + work.max_tokens) // _BLOCK) * _BLOCK
        self._start(work.concurrency, context)
        todo: SimpleQueue[tuple[int, list[int]]] = SimpleQueue()
        for item in enumerate(work.prompts):
            todo.put(item)
        events: list[tuple[float, int, int]] = []
        failures: list[Exception] = []

        def stream() -> None:
            try:
                while True:
                    index, prompt = todo.get_nowait()
                    events.append((time.perf_counter(), index, 0))
                    for num_tokens in self._complete(prompt, work):
                        events.append((time.perf_counter(), index, num_tokens))
            except Empty:
                pass
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=stream) for _ in range(work.concurrency)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elapsed_s = time.perf_counter() - started
        if failures:
            raise failures[0]
        clock = TokenClock()
        for now, index, num_tokens in sorted(events):
            if num_tokens:
                clock.add_tokens(index, num_tokens, now)
            else:
                clock.add_sent(index, now)
        return clock.figures(elapsed_s)

    def _complete(self, prompt: list[int], work: Work) -> Iterator[int]:
        """The number of tokens of each event of the stream; those of half characters come with the last."""
        body = {"prompt": prompt, "n_predict": work.max_tokens, "ignore_eos": work.ignore_eos}
        body |= {"cache_prompt": False, "stream": True, "temperature": 0, "samplers": ["temperature"]}
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise RuntimeError(f"llama-server answered {response.status}: {response.read(500)!r}")
            num_seen = 0
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line[6:])
                num_tokens = event["tokens_predicted"] - num_seen if event.get("stop") else len(event["tokens"])
                num_seen += num_tokens
                if num_tokens:
                    yield num_tokens
        finally:
            connection.close()

    def _start(self, streams: int, context: int) -> None:
        if self._shape == (streams, context) and self._server is not None:
            return
        self.close()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        sizes = ["--port", str(self._port), "-np", str(streams), "-c", str(streams * context)]
        self._server = subprocess.Popen([*self._command, *sizes])
        self._shape = (streams, context)
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._is_ready():
            if self._server.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self._server.returncode}")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"llama-server is not ready after {_START_TIMEOUT_S:.0f} s")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False
        finally:
            connection.close()


if __name__ == "__main__":
    serve(LlamaCppServerRunner)
