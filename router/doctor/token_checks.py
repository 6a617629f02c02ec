"""Whether the router's tokens of prompts are those that a replica makes."""

import aiohttp

from router.doctor.replica_checks import Examined
from router.feeds import authorization, served_models
from router.prompt import PromptSource

_TEXT_FIX = "set tokenizer.path to the tokenizer of the model that runs there"
_CHAT_FIX = "set tokenizer.chat_template, if the replica runs with --chat-template"


async def check_tokens(
    session: aiohttp.ClientSession, seen: Examined, prompts: PromptSource
) -> None:
    """Compare the router's tokens of the probes with those of the replica's ``/tokenize``."""
    section = seen.section
    if not seen.entries:
        return
    url, headers = seen.config.url, authorization(seen.config)
    await prompts.learn(served_models(seen.entries), session=session, url=url, headers=headers)
    readers = {prompts.reader_for(each) for each in seen.models}
    known = [each for each in readers if each.has_tokenizer]
    if len(known) < len(readers):
        found = f"no tokenizer of {_quoted(seen.roots)} is on this machine: it is matched by text"
        section.note("tokenizer", found, "set tokenizer.path to match by tokens, which is exact")
    results = [each.compared(url) for each in known]
    texts, chats = [text for text, _ in results], [chat for _, chat in results]
    if False in texts:
        found = "it makes other tokens of the same text than the router: matched by text"
        section.trouble("tokens", found, _TEXT_FIX)
    elif False in chats:
        found = "it makes other tokens of the same chat than the router: matched by text"
        section.trouble("chat-template", found, _CHAT_FIX)
    elif None in texts:
        found = "its tokens could not be compared: its /tokenize does not answer as vLLM's does"
        section.note("tokens", found, "the router goes by its own")
    elif known:
        kinds = "texts and chats" if True in chats else "texts"
        section.ok("tokens", f"its tokens of {kinds} are those that the router computes")


def _quoted(names: set[str]) -> str:
    return ", ".join(f"'{each}'" for each in sorted(names))
