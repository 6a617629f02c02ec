"""Which model a form names: what the replica's own parser finds, or nothing."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.api.grant import Grant
from router.config.settings import KeyConfig, ReplicaConfig, RouterConfig
from router.policy import Plane, Policy
from warmroute_common.api_errors import BadRequestError, ForbiddenError

PATH = "/v1/audio/transcriptions"
TYPE = "multipart/form-data; boundary=x"
POLICY = Policy(
    RouterConfig(
        replicas=(ReplicaConfig(url="http://127.0.0.1:1"),), model_aliases={"short": "org/long"}
    )
)


def part(value: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([*headers, b"", value])


def model(value: bytes) -> bytes:
    return part(value, b'Content-Disposition: form-data; name="model"')


FILE = part(b"\x00\r\n\xff", b'Content-Disposition: form-data; name="file"; filename="a.wav"')


def form(*parts: bytes, boundary: bytes = b"x") -> bytes:
    opened = b"".join(b"--" + boundary + b"\r\n" + each + b"\r\n" for each in parts)
    return opened + b"--" + boundary + b"--\r\n"


def named(body: bytes, content_type: str = TYPE) -> str | None:
    headers = {"content-type": content_type}
    return POLICY.parse(Plane.PROXY, "POST", PATH, headers, body).model


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (form(model(b"m1")), TYPE),
        (form(FILE, model(b"m1"), FILE), TYPE),
        (form(FILE, model(b"m1")), 'Multipart/Form-Data;charset=UTF-8; boundary="x"'),
        (form(part(b"m1", b"content-disposition:form-data;name=model")), TYPE),
        (
            form(
                part(
                    b"m1",
                    b"Content-Type: text/plain; charset=utf-8",
                    b'Content-Disposition: form-data; name="model"',
                )
            ),
            TYPE,
        ),
        (form(model(b"m1"), boundary=b"----a'b"), "multipart/form-data; boundary=----a'b"),
    ],
)
def test_the_model_is_found(body: bytes, content_type: str) -> None:
    assert named(body, content_type) == "m1"


def test_an_alias_is_replaced_in_its_part_alone() -> None:
    body = form(FILE, model(b"short"), part(b"short", b'Content-Disposition: form-data; name="a"'))
    parsed = POLICY.parse(Plane.PROXY, "POST", PATH, {"content-type": TYPE}, body)
    assert parsed.model == "org/long"
    assert parsed.body == body.replace(b"short", b"org/long", 1)


@pytest.mark.parametrize("parts", [(b"m1", b"m2"), (b"m1", b"m1"), (b"m1",) * 3])
def test_several_models_are_refused(parts: Sequence[bytes]) -> None:
    with pytest.raises(BadRequestError, match="several parts 'model'"):
        named(form(*map(model, parts[:1]), FILE, *map(model, parts[1:])))


UNREADABLE = {
    "no part": form(),
    "nothing": b"",
    "not closed": form(model(b"m1"))[:-6],
    "preamble": b"preamble\r\n" + form(model(b"m1")),
    "epilogue": form(model(b"m1")) + form(model(b"m2")),
    "delimiter with blanks": form(model(b"m1")).replace(b"--x\r\n", b"--x \r\n"),
    "delimiter after a line feed": form(FILE, model(b"m1")).replace(b"\r\n--x\r", b"\n--x\r"),
    "longer boundary": form(model(b"m1")).replace(b"--x\r\n", b"--xy\r\n"),
    "folded header": form(part(b"m1", b"Content-Disposition: form-data;", b' name="model"')),
    "two dispositions": form(
        part(
            b"m1",
            b'Content-Disposition: form-data; name="a"',
            b'Content-Disposition: form-data; name="model"',
        )
    ),
    "two names": form(part(b"m1", b'Content-Disposition: form-data; name="a"; name="model"')),
    "extended name": form(part(b"m1", b"Content-Disposition: form-data; name*=utf-8''model")),
    "escaped name": form(part(b"m1", b'Content-Disposition: form-data; name="mod\\el"')),
    "escaped quote": form(
        part(b"m1", b'Content-Disposition: form-data; filename="a\\"; name="model"')
    ),
    "a file": form(part(b"m1", b'Content-Disposition: form-data; name="model"; filename="a"')),
    "encoded": form(
        part(
            b"bTE=",
            b'Content-Disposition: form-data; name="model"',
            b"Content-Transfer-Encoding: base64",
        )
    ),
    "not UTF-8": form(model(b"m1\xff")),
    "no headers": form(b"\r\nm1"),
    "line feeds": form(model(b"m1")).replace(b"\r\n", b"\n"),
    "too long": form(model(b"m" * 2000)),
    "too many parts": form(*[FILE] * 2000, model(b"m1")),
}
OTHER_TYPES = (
    "multipart/form-data",
    "multipart/form-data; boundary=",
    "multipart/form-data; boundary=x; boundary=y",
    'multipart/form-data; a="; boundary=x"; boundary=y',
    "multipart/form-data; boundary=x; charset=utf-16",
    "multipart/form-data; boundary*=utf-8''x",
    "multipart/mixed; boundary=x",
)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        *((each, TYPE) for each in UNREADABLE.values()),
        *((form(model(b"m1")), each) for each in OTHER_TYPES),
        (b"model=m1", "application/x-www-form-urlencoded"),
        # Valid JSON, and a form that names another model.
        (b'{"model":"m1","a":"&model=m2&"}', "application/x-www-form-urlencoded"),
        (b'{"model":"m1"}', TYPE),
    ],
    ids=[*UNREADABLE, *OTHER_TYPES, "urlencoded", "urlencoded JSON", "JSON"],
)
def test_what_could_be_read_in_two_ways_names_no_model(body: bytes, content_type: str) -> None:
    """So a key that is limited to certain models may not send it."""
    found = named(body, content_type)
    assert found is None
    grant = Grant(KeyConfig(name="k", sha256="0" * 64, models=("m1",)), Counter())
    with pytest.raises(ForbiddenError):
        grant.check_model(found)


REFUSED = object()
# Starlette leaves files open where a form ends too early.
LEAVES_FILES = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def theirs(body: bytes, content_type: str) -> object:
    """Return the model that vLLM's server sees; ``body`` or `REFUSED`."""
    parsers = pytest.importorskip("starlette.formparsers")

    async def stream() -> AsyncGenerator[bytes]:
        yield body

    async def read() -> object:
        parser = parsers.MultiPartParser(parsers.Headers({"content-type": content_type}), stream())
        found = await parser.parse()
        await found.close()
        return found.get("model")

    try:
        return asyncio.run(read())
    except (parsers.MultiPartException, KeyError):
        return REFUSED


_PIECES = st.sampled_from(
    [
        *(b"--x\r\n", b"--x--\r\n", b"\r\n", b"\n", b"\r\n\r\n", b"--x", b"--", b" ", b";", b'"'),
        *(b'Content-Disposition: form-data; name="model"\r\n\r\n', b"m1", b"m2", b"\\", b"\r"),
        *(b'Content-Disposition: form-data; name="a"\r\n\r\n', b"name=model", b'name="a"'),
        *(b"Content-Disposition: form-data", b"; filename=a", b"name*=model", b"\t", b":"),
        form(model(b"m1")),
        form(FILE, model(b"m2")),
    ]
)


@LEAVES_FILES
@given(pieces=st.lists(_PIECES, max_size=14))
@example(pieces=[form(model(b"m1"))])
@example(pieces=[b"--x\r\n", model(b"m1"), b"\r\n--x", b"\r\n", model(b"m2"), b"\r\n--x--\r\n"])
def test_a_model_that_is_found_is_the_one_that_the_replica_finds(pieces: list[bytes]) -> None:
    body = b"".join(pieces)
    try:
        found = named(body)
    except BadRequestError:
        return
    if found is None:
        return
    assert theirs(body, TYPE) in (found, REFUSED)


@LEAVES_FILES
@given(
    at=st.integers(0, 400),
    cut=st.integers(0, 6),
    put=_PIECES,
    first=st.sampled_from([b"m1", b"short"]),
)
def test_nor_after_a_change_anywhere(at: int, cut: int, put: bytes, first: bytes) -> None:
    body = form(FILE, model(first), part(b"m2", b'Content-Disposition: form-data; name="a"'))
    at = min(at, len(body))
    body = body[:at] + put + body[at + cut :]
    try:
        parsed = POLICY.parse(Plane.PROXY, "POST", PATH, {"content-type": TYPE}, body)
    except BadRequestError:
        return
    if parsed.model is None:
        return
    assert theirs(bytes(parsed.body), TYPE) in (parsed.model, REFUSED)
