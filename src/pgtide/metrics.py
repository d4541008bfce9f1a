"""The numbers that pgtide shows about itself, in one Prometheus registry of its own.

Not the library's global registry: that one adds numbers about Python, and two runs in one process would collide.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

REGISTRY = CollectorRegistry()
_NAMESPACE = "pgtide"


def counter(name: str, meaning: str, labels: Sequence[str] = ()) -> Counter:
    """A number that only grows, shown as `pgtide_<name>_total`."""
    return Counter(name, meaning, labels, namespace=_NAMESPACE, registry=REGISTRY)


def gauge(name: str, meaning: str, labels: Sequence[str] = ()) -> Gauge:
    """A number that goes up and down, shown as `pgtide_<name>`."""
    return Gauge(name, meaning, labels, namespace=_NAMESPACE, registry=REGISTRY)


def histogram(name: str, meaning: str) -> Histogram:
    """How often a time in seconds fell into which range, shown as `pgtide_<name>_bucket`, `_sum` and `_count`."""
    return Histogram(name, meaning, namespace=_NAMESPACE, registry=REGISTRY)


def described() -> list[tuple[str, str, str]]:
    """Name as shown, kind and meaning of all that are declared so far."""
    found = [(metric.name, metric.type, metric.documentation) for metric in REGISTRY.collect()]
    return sorted((f"{name}_total" if kind == "counter" else name, kind, meaning) for name, kind, meaning in found)


def exposition() -> bytes:
    """All numbers in Prometheus's text format."""
    return generate_latest(REGISTRY)
