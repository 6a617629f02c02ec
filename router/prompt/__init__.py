"""From the body of a request to what routing needs: the tokens of its prompt, or its text.

`PromptSource` reads a body in a thread or in place and returns a `Prompt`: exact token ids
where the model's tokenizer and chat template are known (`tokenizer`, `templates`), else
bytes of text. One module for each dialect: chat and completions (`messages`), `anthropic`,
`responses`. What is rendered and encoded is checked against the replicas' own tokenizers.

Called by proxy, feeds and doctor. Imports config.
"""

from router.prompt.prompt import Prompt
from router.prompt.prompt_source import PromptSource, ServedModel

__all__ = [
    "Prompt",
    "PromptSource",
    "ServedModel",
]
