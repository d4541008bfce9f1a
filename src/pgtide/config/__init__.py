"""One typed configuration, from pgtide.toml, the environment and the command line; checked before anything starts.

`model` says what can be configured, `loading` where values come from and how mistakes are told,
`template` writes the commented file of `pgtide init`.
"""

from pgtide.config.loading import DEFAULT_FILE, load_config
from pgtide.config.model import (
    INSERT_ONLY_SUFFIX,
    Capture,
    Config,
    Log,
    Mirror,
    Snapshot,
    Source,
    Spark,
    TableOptions,
    is_url,
)
from pgtide.config.patterns import matches
from pgtide.config.template import template

__all__ = [
    "DEFAULT_FILE",
    "INSERT_ONLY_SUFFIX",
    "Capture",
    "Config",
    "Log",
    "Mirror",
    "Snapshot",
    "Source",
    "Spark",
    "TableOptions",
    "is_url",
    "load_config",
    "matches",
    "template",
]
