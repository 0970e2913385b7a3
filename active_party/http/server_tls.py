"""The certificate that this party shows to the programs that ask for predictions."""

import logging
import ssl
import stat
from pathlib import Path
from typing import NamedTuple

from splitveil.active_party.serving_settings import ServingTls
from splitveil.common.errors import SettingsError
from splitveil.common.text.files import read_bytes

logger = logging.getLogger(__name__)

_MAX_FILE_BYTES = 2**20


class _Files(NamedTuple):
    certificate: bytes
    private_key: bytes
    clients: bytes | None


class ServerTls:
    """TLS 1.3 with files that may be replaced while they are in use."""

    def __init__(self, settings: ServingTls, base_dir: Path) -> None:
        self._settings = settings
        self._base_dir = base_dir
        self._files = self._read()
        self.context = self._context_of(self._files)
        """With the files as they were at the last ``refresh``: another one if they have
        changed, since a context that trusts an authority cannot be made to forget it, nor sessions
        that it may resume."""

    def refresh(self) -> None:
        """Use the files as they are now; those that cannot be used change nothing."""
        try:
            now = self._read()
            if now != self._files:
                self.context = self._context_of(now)
                self._files = now
                logger.info("new certificate in use for the programs that ask")
        except SettingsError as error:
            logger.warning("%s; the previous certificate stays in use", error)

    def _read(self) -> _Files:
        own = self._settings
        clients = None if own.clients is None else self._content("clients", own.clients)
        key_path = self._base_dir / own.private_key
        try:
            mode = stat.S_IMODE(key_path.stat().st_mode)
        except OSError as error:
            raise SettingsError(f"serving.tls.private_key: {key_path}: {error.strerror}") from error
        if mode & 0o077:
            raise SettingsError(
                f"serving.tls.private_key: {key_path} has mode {mode:04o}, so that others may read "
                f"it: chmod 600 {key_path}"
            )
        certificate = self._content("certificate", own.certificate)
        return _Files(certificate, self._content("private_key", own.private_key), clients)

    def _content(self, name: str, path: Path) -> bytes:
        try:
            return read_bytes(self._base_dir / path, _MAX_FILE_BYTES)
        except OSError as error:
            where = self._base_dir / path
            raise SettingsError(f"serving.tls.{name}: {where}: {error.strerror}") from error

    def _context_of(self, files: _Files) -> ssl.SSLContext:
        own = self._settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(
                self._base_dir / own.certificate, self._base_dir / own.private_key, lambda: ""
            )
            if files.clients is not None:
                context.load_verify_locations(cadata=files.clients.decode("ascii"))
                context.verify_mode = ssl.CERT_REQUIRED
        except (ssl.SSLError, OSError, ValueError) as error:
            raise SettingsError(
                f"serving.tls: {self._base_dir / own.certificate}: the files cannot be used "
                f"({type(error).__name__}): expected PEM, and a key that belongs to the "
                f"certificate, without a password"
            ) from error
        return context
