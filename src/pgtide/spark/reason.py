"""What an error says, in one line for people.

An error of Java's comes with a hundred lines, of which the first says only that something was called: what happened is
in the one after it, and why in the last cause.  One of a Python worker says it below the lines of its trace.
"""

from __future__ import annotations

import re

from pgtide.errors import PgtideError

_CHARACTERS_MAX = 500
_JAVA = ("Caused by: ", ": ")  # what a line begins with that names an exception
_WORKER = re.compile(r"^Traceback \(most recent call last\):\n(?:\s.*\n)+(\S.*)", re.MULTILINE)


def reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    java = [line.removeprefix(_JAVA[0]).removeprefix(_JAVA[1]) for line in lines if line.startswith(_JAVA)]
    if isinstance(error, PgtideError):
        what = " ".join(lines)
    elif worker := _WORKER.findall(str(error)):
        what = worker[-1]
    elif not java:
        what = ": ".join([type(error).__name__, *lines[:1]])
    elif java[-1] in java[0]:
        what = java[0]
    else:
        what = f"{java[0]} ({java[-1]})"
    return what[:_CHARACTERS_MAX]
