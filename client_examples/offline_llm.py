"""The same engine without a server: python offline_llm.py"""

import argparse

from deepinfer_backend import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=None, help="folder, hub id or .gguf file; default: the bundled model")
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()

    prompts = ["Once upon a time", "def fibonacci(n):", "The three primary colours are"]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    with LLM(args.model) as llm:
        for prompt, result in zip(prompts, llm.generate(prompts, params), strict=True):
            print(f"{prompt!r} → {result}")


if __name__ == "__main__":
    main()
