"""The commands: what people type, and how they are told what went wrong.

Bodies are elsewhere (`run`, `status`, `verify`, `pgtide.demo`) and imported when called.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from pgtide import __version__
from pgtide.errors import ConfigurationError, PgtideError

if TYPE_CHECKING:
    from pgtide.config import Config

DEBUG_VARIABLE = "PGTIDE_DEBUG"

_EXIT_CODES = (
    "Exit codes: 0 fine · 1 failed · 2 configuration or environment is wrong, nothing was touched · 130 interrupted"
)

app = typer.Typer(
    name="pgtide",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EXIT_CODES,
)

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="Configuration file; pgtide.toml if not given."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a value of the file, as in source.slot=other. Repeatable."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON for programs instead of text for people.")]
UntilCaughtUp = Annotated[
    bool,
    typer.Option(
        "--until-caught-up", metavar="", help="End when all that was committed before the start is in the mirror."
    ),
]


def main() -> NoReturn:
    """The program `pgtide`."""
    try:
        app(prog_name="pgtide")
    except PgtideError as error:
        _complain(error.what, error.remedy)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except Exception as error:  # noqa: BLE001 - the last place to say it
        _complain(f"unexpected {type(error).__name__}: {_first_line(error)}", f"{DEBUG_VARIABLE}=1 shows where.")
        code = 1
    sys.exit(code)


def _complain(what: str, remedy: str) -> None:
    from pgtide.replication.connect import redact

    print(redact(f"error: {what}"), file=sys.stderr)
    if remedy:
        print(redact(remedy), file=sys.stderr)
    if os.environ.get(DEBUG_VARIABLE) == "1":
        print(redact(traceback.format_exc()), file=sys.stderr)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _configuration(file: Path | None, settings: list[str] | None) -> Config:
    from pgtide.config import load_config

    overrides = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals or "." not in key:
            # The value is not repeated: it may be a connection string.
            raise ConfigurationError(
                f"--set {key}: not of the form section.key=value", remedy="As in source.slot=other."
            )
        overrides[key.strip()] = value
    return load_config(file, overrides)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"pgtide {__version__}")
        raise typer.Exit


@app.callback()
def _pgtide(
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=_show_version, is_eager=True, help="Show the version and end."),
    ] = False,
) -> None:
    """Postgres change data capture for Spark: tables mirrored into a lakehouse, in transaction order.

    To begin: `pgtide demo` shows it at work on this machine; `pgtide init` writes a configuration for your database,
    `pgtide run` starts it.
    """


@app.command(epilog=_EXIT_CODES)
def init(
    config: ConfigFile = None,
    force: Annotated[bool, typer.Option("--force", metavar="", help="Overwrite a file that is there.")] = False,
) -> None:
    """Write a commented configuration file to start from.

    All keys are in it with their defaults; the one that must be set is source.dsn.

    Example: `pgtide init && $EDITOR pgtide.toml && pgtide run`
    """
    from pgtide.config import DEFAULT_FILE, template

    file = config or Path(DEFAULT_FILE)
    try:
        with file.open("w" if force else "x", encoding="utf-8") as out:
            out.write(template())
    except FileExistsError:
        raise ConfigurationError(f"{file} is there already", remedy="Edit it, or overwrite it with --force.") from None
    except OSError as error:
        raise ConfigurationError(
            f"{file} cannot be written: {error.strerror}", remedy="Choose another --config."
        ) from None
    print(f"Wrote {file}. Set source.dsn in it, then: pgtide run")


@app.command(epilog=_EXIT_CODES)
def run(config: ConfigFile = None, settings: Settings = None, until_caught_up: UntilCaughtUp = False) -> None:
    """Capture changes, load the tables and keep the mirror up to date, in the foreground.

    It checks server and configuration before it touches anything, creates publication and slot on the first start,
    loads the rows that are there, and then follows the changes. SIGTERM and Ctrl-C end it cleanly; a second one ends
    it at once. Started again, it goes on where it was, also after a crash.

    Example: `pgtide run --config shop.toml`
    """
    from pgtide.cli.run import run_both

    run_both(_configuration(config, settings), until_caught_up=until_caught_up)


@app.command(epilog=_EXIT_CODES)
def capture(config: ConfigFile = None, settings: Settings = None) -> None:
    """Only write the changes to the log; for running the mirror elsewhere or later.

    Example: `pgtide capture --config shop.toml`
    """
    from pgtide.cli.run import run_capture

    run_capture(_configuration(config, settings))


@app.command(epilog=_EXIT_CODES)
def mirror(config: ConfigFile = None, settings: Settings = None, until_caught_up: UntilCaughtUp = False) -> None:
    """Only apply the log's changes to the tables in the lake.

    It needs the folder of the log, and the database only for the first load of a table.

    Example: `pgtide mirror --until-caught-up`
    """
    from pgtide.cli.run import run_mirror

    run_mirror(_configuration(config, settings), until_caught_up=until_caught_up)


@app.command(epilog=_EXIT_CODES)
def status(config: ConfigFile = None, settings: Settings = None, as_json: AsJson = False) -> None:
    """Show how far everything is: server, slot, log, mirror, each table, and how much lies between.

    It only looks, and starts no Spark. Exit code 1 if something needs a person: server unreachable, slot lost, a table
    parked.

    Example: `pgtide status --json | jq .lag`
    """
    from pgtide.cli.status import gather, show

    found = gather(_configuration(config, settings))
    show(found, as_json=as_json)
    if found.needs_a_person:
        raise typer.Exit(1)


@app.command(epilog=_EXIT_CODES)
def verify(
    tables: Annotated[
        list[str] | None, typer.Argument(metavar="[TABLE]...", help="Only these: schema.table. All if none is named.")
    ] = None,
    config: ConfigFile = None,
    settings: Settings = None,
    catch_up: Annotated[
        bool,
        typer.Option(
            "--catch-up", metavar="", help="Nothing runs: capture and mirror here, only until the comparison is made."
        ),
    ] = False,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", help="How long to wait until the mirror is there.")
    ] = 600,
    as_json: AsJson = False,
) -> None:
    """Prove that mirrors equal their sources, row for row and column for column, while both go on.

    It takes a snapshot of the source, has the mirror publish a point at exactly that moment, and compares the two with
    Spark. The first differences are shown, long values in full with `--json` (up to 64 KiB each). It needs `pgtide run`
    beside it. Exit code 1 if something differs, or a table could not be compared.

    Example: `pgtide verify public.orders --json`
    """
    from pgtide.cli.verify import run_verify

    found = _configuration(config, settings)
    if not run_verify(found, tables or [], catch_up=catch_up, wait_s=wait, as_json=as_json):
        raise typer.Exit(1)


@app.command(epilog=_EXIT_CODES)
def demo(
    as_json: AsJson = False,
    keep: Annotated[
        bool, typer.Option("--keep", metavar="", help="Leave it running at the end, until Ctrl-C.")
    ] = False,
) -> None:
    """See it at work: a small shop with live traffic on an embedded Postgres, mirrored, killed and brought back.

    At the end it proves with Spark SQL that the books balance and that every mirror equals its source. It needs no
    configuration and leaves nothing behind.

    Example: `pgtide demo --json`
    """
    import pgtide.demo

    code = pgtide.demo.run(as_json=as_json, keep=keep)
    if code:
        raise typer.Exit(code)


@app.command(epilog=_EXIT_CODES)
def bench(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="capture, latency, mirror, big-transaction, snapshot or planning.")
    ],
    as_json: AsJson = False,
    small: Annotated[bool, typer.Option("--small", metavar="", help="A size that only shows that it runs.")] = False,
    results: Annotated[
        Path | None, typer.Option("--results", metavar="FOLDER", help="Also write FOLDER/NAME.json.")
    ] = None,
) -> None:
    """Measure pgtide beside its peers on an embedded Postgres; minutes, and best on a quiet machine.

    Ratios to a peer that was measured in the same run are what counts; a peer that could not be run is named.

    Example: `pgtide bench capture --json`
    """
    from pgtide.bench import benchmarks

    known = benchmarks()
    if name not in known:
        raise ConfigurationError(f"there is no benchmark {name!r}", remedy=f"There are: {', '.join(known)}.")
    result = known[name](small)
    if results is not None:
        result.save(results)
    if as_json:
        print(result.to_json())
        return
    for kind in (result.ratios, result.figures):
        for key, value in kind.items():
            print(f"{key:40} {value:>14,.3f}")
    for peer, reason in result.not_run.items():
        print(f"{peer:40} not run: {reason}")


log_app = typer.Typer(
    no_args_is_help=True, help="Look at the change log: what is in it, live changes, a full check, retention by hand."
)
app.add_typer(log_app, name="log")


@log_app.command("show", epilog=_EXIT_CODES)
def log_show(config: ConfigFile = None, settings: Settings = None, as_json: AsJson = False) -> None:
    """Whose log it is, how far it goes, its size, readers and tables; with --json also every segment.

    Example: `pgtide log show`
    """
    from pgtide.cli.log import show

    show(_configuration(config, settings), as_json=as_json)


@log_app.command("tail", epilog=_EXIT_CODES)
def log_tail(
    config: ConfigFile = None,
    settings: Settings = None,
    tables: Annotated[
        list[str] | None,
        typer.Option("--table", metavar="NAME", help="Only these tables: schema.name, with * and ?. Repeatable."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--change", metavar="KIND", help="Only insert, update, delete, truncate … Repeatable."),
    ] = None,
    last: Annotated[int, typer.Option("--last", metavar="N", help="The last N of them.")] = 10,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", metavar="", help="Go on with what comes, until Ctrl-C.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """The newest changes, one per line: offset, time of the commit, its LSN, transaction, what happened, to what.

    Example: `pgtide log tail --table public.orders --change delete --follow`
    """
    import threading

    from pgtide.cli.log import positive, tail

    found = _configuration(config, settings)
    count = positive(last, "--last")
    kinds = {"tables": tables or (), "changes": changes or ()}
    tail(found, threading.Event(), **kinds, last=count, follow=follow, as_json=as_json)


@log_app.command("check", epilog=_EXIT_CODES)
def log_check(config: ConfigFile = None, settings: Settings = None, as_json: AsJson = False) -> None:
    """Read all of it; check every checksum, the order of offsets and commits, and that every file is there.

    What is wrong is told by file and byte, with the offsets that cannot be read, who still needs them and what to do.
    Exit code 1 if something is wrong.

    Example: `pgtide log check --json | jq .problems`
    """
    from pgtide.cli.log import check

    if not check(_configuration(config, settings), as_json=as_json):
        raise typer.Exit(1)


@log_app.command("prune", epilog=_EXIT_CODES)
def log_prune(
    config: ConfigFile = None,
    settings: Settings = None,
    hours: Annotated[float | None, typer.Option("--hours", help="Instead of log.retention_hours.")] = None,
    max_bytes: Annotated[int | None, typer.Option("--max-bytes", help="Instead of log.max_bytes.")] = None,
    yes: Annotated[bool, typer.Option("--yes", metavar="", help="Do it; else it only shows what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old changes now, by the rules of retention; first shows what would go and who would lose something.

    Example: `pgtide log prune --hours 24`, and the same with --yes when it shows what you want.
    """
    from pgtide.cli.log import prune

    prune(_configuration(config, settings), hours=hours, max_bytes=max_bytes, yes=yes, as_json=as_json)


snapshot_app = typer.Typer(no_args_is_help=True, help="Load tables anew, and see how loads get on.")
app.add_typer(snapshot_app, name="snapshot")


@snapshot_app.command("start", epilog=_EXIT_CODES)
def snapshot_start(
    tables: Annotated[list[str], typer.Argument(metavar="TABLE...", help="schema.table of the source.")],
    config: ConfigFile = None,
    settings: Settings = None,
    kind: Annotated[str, typer.Option("--type", metavar="TYPE", help="bulk: read by Spark, in parallel.")] = "bulk",
) -> None:
    """Load tables anew from the source, while everything goes on.

    Readers see the old rows until the new ones are all there, and then those: never none, never half. The mirror does
    it, now or when it runs next; `pgtide snapshot status` shows how far it is.

    Example: `pgtide snapshot start public.orders --type bulk`
    """
    from pgtide.cli.snapshot import start

    start(_configuration(config, settings), tables, kind)


@snapshot_app.command("status", epilog=_EXIT_CODES)
def snapshot_status(config: ConfigFile = None, settings: Settings = None, as_json: AsJson = False) -> None:
    """The loads that are asked for, under way, or have failed.

    Example: `pgtide snapshot status --json`
    """
    from pgtide.cli.snapshot import show

    show(_configuration(config, settings), as_json=as_json)


points_app = typer.Typer(
    no_args_is_help=True, help="The consistent points of the mirror: LSNs at which all tables agree with the source."
)
app.add_typer(points_app, name="points")


@points_app.command("list", epilog=_EXIT_CODES)
def points_list(
    config: ConfigFile = None,
    settings: Settings = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="At most so many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """The newest points, newest first; no mirror has to run.

    Example: `pgtide points list --limit 5`
    """
    from pgtide.cli.points import list_points

    list_points(_configuration(config, settings), limit=limit, as_json=as_json)


@points_app.command("show", epilog=_EXIT_CODES)
def points_show(
    point: Annotated[str, typer.Argument(metavar="POINT", help="latest, an LSN, or a timestamp.")] = "latest",
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """One point, the newest that is not later than the one named: which version of each table belongs to it.

    Example: `pgtide points show 0/1A2B3C4D`
    """
    from pgtide.cli.points import show_point

    show_point(_configuration(config, settings), point=point, as_json=as_json)
