"""The corpus of requests that try to be two, or none: each as raw bytes, with what must follow.

`FIRST` and `SECOND` are prompts of honest requests; `SMUGGLED` is in bytes that are no request of
their own, and no instance may ever see it.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST, SECOND, SMUGGLED = "first", "second", "smuggled"
PATH = b"/v1/completions"


def body_of(prompt: str) -> bytes:
    """The body of a completion."""
    return b'{"model": "tiny", "prompt": "%b", "max_tokens": 1}' % prompt.encode()


def post(prompt: str, *headers: bytes, path: bytes = PATH, version: bytes = b"1.1") -> bytes:
    """A whole and honest request, with more headers."""
    body = body_of(prompt)
    return head(*headers, b"Content-Length: %d" % len(body), path=path, version=version) + body


def head(
    *headers: bytes, method: bytes = b"POST", path: bytes = PATH, version: bytes = b"1.1"
) -> bytes:
    """A head, with these headers and no length of its own."""
    lines = [b"%b %b HTTP/%b" % (method, path, version), b"Host: x", *headers, b"", b""]
    return b"\r\n".join(lines)


def chunk(content: bytes, extension: bytes = b"") -> bytes:
    """One chunk."""
    return b"%x%b\r\n%b\r\n" % (len(content), extension, content)


END = b"0\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked"
HIDDEN = post(SMUGGLED, b"X-Request-Id: " + SMUGGLED.encode())
_HIDDEN_LENGTH = b"Content-Length: %d" % len(HIDDEN)
FAR = b"\r\n" * 500_000 + HIDDEN  # a parser that skips the first bytes finds a request
GOOD = body_of(FIRST)
LENGTH = b"Content-Length: %d" % len(GOOD)
TYPE = b"Content-Type: application/json"


@dataclass(frozen=True)
class Attack:
    """Bytes to send, and the statuses of all answers, in order.

    `is_open`: the connection then serves the next request. Else it ends after the last answer.
    `after`: so many answers come before the second part is sent; 0: it follows at once.
    """

    parts: tuple[bytes, ...]
    statuses: tuple[int, ...]
    is_open: bool = False
    after: int = 0


def served(*parts: bytes, num_answers: int = 1) -> Attack:
    """What is clear enough to be answered as an honest request."""
    return Attack(parts, (200,) * num_answers, is_open=True)


def refused(*parts: bytes, status: int = 400) -> Attack:
    """What gets one error, and then the end of the connection."""
    return Attack(parts, (status,))


def _early(head: bytes, body: bytes, *, status: int) -> Attack:
    """What is answered before its body comes, which then belongs to nobody."""
    return Attack((head, body), (status,), after=1)


def _with_header(*headers: bytes) -> bytes:
    return head(*headers, LENGTH) + GOOD


def _with_encoding(*headers: bytes) -> bytes:
    """Chunked for whom takes one of these headers for that, and else without a body."""
    return head(*headers) + chunk(GOOD) + END + HIDDEN


def _with_length(value: bytes) -> bytes:
    return head(b"Content-Length: " + value) + GOOD


def _chunks(raw: bytes) -> bytes:
    return head(CHUNKED) + raw


LENGTHS = {
    "one length": served(post(FIRST)),
    "one length, in two parts": served(post(FIRST)[:-9], post(FIRST)[-9:]),
    "two in one packet": Attack((post(FIRST) + post(SECOND),), (200, 200), is_open=True),
    "no length": Attack((head() + post(SECOND),), (400, 200), is_open=True),
    "the same length twice": refused(head(LENGTH, LENGTH) + GOOD),
    "a length and a longer one": refused(head(LENGTH, b"Content-Length: 999") + GOOD),
    "a longer length and a length": refused(head(b"Content-Length: 999", LENGTH) + GOOD),
    "a length of 0 and a length": refused(head(b"Content-Length: 0", LENGTH) + HIDDEN),
    "lengths in a list": refused(_with_length(b"%d, %d" % (len(GOOD), len(GOOD)))),
    "a length with a sign": refused(_with_length(b"+%d" % len(GOOD))),
    "a negative length": refused(_with_length(b"-1")),
    "a hexadecimal length": refused(_with_length(b"0x33")),
    "a length with a space inside": refused(_with_length(b"5 1")),
    "a length of 2 to the 64th": refused(_with_length(b"18446744073709551616")),
    "a length with zeros before it": served(_with_length(b"000000%d" % len(GOOD))),
    "an empty length": refused(_with_length(b"")),
    "a length with a tab before it": served(_with_length(b"\t%d" % len(GOOD))),
    "a length with a form feed": refused(_with_length(b"\x0c%d" % len(GOOD))),
    "a length in other digits": refused(_with_length(b"\xd9\xa5")),
    "a length, and more": Attack((post(FIRST) + b"x" * 9,), (200,)),
    "a length, and later more": Attack((post(FIRST), b"\x00garbage\r\n\r\n"), (200, 400), after=1),
}

ENCODINGS = {
    "chunks": served(_chunks(chunk(GOOD) + END)),
    "chunks of one byte": served(_chunks(b"".join(chunk(b"%c" % b) for b in GOOD) + END)),
    "two in chunks": Attack((_chunks(chunk(GOOD) + END) * 2,), (200, 200), is_open=True),
    "CL.TE": refused(head(b"Content-Length: %d" % (len(END + HIDDEN)), CHUNKED) + END + HIDDEN),
    "TE.CL": refused(head(CHUNKED, b"Content-Length: 4") + chunk(HIDDEN) + END),
    "TE.TE": refused(_with_encoding(CHUNKED, b"Transfer-Encoding: x")),
    "encoding twice": refused(_with_encoding(CHUNKED, CHUNKED)),
    "an unknown encoding": refused(_with_encoding(b"Transfer-Encoding: xchunked"), status=501),
    "identity": refused(_with_encoding(b"Transfer-Encoding: identity"), status=501),
    "identity, then chunked": refused(
        _with_encoding(b"Transfer-Encoding: identity, chunked"), status=501
    ),
    "gzip, then chunked": refused(_with_encoding(b"Transfer-Encoding: gzip, chunked"), status=501),
    "chunked, then identity": refused(_with_encoding(b"Transfer-Encoding: chunked, identity")),
    "chunked in quotes": refused(_with_encoding(b'Transfer-Encoding: "chunked"'), status=501),
    "chunked with a parameter": refused(
        _with_encoding(b"Transfer-Encoding: chunked;q=1"), status=501
    ),
    "chunked and a comma": refused(_with_encoding(b"Transfer-Encoding: chunked,")),
    "chunked behind a vertical tab": refused(_with_encoding(b"Transfer-Encoding: \x0bchunked")),
    "chunked and NUL": refused(_with_encoding(b"Transfer-Encoding: chunked\x00")),
    "a space before the colon": refused(_with_encoding(b"Transfer-Encoding : chunked")),
    "a tab before the colon": refused(_with_encoding(b"Transfer-Encoding\t: chunked")),
    "a space before the name": refused(_with_encoding(b"X: y", b" Transfer-Encoding: chunked")),
    "a line feed before the name": refused(_with_encoding(b"X: y\nTransfer-Encoding: chunked")),
    "a return before the name": refused(_with_encoding(b"X: y\rTransfer-Encoding: chunked")),
    "a line feed in the name": refused(_with_encoding(b"Transfer-Encoding\n: chunked")),
    "a folded encoding": refused(_with_encoding(b"Transfer-Encoding:\r\n chunked")),
    "an encoding with an underscore": Attack(
        (head(b"Transfer_Encoding: chunked", LENGTH) + GOOD,), (200,), is_open=True
    ),
    "chunked with a tab and capitals": served(
        head(b"transfer-encoding:\tCHUNKED ") + chunk(GOOD) + END
    ),
    "chunks in HTTP/1.0": refused(head(CHUNKED, version=b"1.0") + chunk(GOOD) + END),
    "a length and NUL in its name": refused(head(b"Content-Length\x00: 9", LENGTH) + GOOD),
}

CHUNKS = {
    "an extension": served(_chunks(chunk(GOOD, b";a=b") + END)),
    "a quoted extension": served(_chunks(chunk(GOOD, b';a="b;c"') + END)),
    "an extension with a line feed": refused(_chunks(chunk(GOOD, b";a\nx") + END)),
    "an extension with a return": refused(_chunks(chunk(GOOD, b";a\rx") + END)),
    "a quoted extension with a line": refused(_chunks(chunk(GOOD, b';a="\r\n') + END)),
    "a size with a space before it": refused(_chunks(b" " + chunk(GOOD) + END)),
    "a size with a space behind it": refused(_chunks(chunk(GOOD, b" ") + END)),
    "a size with 0x": refused(_chunks(b"0x" + chunk(GOOD) + END)),
    "a size with a sign": refused(_chunks(b"+" + chunk(GOOD) + END)),
    "a negative size": refused(_chunks(b"-1\r\n" + GOOD + END)),
    "a size of 2 to the 64th": refused(_chunks(b"10000000000000000\r\n" + GOOD + END)),
    "a size of 2 to the 64th and a bit": refused(_chunks(b"1000000000000000A\r\n" + GOOD + END)),
    "a size of a hundred zeros": served(_chunks(b"0" * 100 + chunk(GOOD) + END)),
    "a size behind a line feed": refused(_chunks(b"%x\n" % len(GOOD) + GOOD + b"\r\n" + END)),
    "no return behind a chunk": refused(_chunks(b"%x\r\n" % len(GOOD) + GOOD + b"\n" + END)),
    "no line behind a chunk": refused(_chunks(b"%x\r\n" % len(GOOD) + GOOD + END)),
    "a chunk that is too short": refused(_chunks(b"%x\r\n" % (len(GOOD) - 1) + GOOD + b"\r\n")),
    "an empty size": refused(_chunks(b"\r\n" + GOOD + END)),
    "a trailer": served(_chunks(chunk(GOOD) + b"0\r\nX-Session-Id: y\r\n\r\n")),
    "a length as a trailer": refused(_chunks(chunk(GOOD) + b"0\r\nContent-Length: 9\r\n\r\n")),
    "a key as a trailer": served(
        _chunks(chunk(GOOD) + b"0\r\nAuthorization: Bearer smuggled\r\n\r\n")
    ),
    "an id as a trailer": served(_chunks(chunk(GOOD) + b"0\r\nX-Request-Id: smuggled\r\n\r\n")),
    "a trailer without an end": refused(_chunks(chunk(GOOD) + b"0\r\n: x\r\n\r\n")),
    "a large trailer": refused(
        _chunks(chunk(GOOD) + b"0\r\nX: " + b"y" * 100_000 + b"\r\n\r\n"), status=431
    ),
}

LINES = {
    "a folded header": refused(_with_header(b"X: a\r\n b")),
    "line feeds alone": refused(post(FIRST).replace(b"\r\n", b"\n")),
    "a line feed behind a header": refused(post(FIRST, b"X: y\nContent-Length: 0")),
    "a return behind a header": refused(post(FIRST, b"X: y\rContent-Length: 0")),
    "a head that ends with line feeds": refused(post(FIRST).replace(b"\r\n\r\n", b"\n\n")),
    "a head that ends with two returns": refused(post(FIRST).replace(b"\r\n\r\n", b"\r\r\n\r\n")),
    "NUL in a value": refused(_with_header(b"X: a\x00b")),
    "a control in a value": refused(_with_header(b"X-Request-Id: a\x01b")),
    "DEL in a value": refused(_with_header(b"X-Request-Id: a\x7fb")),
    "NUL in a name": refused(_with_header(b"X\x00Y: a")),
    "a space in a name": refused(_with_header(b"X Y: a")),
    "no name": refused(_with_header(b": a")),
    "no colon": refused(_with_header(b"X")),
    "lines before the request": served(b"\r\n\r\n" + post(FIRST)),
    "spaces before the request": refused(b"  " + post(FIRST)),
    "NUL before the request": refused(b"\x00" + post(FIRST)),
    "two hosts": refused(_with_header(b"Host: y")),
    "no host": refused(post(FIRST).replace(b"Host: x\r\n", b"")),
    "a large header": refused(_with_header(b"X: " + b"y" * 200_000), status=431),
    "many short headers in one packet": refused(_with_header(*[b"a:"] * 3000), status=431),
    "many headers": refused(_with_header(*[b"X%d: y" % n for n in range(20_000)]), status=431),
    "a header without an end": refused(
        *[head()[:-4] + b"\r\nX: ", *[b"y" * 50_000] * 4], status=431
    ),
    "a target without an end": refused(*[b"POST /", *[b"y" * 50_000] * 4], status=431),
}

VERSIONS = {
    "HTTP/1.0": Attack((post(FIRST, version=b"1.0"),), (200,)),
    "HTTP/1.0, kept": Attack((post(FIRST, b"Connection: keep-alive", version=b"1.0"),), (200,)),
    "HTTP/1.0 and another": Attack((post(FIRST, version=b"1.0") + HIDDEN,), (200,)),
    "the last, and another": Attack((post(FIRST, b"Connection: close") + HIDDEN,), (200,)),
    "HTTP/0.9": refused(b"GET /health\r\n\r\n", status=505),
    "HTTP/2.0": refused(post(FIRST, version=b"2.0"), status=505),
    "the preface of HTTP/2": refused(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 9, status=400),
    "HTTP/1.2": refused(post(FIRST, version=b"1.2")),
    "HTTP/1.10": refused(post(FIRST, version=b"1.10")),
    "HTTP/01.1": refused(post(FIRST, version=b"01.1")),
    "http in small letters": refused(post(FIRST).replace(b"HTTP/1.1", b"http/1.1")),
    "TLS": refused(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64),
    "SSH": refused(b"SSH-2.0-OpenSSH_9.2\r\n"),
}

TARGETS = {
    "an absolute target": served(post(FIRST, path=b"http://elsewhere" + PATH)),
    "a query": served(post(FIRST, path=PATH + b"?stream=true")),
    "a line in the path": Attack(
        (post(SMUGGLED, path=PATH + b"%0d%0aX:%20y"),), (404,), is_open=True
    ),
    "two slashes in an absolute target": refused(post(SMUGGLED, path=b"http://x/" + PATH)),
    "two slashes": refused(post(SMUGGLED, path=b"/" + PATH)),
    "dots": Attack((post(SMUGGLED, path=b"/v1/../v1/completions"),), (404,), is_open=True),
    "a path in percents": Attack(
        (post(SMUGGLED, path=b"/v1/%63ompletions"),), (404,), is_open=True
    ),
    "a space in the target": refused(post(FIRST, path=b"/v1/comp letions")),
    "two spaces": served(post(FIRST).replace(b"POST ", b"POST  ")),
    "a tab": refused(post(FIRST).replace(b"POST ", b"POST\t")),
    "a fragment": served(post(FIRST, path=PATH + b"#x")),
    "bytes in the target": refused(post(FIRST, path=PATH + b"\xff")),
    "a star": Attack((post(FIRST, path=b"*"),), (404,), is_open=True),
    "an unknown method": refused(post(FIRST).replace(b"POST", b"SMUGGLE")),
    "post in small letters": refused(post(FIRST).replace(b"POST", b"post")),
    "GET with a body": served(head(_HIDDEN_LENGTH, method=b"GET", path=b"/health") + HIDDEN),
    "HEAD with a body": Attack(
        (head(_HIDDEN_LENGTH, method=b"HEAD", path=b"/health") + HIDDEN,), (200,), is_open=True
    ),
}

OTHER_PROTOCOLS = {
    "upgrade": served(
        post(
            FIRST,
            b"Upgrade: h2c",
            b"Connection: Upgrade, HTTP2-Settings",
            b"HTTP2-Settings: AAMAAABkAAQAAP__",
        )
    ),
    "upgrade, and the body later": served(
        head(b"Upgrade: h2c", b"Connection: upgrade", LENGTH), GOOD
    ),
    "upgrade, and a request as body": served(
        head(b"Upgrade: x", b"Connection: upgrade", _HIDDEN_LENGTH, method=b"GET", path=b"/health")
        + HIDDEN
    ),
    "upgrade, and later a request as body": _early(
        head(b"Upgrade: x", b"Connection: upgrade", _HIDDEN_LENGTH, method=b"GET", path=b"/health"),
        HIDDEN,
        status=200,
    ),
    "upgrade, and a request behind many lines": Attack(
        (head(b"Upgrade: x", b"Connection: upgrade", b"Content-Length: %d" % len(FAR)) + FAR,),
        (400,),
        is_open=True,
    ),
    "upgrade, and chunks": served(
        head(b"Upgrade: x", b"Connection: upgrade", CHUNKED), chunk(GOOD) + END
    ),
    "upgrade, and another": Attack(
        (post(FIRST, b"Upgrade: x", b"Connection: upgrade") + post(SECOND),),
        (200, 200),
        is_open=True,
    ),
    "upgrade and two lengths": refused(
        head(b"Upgrade: x", b"Connection: upgrade", LENGTH, LENGTH) + GOOD
    ),
    "upgrade, CL and TE": refused(
        head(b"Upgrade: x", b"Connection: upgrade", LENGTH, CHUNKED) + GOOD
    ),
    "websocket": _early(
        head(
            b"Upgrade: websocket",
            b"Connection: upgrade",
            b"Sec-WebSocket-Key: x",
            b"Sec-WebSocket-Version: 13",
            _HIDDEN_LENGTH,
            method=b"GET",
            path=b"/health",
        ),
        HIDDEN,
        status=200,
    ),
    "a tunnel": refused(head(_HIDDEN_LENGTH, method=b"CONNECT", path=b"x:80"), HIDDEN, status=405),
}

EARLY = {
    "the body of no route": _early(head(_HIDDEN_LENGTH, path=b"/nothing"), HIDDEN, status=404),
    "the body of a wrong method": _early(head(_HIDDEN_LENGTH, method=b"PUT"), HIDDEN, status=405),
    "the body of an order": _early(
        head(_HIDDEN_LENGTH, path=b"/instances/add"), HIDDEN, status=403
    ),
    "a body that does not come": Attack(
        (head(b"Content-Length: 999", method=b"GET", path=b"/health"),), (200,)
    ),
    "a broken chunk": refused(head(CHUNKED), b"zz\r\n" + HIDDEN),
    "an error behind a request": Attack((post(FIRST) + b"\x00\r\n\r\n",), (200,)),
    "too many in one packet": Attack(
        (b"".join([head(method=b"GET", path=b"/health")] * 99),), (200,)
    ),
    "expect": Attack(
        (head(LENGTH, b"Expect: 100-continue"), GOOD), (100, 200), is_open=True, after=1
    ),
    "expect, and the body at once": Attack(
        (head(LENGTH, b"Expect: 100-continue") + GOOD,), (100, 200), is_open=True
    ),
    "expect, and no body": Attack(
        (
            head(_HIDDEN_LENGTH, b"Expect: 100-continue", path=b"/nothing"),
            HIDDEN,
        ),
        (100, 404),
        after=2,
    ),
    "expect something else": refused(head(LENGTH, b"Expect: 200-ok") + GOOD, status=417),
    "expect in HTTP/1.0": Attack(
        (head(LENGTH, b"Expect: 100-continue", version=b"1.0"), GOOD), (200,)
    ),
}

ATTACKS = {
    **LENGTHS,
    **ENCODINGS,
    **CHUNKS,
    **LINES,
    **VERSIONS,
    **TARGETS,
    **OTHER_PROTOCOLS,
    **EARLY,
}
