"""Reading what a client asks of a simulated replica."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simulator.api.prompts import BadPromptError, Prompts, SimPrompt, chat_text
from simulator.settings import Settings


class SimulatedCallError(Exception):
    """A request that vLLM would refuse, too."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        kind: str = "BadRequestError",
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Call:
    """A completion that is asked for."""

    prompt: SimPrompt
    is_chat: bool
    streams: bool
    wants_usage: bool


class CallReader:
    """Reads bodies for the replicas of one fleet, and remembers their prompts for all of them."""

    def __init__(self, settings: Settings, prompts: Prompts) -> None:
        self._settings = settings
        self._prompts = prompts

    def read(self, body: Mapping[str, Any], *, is_chat: bool) -> Call:
        """Return what is asked for; raise `SimulatedCallError`."""
        self._check_model(body.get("model"))
        if body.get("n", 1) != 1:
            raise SimulatedCallError("only one answer is given: leave 'n' out", param="n")
        options = body.get("stream_options") or {}
        return Call(
            prompt=self._prompt(body, is_chat=is_chat),
            is_chat=is_chat,
            streams=body.get("stream") is True,
            wants_usage=isinstance(options, dict) and options.get("include_usage") is True,
        )

    def token_ids(self, body: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a ``/tokenize`` request."""
        try:
            if "messages" in body:
                prompt = self._prompts.of_text(_chat(body), 1)
            else:
                text = body.get("prompt")
                if not isinstance(text, str):
                    raise SimulatedCallError("'prompt' must be a string", param="prompt")
                if not text.strip():
                    return []
                prompt = self._prompts.of_text(text, 1)
        except BadPromptError as error:
            raise SimulatedCallError(str(error)) from None
        return prompt.token_ids.tolist()

    def _check_model(self, model: object) -> None:
        known = (None, self._settings.model, str(self._settings.tokenizer_directory))
        if model not in known:
            raise SimulatedCallError(
                f"The model `{model if isinstance(model, str) else type(model)}` does not exist.",
                param="model",
                status=404,
                kind="NotFoundError",
            )

    def _prompt(self, body: Mapping[str, Any], *, is_chat: bool) -> SimPrompt:
        salt = body.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise SimulatedCallError(
                "'cache_salt' must be a string that is not empty", param="cache_salt"
            )
        output_tokens = self._output_tokens(body)
        try:
            prompt = self._made(body, output_tokens, salt, is_chat=is_chat)
        except BadPromptError as error:
            param = "messages" if is_chat else "prompt"
            raise SimulatedCallError(str(error), param=param) from None
        most, given = self._settings.max_model_tokens, len(prompt.token_ids)
        if given + output_tokens > most:
            raise SimulatedCallError(
                f"This model's maximum context length is {most} tokens. However, you requested "
                f"{output_tokens} output tokens and your prompt contains {given} input tokens, "
                f"for a total of {given + output_tokens} tokens.",
                param="input_tokens",
            )
        return prompt

    def _made(
        self, body: Mapping[str, Any], output_tokens: int, salt: str | None, *, is_chat: bool
    ) -> SimPrompt:
        if is_chat:
            return self._prompts.of_text(_chat(body), output_tokens, salt)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._prompts.of_text(prompt, output_tokens, salt)
        if isinstance(prompt, list):
            return self._prompts.of_ids(prompt, output_tokens, salt)
        raise BadPromptError("'prompt' must be a string or a list of token ids")

    def _output_tokens(self, body: Mapping[str, Any]) -> int:
        for name in ("max_completion_tokens", "max_tokens"):
            tokens = body.get(name)
            if tokens is None:
                continue
            if not isinstance(tokens, int) or tokens < 1:
                raise SimulatedCallError(f"{name} must be a number, at least 1.", param=name)
            # Before so long an answer is made up.
            if tokens > (most := self._settings.max_model_tokens):
                raise SimulatedCallError(
                    f"This model's maximum context length is {most} tokens. However, you "
                    f"requested {tokens} output tokens.",
                    param=name,
                )
            return tokens
        return self._settings.output_tokens


def _chat(body: Mapping[str, Any]) -> str:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise SimulatedCallError("'messages' must be a list", param="messages")
    generation = body.get("add_generation_prompt", True) is not False
    return chat_text(messages, add_generation_prompt=generation)
