"""Downloads the images that rows name by URL into a cache on disk, which later runs use again.

A URL in a data set is a stranger's text. Only http and https are asked, without proxies. However a URL or a redirect
spells its host, a socket is opened only for an address that is public, and connects to that address. Bytes, time and
redirects are bounded, and only an image that decodes is kept.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import ipaddress
import logging
import os
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from envs import images
from envs.errors import UserError, first_line

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.connector import AddrInfoType
    from yarl import URL

#: The longest wait for one image in seconds, redirects and repeats included.
TIMEOUT_S = 30.0
#: How often a busy or broken server is asked for an image, and the seconds before asking again.
ATTEMPTS = 3
PAUSE_S = 0.5
MAX_REDIRECTS = 5
#: The largest size of the cache. The images that were not used for longest make room for new ones.
MAX_CACHE_BYTES = 16 * 2**30

_CHUNK = 2**16
_REDIRECTS = (301, 302, 303, 307, 308)
#: Ports of other services begin below this one.
_FIRST_FREE_PORT = 1024
#: The only IPv6 addresses that the internet routes, and those that carry an IPv4 address in their last four bytes.
_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
#: Not for the internet, which older versions of Python do not know: IETF protocols, relays of 6to4, documentation.
_RESERVED = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20")))

logger = logging.getLogger(__name__)


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the public internet, an IPv4 address inside an IPv6 one included.

    This is the seam for tests, which replace it to reach a server of their own.

    >>> is_public("1.1.1.1"), is_public("169.254.169.254"), is_public("::ffff:10.0.0.1"), is_public("127.1")
    (True, False, False, False)
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # another spelling, which the system might understand
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        last = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        inner = ip.ipv4_mapped or ip.sixtofour or (last if ip in _NAT64 else None)
        if inner:
            return is_public(str(inner))
        if ip not in _UNICAST or ip.scope_id:
            return False
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _RESERVED)


class _Busy(Exception):
    """The server may answer if it is asked again."""


class RemoteImages:
    """The cache of downloaded images, filed by the hash of their bytes; `urls/` says which file a URL gave.

    Example::

        remote_images().fetch("https://example.org/a.png", "train.jsonl row 3 images[0]")    # .../images/9f86d0...
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._images = folder / "images"
        self._urls = folder / "urls"
        self._lock = threading.Lock()
        self._has_said_so = False
        self._used: set[Path] = set()
        self._num_bytes = 0

    def fetch(self, url: str, field: str) -> Path:
        """Return the file of a URL's image, downloaded unless it is there; `field` names the place in errors.

        Raises:
            UserError: the URL leads to an address that is not public, gives no image in time, or too many bytes.
        """
        link = self._urls / _digest(url.encode())
        if (file := self._cached(link)) is None:
            # A thread of its own, because the caller's may run an event loop.
            with ThreadPoolExecutor(1) as pool:
                data = pool.submit(asyncio.run, self._download(url, field)).result()
            images.decode_image(data, f"{field} {url}")
            file = self._keep(link, data, field)
        self._used.add(file)
        return file

    def _cached(self, link: Path) -> Path | None:
        try:
            file = self._images / link.read_text()
            if file not in self._used:
                if _digest(file.read_bytes()) != file.name:  # cut off or damaged
                    return None
                os.utime(file)
            if file.is_file():
                return file
            return None
        except OSError:
            return None

    def _keep(self, link: Path, data: bytes, field: str) -> Path:
        file = self._images / _digest(data)
        try:
            with self._lock:
                self._say_where()
                self._make_room(len(data), field)
                for path, content in ((file, data), (link, file.name.encode())):
                    part = path.with_suffix(f".{os.getpid()}.part")
                    part.write_bytes(content)
                    part.replace(path)
        except OSError as error:
            fix = "free some space there, or set XDG_CACHE_HOME"
            raise UserError(
                str(self._folder), "must be writable, for images of URLs", first_line(error), fix
            ) from error
        return file

    def _say_where(self) -> None:
        if not self._has_said_so:
            self._has_said_so = True
            logger.info(f"downloading the images of URLs into {self._folder}")
            for folder in (self._images, self._urls):
                folder.mkdir(parents=True, exist_ok=True)
            self._num_bytes = sum(file.stat().st_size for file in self._images.iterdir())

    def _make_room(self, size: int, field: str) -> None:
        """Remove the images that were not used for longest, down to nine tenths, if a new one does not fit."""
        self._num_bytes += size
        if self._num_bytes <= MAX_CACHE_BYTES:
            return
        found = [(file.stat(), file) for file in self._images.iterdir() if file not in self._used]
        for stat, file in sorted(found, key=lambda each: each[0].st_mtime):
            if self._num_bytes <= 0.9 * MAX_CACHE_BYTES:
                break
            file.unlink(missing_ok=True)
            self._num_bytes -= stat.st_size
        if self._num_bytes > MAX_CACHE_BYTES:
            rule = f"must have images of at most {MAX_CACHE_BYTES} bytes at its URLs"
            raise UserError(field, rule, self._num_bytes, "download them yourself, and give their paths")

    # Downloads ------------------------------------------------------------------------------------------------------

    async def _download(self, url: str, field: str) -> bytes:
        """Return the bytes at a URL. Raises `UserError` if there are none in time."""
        import aiohttp

        reason = "no answer in time"
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for attempt in range(ATTEMPTS):
                    await asyncio.sleep(attempt * PAUSE_S)
                    try:
                        return await _get(url, field)
                    except (_Busy, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                        reason = first_line(error).removeprefix("_Busy: ")
        except TimeoutError:
            pass
        except (aiohttp.ClientError, ValueError) as error:
            reason = first_line(error)
        raise _refusal(url, field, reason)


async def _get(url: str, field: str) -> bytes:
    """Return the bytes at a URL, redirects followed."""
    import aiohttp
    from yarl import URL

    def open_socket(info: AddrInfoType) -> socket.socket:
        """Open a socket for an address, which is the one that aiohttp connects it to."""
        kind = info[:3]
        address = str(info[4][0])
        if not is_public(address):
            raise _refusal(url, field, f"{target.host} is {address}, no public address")
        return socket.socket(*kind)

    connector = aiohttp.TCPConnector(
        socket_factory=open_socket, happy_eyeballs_delay=None, use_dns_cache=False, force_close=True
    )
    headers = {"Accept": "image/*", "Accept-Encoding": "identity"}
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        target = URL(url)  # what the client connects to: the same reading of the text is checked and used
        for _ in range(MAX_REDIRECTS + 1):
            _check(target, url, field)
            async with session.get(target, allow_redirects=False) as answer:
                if answer.status in _REDIRECTS and "Location" in answer.headers:
                    target = target.join(URL(answer.headers["Location"]))
                    continue
                if answer.status == 429 or answer.status >= 500:
                    raise _Busy(f"the server answers {answer.status}")
                if answer.status != 200:
                    raise _refusal(url, field, f"the server answers {answer.status}")
                return await _body(answer, url, field)
    raise _refusal(url, field, f"more than {MAX_REDIRECTS} redirects")


async def _body(answer: aiohttp.ClientResponse, url: str, field: str) -> bytes:
    data = bytearray()
    async for chunk in answer.content.iter_chunked(_CHUNK):
        data += chunk
        if len(data) > images.MAX_BYTES:
            raise _refusal(url, field, f"more than {images.MAX_BYTES} bytes")
    return bytes(data)


def _check(target: URL, url: str, field: str) -> None:
    """Refuse what is no http address, holds a password, or has a host or port that no server of images has."""
    if target.scheme not in ("http", "https") or not target.raw_host:
        raise _refusal(url, field, f"a redirect to {target.scheme or 'nothing'}" if str(target) != url else "no host")
    if target.user is not None or target.password is not None:
        raise _refusal(url, field, "a user or password in it")
    if target.port not in (80, 443) and (target.port or 0) < _FIRST_FREE_PORT:
        raise _refusal(url, field, f"port {target.port} belongs to another service")
    if _is_number(target.raw_host) and not is_public(target.raw_host):
        raise _refusal(url, field, f"{target.host} is no public address")


def _is_number(host: str) -> bool:
    """Return whether a host stands for an address: in IPv6, or its last part is a number, as browsers decide it.

    https://url.spec.whatwg.org/#ends-in-a-number-checker

    >>> [_is_number(host) for host in ("127.1", "0x7f.0.0.0x1.", "::1", "example.com.", "1.example")]
    [True, True, True, False, False]
    """
    last = host.removesuffix(".").rpartition(".")[2]
    return ":" in host or last.isdigit() or re.fullmatch("0[xX][0-9a-fA-F]*", last) is not None


def _refusal(url: str, field: str, reason: str) -> UserError:
    fix = f"{reason}: correct the URL, or give the image itself"
    return UserError(field, f"must be a URL of an image that downloads within {TIMEOUT_S:g} s", url, fix)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def remote_images() -> RemoteImages:
    """Return the cache in the user's cache folder; all data sets of a process share it."""
    return _opened(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trueturn" / "images")


_opened = functools.cache(RemoteImages)
