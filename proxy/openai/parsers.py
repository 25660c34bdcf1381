"""Parsers: processes that parse large bodies, so that the event loop waits for none of them."""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path

import msgspec

from proxy.errors import ProxyError
from proxy.http.deadlines import Deadlines
from proxy.http.memory import BodyRefused, Span
from proxy.openai.parser import LENGTH, REQUEST, Parsed
from proxy.openai.payload import ClientRequest, Fields, joined

logger = logging.getLogger(__name__)

NUM_PARSERS = 2
# Bodies that wait for a parser, and how long one may take in all; the largest takes about 0.3 s.
MAX_WAITING = 256
SECONDS = 30.0
# Of private memory that a parser may take. It maps bodies; it does not copy them.
MAX_DATA_BYTES = 256 << 20
_HOME = Path(__file__).parents[2]
_decoder = msgspec.msgpack.Decoder(Parsed)


class Parsers:
    """At most `NUM_PARSERS` processes, started when there is something to parse.

    A parser that fails, or is late, is killed; the next body starts another one.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._room = asyncio.Semaphore(NUM_PARSERS)
        self._idle: list[Process] = []
        self._jobs: set[asyncio.Task[Parsed]] = set()
        self._queued: set[asyncio.Task[Parsed]] = set()

    async def parse(self, body: Span) -> ClientRequest:
        """Parse a large body, as `payload.parse` does a small one.

        Raises:
            BodyRefused: it is not a JSON object, or what should be small in it is not.
            ProxyError: 503, the parsers have too much to do, or one failed.
        """
        if len(self._queued) >= MAX_WAITING:
            raise ProxyError(503, "parser_busy", "too many large bodies wait to be parsed")
        job = asyncio.ensure_future(self._run(body))
        self._jobs.add(job)
        self._queued.add(job)
        job.add_done_callback(self._forget)
        limit = self._deadlines.add(SECONDS, job.cancel)
        job.add_done_callback(lambda _: limit.cancel())
        try:
            await asyncio.wait([job])
        except asyncio.CancelledError:  # a parser that has begun goes on: to start one costs more
            if job in self._queued:
                job.cancel()
            raise
        return _request(body, _result(job))

    async def close(self) -> None:
        """End every parser; idempotent."""
        for job in list(self._jobs):
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        while self._idle:
            await _end(self._idle.pop())

    async def _run(self, body: Span) -> Parsed:
        async with self._room:
            job = asyncio.current_task()
            assert job is not None
            self._queued.discard(job)
            # A place that is read after it was freed would take memory again, which nobody counts.
            keep = body.keep()
            try:
                return await self._parse(body)
            finally:
                keep.free()

    async def _parse(self, body: Span) -> Parsed:
        while self._idle and self._idle[-1].returncode is not None:
            self._idle.pop()  # somebody else has killed it
        parser = self._idle.pop() if self._idle else await _start(body.file)
        try:
            parsed = await _ask(parser, body)
        except BaseException:
            await asyncio.shield(_end(parser))
            raise
        self._idle.append(parser)
        return parsed

    def _forget(self, job: asyncio.Task[Parsed]) -> None:
        self._jobs.discard(job)
        self._queued.discard(job)
        if not job.cancelled():
            job.exception()  # it may be that nobody waits for it


async def _start(file: int) -> Process:
    # In a session of its own: Ctrl-C is for the proxy, which lets its requests end first.
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy.openai.parser", str(file), str(MAX_DATA_BYTES),
        stdin=PIPE, stdout=PIPE, pass_fds=(file,), cwd=_HOME, start_new_session=True,
    )  # fmt: skip


async def _ask(parser: Process, body: Span) -> Parsed:
    assert parser.stdin is not None
    assert parser.stdout is not None
    parser.stdin.write(REQUEST.pack(*body.place))
    (size,) = LENGTH.unpack(await parser.stdout.readexactly(LENGTH.size))
    return _decoder.decode(await parser.stdout.readexactly(size))


async def _end(parser: Process) -> None:
    with suppress(ProcessLookupError):
        parser.kill()
    await parser.wait()


def _result(job: asyncio.Task[Parsed]) -> Parsed:
    if job.cancelled():
        raise ProxyError(503, "parser_busy", f"the body was not parsed within {SECONDS:g} s")
    failure = job.exception()
    if failure is not None:
        logger.error("a parser failed: %r", failure)
        raise ProxyError(503, "parser_failed", "the process that parses this body failed")
    return job.result()


def _request(body: Span, parsed: Parsed) -> ClientRequest:
    if parsed.error is not None:
        status, code, message = parsed.error
        raise BodyRefused(status, code, message)
    fields: Fields = {name: msgspec.Raw(value) for name, value in parsed.fields.items()}
    fields |= {name: body.part(*where) for name, where in parsed.spans.items()}
    whole = joined(fields) if parsed.is_changed else (body.part(0, parsed.end),)
    return ClientRequest(whole, fields)
