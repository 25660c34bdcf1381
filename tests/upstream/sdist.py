"""Source distributions from the package index, kept outside version control."""

from __future__ import annotations

import hashlib
import html.parser
import os
import tarfile
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache"
_PYPI = "https://pypi.org/simple"
_PAGE_SECONDS = 60.0
_FILE_SECONDS = 600.0


class SourceError(Exception):
    """The index does not have the source distribution, or has another one than it promises."""


class _Links(html.parser.HTMLParser):
    """Collects the file links of a project's page (PEP 503): the one form every index speaks."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the target of each anchor."""
        self.urls += [value for name, value in attrs if tag == "a" and name == "href" and value]


def find_link(page: str, page_url: str, file_name: str) -> str:
    """Return the absolute address of a file on an index page, with its hash as the fragment.

    Raises:
        SourceError: the page does not list it.
    """
    links = _Links()
    links.feed(page)
    for url in links.urls:
        if urllib.parse.urlsplit(url).path.rpartition("/")[2] == file_name:
            return urllib.parse.urljoin(page_url, url)
    raise SourceError(f"{page_url} does not list {file_name}")


def fetch_source(project: str, version: str) -> Path:
    """Download a source distribution once and return the archive; blocks for minutes at most.

    pip is of no use here: it runs the project's build to read its metadata, even to download.

    Raises:
        SourceError: it is not on the index, or its SHA-256 is not the one the index states.
        OSError: the index cannot be reached.
    """
    archive = CACHE / "sources" / f"{project}-{version}.tar.gz"
    if not archive.exists():
        page_url = _page_url(project)
        url = find_link(_get(page_url, _PAGE_SECONDS).decode(), page_url, archive.name)
        content = _get(url, _FILE_SECONDS)
        check_hash(url, content)
        archive.parent.mkdir(parents=True, exist_ok=True)
        draft = archive.with_suffix(f".{os.getpid()}")
        draft.write_bytes(content)
        draft.rename(archive)
    return archive


def check_hash(url: str, content: bytes) -> None:
    """Compare content with the `#sha256=` of its address.

    Raises:
        SourceError: they differ, or the address states none.
    """
    stated = urllib.parse.urlsplit(url).fragment
    actual = f"sha256={hashlib.sha256(content).hexdigest()}"
    if stated != actual:
        raise SourceError(f"{url}: the file's hash is {actual}")


def read_members(archive: Path, names: list[str]) -> Mapping[str, str]:
    """Return the text of these files of an archive, named without its top folder.

    Raises:
        SourceError: the archive lacks one.
    """
    wanted = set(names)
    found: dict[str, str] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.partition("/")[2]
            if name in wanted and (content := tar.extractfile(member)) is not None:
                found[name] = content.read().decode()
    if missing := wanted - found.keys():
        raise SourceError(f"{archive.name} lacks {', '.join(sorted(missing))}")
    return found


def extract_folder(archive: Path, folder: str, target: Path) -> None:
    """Write the files below one folder of an archive under `target`."""
    with tarfile.open(archive) as tar:
        for member in tar:
            path = Path(member.name.partition("/")[2])
            if member.isfile() and path.is_relative_to(folder) and ".." not in path.parts:
                destination = target / path.relative_to(folder)
                destination.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                destination.write_bytes(content.read() if content else b"")


def _page_url(project: str) -> str:
    return f"{os.environ.get('PIP_INDEX_URL', _PYPI).rstrip('/')}/{project}/"


def _get(url: str, timeout: float) -> bytes:
    if not url.startswith(("https://", "http://", "file://")):
        raise SourceError(f"not an address to download from: {url}")
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return bytes(answer.read())
