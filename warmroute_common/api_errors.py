"""Errors that HTTP clients get, in OpenAI's shape and, for ``/v1/messages``, in Anthropic's."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final

_MODELS_NAMED: Final = 20

_OPENAI_TYPES: Final[dict[int, str]] = {
    429: "rate_limit_error",
    500: "internal_error",
    502: "upstream_error",
    503: "overloaded_error",
    504: "upstream_error",
}
_ANTHROPIC_TYPES: Final[dict[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """A request that gets an error from the router itself.

    ``param`` names the field of the body at fault, ``code`` is for programs.
    """

    status: ClassVar[int] = 500
    default_code: ClassVar[str | None] = None
    default_retry_after_s: ClassVar[int | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        # A message may quote what a client sent, and a header's bytes need not be text: no body
        # could be written of them.
        self.message = message.encode(errors="replace").decode()
        super().__init__(self.message)
        self.param = param
        self.code = self.default_code if code is None else code
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s

    @property
    def type(self) -> str:
        """What OpenAI's clients tell errors apart by."""
        return _OPENAI_TYPES.get(self.status, "invalid_request_error")

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers that belong to this error's response."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}

    @property
    def logged(self) -> str:
        """What the log says of it."""
        return self.message

    def openai_body(self) -> dict[str, Any]:
        """Return the body that OpenAI's clients parse."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic_body(self) -> dict[str, Any]:
        """Return the body that Anthropic's clients parse."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


class BadRequestError(ApiError):
    """The body cannot be used as it is (400)."""

    status = 400

    @property
    def logged(self) -> str:
        """Where the body is wrong; the message may quote it, and prompts do not belong in logs."""
        return " ".join(each for each in ("bad request", self.code, self.param) if each)


class UnknownModelError(ApiError):
    """No replica serves the model asked for (404); the message names some that are served."""

    status = 404
    default_code = "model_not_found"

    def __init__(self, model: str | None, known: Iterable[str]) -> None:
        names = sorted(known)
        more = ", ..." if len(names) > _MODELS_NAMED else ""
        served = f"; served: {', '.join(names[:_MODELS_NAMED])}{more}" if names else ""
        super().__init__(f"no replica serves the model '{model}'{served}", param="model")


class UnauthorizedError(ApiError):
    """The caller shows no key or secret that is known here (401)."""

    status = 401
    type = "authentication_error"
    default_code = "unauthorized"
    headers = MappingProxyType({"WWW-Authenticate": "Bearer"})


class ForbiddenError(ApiError):
    """The caller is known, and may not do this (403)."""

    status = 403
    default_code = "forbidden"


class NotFoundError(ApiError):
    """No such endpoint, or the thing referred to is not here (404)."""

    status = 404
    default_code = "not_found"


class MethodNotAllowedError(ApiError):
    """The endpoint exists, with another method (405)."""

    status = 405
    default_code = "method_not_allowed"


class NotSupportedError(ApiError):
    """The router cannot do what the protocol asks for (501)."""

    status = 501
    default_code = "not_supported"


class TooSlowError(ApiError):
    """The request did not come whole in time (408)."""

    status = 408
    default_code = "request_timeout"


class ConflictError(ApiError):
    """What is there does not allow what was asked (409)."""

    status = 409
    default_code = "conflict"


class ExpectationFailedError(ApiError):
    """The request's header ``Expect`` asks for something unknown (417)."""

    status = 417
    default_code = "expectation_failed"


class TooLargeError(ApiError):
    """The body is over the configured limit (413)."""

    status = 413
    default_code = "request_too_large"


class RateLimitedError(ApiError):
    """More is being asked than the replicas get done in time (429); the client may retry.

    ``cause`` is one word for the metrics.
    """

    status = 429
    default_code = "rate_limit_exceeded"

    def __init__(
        self, message: str, *, cause: str, retry_after_s: int, code: str | None = None
    ) -> None:
        super().__init__(message, code=code, retry_after_s=retry_after_s)
        self.cause = cause


class NoReplicaError(ApiError):
    """No replica can take the request now (503); the client may retry."""

    status = 503
    default_code = "no_replica"
    default_retry_after_s = 1


class OverloadedError(ApiError):
    """More is being asked at once than is taken on (503); the client may retry."""

    status = 503
    default_code = "overloaded"
    default_retry_after_s = 1


class UpstreamFailedError(ApiError):
    """The replicas tried could not be reached or gave no usable answer (502)."""

    status = 502
    default_code = "upstream_failed"


class UpstreamTimeoutError(ApiError):
    """A replica accepted the request and did not begin to answer in time (504)."""

    status = 504
    default_code = "upstream_timeout"
