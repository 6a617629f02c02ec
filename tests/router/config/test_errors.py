"""Errors as clients get them."""

import pytest

from warmroute_common.api_errors import NotFoundError
from warmroute_common.http_server import error_body


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_an_error_that_quotes_bytes_which_are_no_text_can_be_told(path: str) -> None:
    quoted = b"/a\xff".decode(errors="surrogateescape")
    assert b"no endpoint /a?" in error_body(path, NotFoundError(f"no endpoint {quoted}"))
