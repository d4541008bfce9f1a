"""The process that makes the proof: `python -m pgtide.demo.prover CONFIGURATION`.

It starts Spark first and then waits for a `Request` on standard input: Spark takes its seconds while the mirror still
catches up.  A process of its own can be killed at any moment, and a session of its own shares nothing with other ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pgtide import local
from pgtide.config import load_config
from pgtide.demo.proof import Request, prove


def main(config_file: str) -> None:
    config = load_config(Path(config_file))
    session = local.spark(warehouse=config.warehouse, catalog=config.mirror.catalog)
    line = sys.stdin.readline()
    if line:
        request = Request(**json.loads(line))
        answer = Path(request.answer)
        partial = answer.with_suffix(".partial")
        partial.write_text(prove(session, config, request).to_json())
        partial.replace(answer)
    session.stop()


if __name__ == "__main__":
    main(sys.argv[1])
