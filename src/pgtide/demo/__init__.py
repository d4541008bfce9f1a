"""See pgtide at work: a small shop on an embedded Postgres, mirrored under traffic, killed, brought back, and checked.

`story` is what happens, `shop` and `traffic` what it happens to, `proof` how the end is checked, `view` what one sees.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

from pgtide.demo import report
from pgtide.demo.proof import Proof
from pgtide.demo.settings import Settings
from pgtide.demo.story import Story
from pgtide.demo.view import view_for

__all__ = ["Settings", "run"]

_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WHERE_NEXT = """
Where to look next:
  README.md            what pgtide does, and what it does not do yet
  docs/                guides and reference
  pgtide init          a commented configuration for your own database
  pgtide demo --keep   the same, left running to play with"""


def run(*, as_json: bool = False, keep: bool = False, settings: Settings | None = None) -> int:
    """The exit code: 0 only if the proof holds.  A signal ends it within two seconds and leaves nothing behind."""
    story = Story(settings or Settings(), view_for(as_json=as_json))
    with _interruptible():
        try:
            code = _tell(story, as_json=as_json, keep=keep)
        except KeyboardInterrupt:
            print("Interrupted; nothing is left behind.", file=sys.stderr)
            code = _INTERRUPTED
        finally:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            story.close()
    return code


def _tell(story: Story, *, as_json: bool, keep: bool) -> int:
    with story.view:
        proof = story.tell()
    _print_result(story, proof, as_json=as_json)
    if keep:
        _explain(story, as_json=as_json)
        try:
            with story.view:
                story.go_on()
        except KeyboardInterrupt:
            pass  # which is how --keep is meant to end
    return 0 if proof.holds else 1


def _print_result(story: Story, proof: Proof, *, as_json: bool) -> None:
    if as_json:
        print(report.as_json(proof, story.restarts, story.seconds), flush=True)
        return
    console = Console(highlight=False, soft_wrap=True)
    for line, good in report.as_text(proof, story.restarts, story.transactions, story.seconds):
        console.print(line, style="green" if good else "bold red", markup=False)
    console.print(_WHERE_NEXT, markup=False)


def _explain(story: Story, *, as_json: bool) -> None:
    """What is left running, and what to try with it."""
    console = Console(highlight=False, soft_wrap=True, stderr=as_json)
    configuration = f"{story.folder}/pgtide.toml"
    look = (
        "from pgtide import local, spark; "
        f"point = spark.at(local.spark(warehouse='{story.folder}/lake'), config='{configuration}'); "
        "point.table('orders').show()"
    )
    console.print(
        f"\nTraffic and mirror go on until Ctrl-C, which removes everything.\n"
        f"  configuration  {configuration}\n"
        f"  change log     {story.folder}/log\n"
        f"  mirror         {story.folder}/lake\n"
        f"  messages       {story.folder}/pipeline.log\n"
        "Try in another terminal:\n"
        f'  {story.psql} "{story.dsn}"\n'
        f"  {sys.executable} -m pgtide status --config {configuration}\n"
        f'  {sys.executable} -c "{look}"\n',
        markup=False,
    )


@contextmanager
def _interruptible() -> Iterator[None]:
    """The first signal raises KeyboardInterrupt, whatever it is; those that follow cannot disturb the cleaning up."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
