"""SGLang's own `return_hidden_states` beside the capture: the final state alone, as JSON, one request at a time.

python -m bench.gpu.return_hidden_states --model M --sglang-python PY --dump-dir /dev/shm/ehs -- SGLANG ARGS
"""

from __future__ import annotations

import argparse
import json
import time

import httpx

from bench.gpu.load import random_ids
from bench.gpu.servers import add_server_arguments, server_without_plugin, settings_of


def main() -> None:
    """Time the same prompt with and without the states in the answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1730)
    add_server_arguments(parser)
    given = parser.parse_args()
    given.sglang_args.append("--enable-return-hidden-states")
    with server_without_plugin(settings_of(given, "return-hidden-states")) as url:
        for repeat in range(2):
            for wanted in (False, True):
                body = {
                    "input_ids": random_ids(given.tokens, 10 * repeat + wanted),
                    "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                    "return_hidden_states": wanted,
                }
                started = time.perf_counter()
                answer = httpx.post(f"{url}/generate", json=body, timeout=300, trust_env=False).raise_for_status()
                seconds = time.perf_counter() - started
                line = {
                    "bench": "return_hidden_states",
                    "states": wanted,
                    "tokens": given.tokens,
                    "seconds": round(seconds, 3),
                    "tokens_per_s": round(given.tokens / seconds, 1),
                    "answer_bytes": len(answer.content),
                }
                print(json.dumps(line))


if __name__ == "__main__":
    main()
