"""The proxy that this machine names for its programs (HTTPS_PROXY, NO_PROXY …), in Java's words.

Java reads none of those variables.  What is read here is what Python's own downloads use, so pip and the JVM that
fetches the jars take the same way out.
"""

from __future__ import annotations

from urllib.parse import unquote, urlsplit
from urllib.request import getproxies

# What Java leaves out by itself; the property replaces it.
_ALWAYS_DIRECT = ("localhost", "127.*", "[::1]")


def proxy_options() -> list[str]:
    """The JVM's options; none where no proxy is named.  A SOCKS proxy is passed over."""
    proxies = getproxies()
    options: list[str] = []
    for scheme in ("http", "https"):
        if named := proxies.get(scheme):
            options += _of_one(scheme, named)
    if options:
        direct = [*_ALWAYS_DIRECT, *_direct_hosts(proxies.get("no", ""))]
        options.append(f"-Dhttp.nonProxyHosts={'|'.join(dict.fromkeys(direct))}")
    return options


def _of_one(scheme: str, named: str) -> list[str]:
    proxy = urlsplit(named if "://" in named else f"http://{named}")
    if proxy.scheme not in ("http", "https") or not proxy.hostname:
        return []
    port = proxy.port or (443 if proxy.scheme == "https" else 80)
    options = [f"-D{scheme}.proxyHost={proxy.hostname}", f"-D{scheme}.proxyPort={port}"]
    if proxy.username:
        # Ivy knows one user for both schemes, and Java by itself sends no password ahead of a tunnel.
        options += [
            f"-Dhttp.proxyUser={unquote(proxy.username)}",
            f"-Dhttp.proxyPassword={unquote(proxy.password or '')}",
            "-Djdk.http.auth.tunneling.disabledSchemes=",
        ]
    return options


def _direct_hosts(no_proxy: str) -> list[str]:
    """`example.org` and `.example.org` both mean the host and all below it, as for Python and curl."""
    hosts: list[str] = []
    for entry in (part.strip() for part in no_proxy.split(",")):
        if entry == "*":
            hosts.append("*")
        elif entry:
            name = entry.lstrip("*").lstrip(".")
            hosts += [name, f"*.{name}"]
    return hosts
