"""S3, or a store that speaks its protocol, as the storage of a log.

Endpoint, region and credentials come as for every AWS tool: from AWS_* variables (AWS_ENDPOINT_URL for a store of one's
own), ~/.aws (AWS_PROFILE) or the machine's role.  They are looked up wherever the log is opened, in Spark's
workers too; a log's URL holds nothing secret, and so nothing secret travels with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pgtide.errors import ConfigurationError, LogUnreachableError
from pgtide.log.ranges import Part, RangedFile, Ranges
from pgtide.log.storage import OpenedFile, Stored

_CONNECT_LIMIT_S, _ANSWER_LIMIT_S = 5, 20
_ATTEMPTS = 3  # by the client itself, for what goes away within a second or two
_PAUSE_FIRST_S, _PAUSE_LAST_S = 0.2, 5.0

_CREDENTIALS = (
    "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, and what the key may do in the bucket"
)
_REMEDIES = {
    "NoSuchBucket": "create the bucket, or correct log.path (for a store of your own: AWS_ENDPOINT_URL)",
    "ExpiredToken": "renew the session's credentials",
    "PermanentRedirect": "set AWS_REGION to the bucket's region",
    "AuthorizationHeaderMalformed": "set AWS_REGION to the bucket's region",
    "RequestTimeTooSkewed": "set this machine's clock",
}

T = TypeVar("T")


def s3_storage(location: str, patience_s: float) -> S3:
    # By process: a child that was forked must not share connections with its parent.
    return _s3_storage(location, patience_s, os.getpid())


@lru_cache(maxsize=16)
def _s3_storage(location: str, patience_s: float, _process: int) -> S3:
    return S3(location, _client(_process), patience_s)


@lru_cache(maxsize=1)
def _client(_process: int) -> Any:
    return new_client()


def new_client() -> Any:
    """A client with what the environment says now; thread-safe, and a quarter of a second to make."""
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise ConfigurationError(
            "a log on S3 needs the package boto3, which is not installed", remedy="pip install 'pgtide[s3]'"
        ) from None
    config = Config(
        connect_timeout=_CONNECT_LIMIT_S,
        read_timeout=_ANSWER_LIMIT_S,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        # Blocks have checksums of their own, and not every store knows the newer ones of the protocol.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        return boto3.session.Session().client("s3", config=config)
    except (BotoCoreError, ValueError) as error:  # an unknown profile, a malformed endpoint or configuration file
        raise ConfigurationError(
            f"the AWS settings of this machine cannot be used: {error}", remedy="correct AWS_* variables or ~/.aws"
        ) from None


class S3:
    """See `storage.Storage`.  Used by many threads."""

    def __init__(self, location: str, client: Any, patience_s: float) -> None:
        self._location = location.rstrip("/")
        self._bucket, _, self._prefix = self._location.removeprefix("s3://").partition("/")
        self._client = client
        self._patience_s = patience_s
        self._ranges = Ranges(self._fetch)

    @property
    def location(self) -> str:
        return self._location

    def entries(self, folder: str, after: str = "") -> list[Stored]:
        return self._call(lambda: self._list(folder, after))

    def read(self, name: str) -> bytes:
        return self._call(lambda: self._get(name)[0])

    def read_range(self, name: str, position: int, length: int) -> bytes:
        return self._ranges.read(name, position, length)

    def open(self, name: str) -> OpenedFile:
        return RangedFile(self._ranges, name)

    def versioned(self, name: str) -> tuple[bytes, str] | None:
        try:
            return self._call(lambda: self._get(name))
        except FileNotFoundError:
            return None

    def create(self, name: str, data: bytes) -> str | None:
        return self._call(lambda: self._put_if(name, data, IfNoneMatch="*"))

    def replace(self, name: str, data: bytes, version: str) -> str | None:
        return self._call(lambda: self._put_if(name, data, IfMatch=version))

    def write(self, name: str, data: bytes) -> None:
        self._call(lambda: self._client.put_object(**self._key(name), Body=data))

    def copy_in(self, name: str, file: Path) -> int:
        def put() -> int:
            with file.open("rb") as body:
                self._put_if(name, body, IfNoneMatch="*")
                return os.fstat(body.fileno()).st_size

        return self._call(put)

    def delete(self, name: str) -> None:
        self._call(lambda: self._client.delete_object(**self._key(name)))

    def _key(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": f"{self._prefix}/{name}" if self._prefix else name}

    def _list(self, folder: str, after: str) -> list[Stored]:
        root = len(self._key("")["Key"])
        asked = {"Bucket": self._bucket, "Prefix": self._key(f"{folder}/")["Key"]}
        if after:
            asked["StartAfter"] = self._key(after)["Key"]
        found: list[Stored] = []
        for page in self._client.get_paginator("list_objects_v2").paginate(**asked):
            for item in page.get("Contents", ()):
                modified: datetime = item["LastModified"]
                found.append(Stored(item["Key"][root:], item["Size"], modified.timestamp()))
        return found

    def _get(self, name: str) -> tuple[bytes, str]:
        answer = self._client.get_object(**self._key(name))
        return answer["Body"].read(), answer["ETag"]

    def _fetch(self, name: str, position: int, length: int) -> Part:
        from botocore.exceptions import ClientError

        def get() -> Part:
            try:
                answer = self._client.get_object(**self._key(name), Range=f"bytes={position}-{position + length - 1}")
            except ClientError as error:
                if _code(error) == "InvalidRange":
                    return Part(position, b"", position)  # shorter than it should be; whoever reads it will say so
                raise
            total_bytes = int(answer["ContentRange"].rpartition("/")[2])
            return Part(position, answer["Body"].read(), total_bytes)

        return self._call(get)

    def _put_if(self, name: str, data: Any, **condition: str) -> str | None:
        """The new version; None if the condition does not hold."""
        from botocore.exceptions import ClientError

        try:
            return str(self._client.put_object(**self._key(name), Body=data, **condition)["ETag"])
        except ClientError as error:
            if _code(error) == "PreconditionFailed" or (_code(error) in _NOT_THERE and "IfMatch" in condition):
                return None
            raise

    def _call(self, request: Callable[[], T]) -> T:
        """Makes the request; again, with growing pauses, while the store does not answer and patience lasts."""
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

        deadline_s, pause_s = time.monotonic() + self._patience_s, _PAUSE_FIRST_S
        while True:
            try:
                return request()
            except ClientError as error:
                code = _code(error)
                if code in _NOT_THERE:
                    raise FileNotFoundError(f"{self.location}: {error.operation_name}: {code}") from None
                status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
                trouble = LogUnreachableError(
                    f"the store refuses the log in {self.location}: {code}", remedy=_REMEDIES.get(code, _CREDENTIALS)
                )
                passing = status >= 500 or status in (409, 429) or code == "RequestTimeout"
            except (NoCredentialsError, PartialCredentialsError):
                raise LogUnreachableError(
                    f"there are no AWS credentials for the log in {self.location}",
                    remedy="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
                ) from None
            except BotoCoreError as error:
                trouble = LogUnreachableError(
                    f"the store of the log in {self.location} does not answer: {error}",
                    remedy="check network and AWS_ENDPOINT_URL",
                )
                passing = True
            if not passing or time.monotonic() + pause_s > deadline_s:
                raise trouble
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_LAST_S)


_NOT_THERE = ("NoSuchKey", "404")


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", "unknown"))
