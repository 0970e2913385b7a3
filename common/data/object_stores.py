"""Opens the object stores in which a party's files may be, with credentials from a private file."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pyarrow import fs
from pydantic import Field, ValidationError, model_validator

from splitveil.common.data.secret_files import read_secret
from splitveil.common.data.source_settings import Scheme, StoreSettings, expand_path
from splitveil.common.errors import SettingsError
from splitveil.common.settings import Section
from splitveil.common.text.yaml_text import load_yaml

CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 60.0
RETRY_TIME = timedelta(seconds=30)
"""Time for which requests to ``gs://`` are repeated; the library's own is 15 minutes."""

_SETTING = "store.credentials"


class _S3Credentials(Section):
    access_key: str = Field(min_length=1)
    secret_key: str = Field(min_length=1)
    session_token: str | None = Field(default=None, min_length=1)


class _AzureCredentials(Section):
    account_key: str | None = Field(default=None, min_length=1)
    sas_token: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _is_one_of_them(self) -> "_AzureCredentials":
        if (self.account_key is None) == (self.sas_token is None):
            raise ValueError
        return self


_Credentials = TypeVar("_Credentials", bound=Section)


def open_store(scheme: Scheme, settings: StoreSettings, bucket: str, base_dir: Path) -> Any:
    """Return the pyarrow file system of an object store.

    Args:
        scheme: the kind of store.
        settings: say how it is reached.
        bucket: the bucket, whose region is looked up if nothing names it.
        base_dir: folder to which relative paths refer.

    Raises:
        SettingsError: the file with the credentials cannot be used.
    """
    match scheme:
        case "s3":
            return _open_s3(settings, bucket, base_dir)
        case "gs":
            return fs.GcsFileSystem(
                anonymous=settings.anonymous, retry_time_limit=RETRY_TIME, **_endpoint(settings)
            )
        case "abfs":
            return _open_azure(settings, base_dir)


def _open_s3(settings: StoreSettings, bucket: str, base_dir: Path) -> Any:
    options = _read(_S3Credentials, settings, base_dir, "access_key and secret_key")
    region = settings.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region is None and settings.endpoint is None:
        try:
            region = fs.resolve_s3_region(bucket)
        except OSError:
            region = None  # listing the bucket will say why
    return fs.S3FileSystem(
        anonymous=settings.anonymous,
        region=region,
        connect_timeout=CONNECT_TIMEOUT_S,
        request_timeout=REQUEST_TIMEOUT_S,
        **options,
        **_endpoint(settings),
    )


def _endpoint(settings: StoreSettings) -> dict[str, str]:
    if settings.endpoint is None:
        return {}
    address = urlsplit(settings.endpoint)
    return {"scheme": address.scheme, "endpoint_override": address.netloc + address.path}


def _open_azure(settings: StoreSettings, base_dir: Path) -> Any:
    options = _read(_AzureCredentials, settings, base_dir, "one of account_key and sas_token")
    if settings.endpoint is not None:
        address = urlsplit(settings.endpoint)
        for service in ("blob", "dfs"):
            options[f"{service}_storage_authority"] = address.netloc
            options[f"{service}_storage_scheme"] = address.scheme
    return fs.AzureFileSystem(settings.account, **options)


def _read(
    section: type[_Credentials], settings: StoreSettings, base_dir: Path, expected: str
) -> dict[str, str]:
    """Return the credentials in the file that the settings name; none without a file."""
    if settings.credentials is None:
        return {}
    path = expand_path(_SETTING, settings.credentials, base_dir)
    text = read_secret(path, _SETTING)
    try:
        found = section.model_validate(load_yaml(text, str(path)))
    except (ValidationError, SettingsError):
        # Their own messages quote what was found.
        raise SettingsError(f"{_SETTING}: {path}: expected a YAML file with {expected}") from None
    return found.model_dump(exclude_none=True)
