"""Text to token ids, exactly as the replicas do it, and no more of it than is new.

`load_directory` builds the tokenizer of a model from its files; `Encoder` encodes pieces
that may be encoded apart and `Memo` remembers them, within bounds; `ReadingTurns` shares
the reading thread between large and small prompts. `Agreement` records which replicas gave
the same ids, as `CHAT_PROBES` and `TEXT_PROBES` found.

Called by `router.prompt` alone.
"""

from router.prompt.tokenizer.encoder import CutText, Encoder
from router.prompt.tokenizer.reading_turns import ReadingTurns
from router.prompt.tokenizer.token_cache import Memo, Piece
from router.prompt.tokenizer.tokenizer import Loaded, load_directory
from router.prompt.tokenizer.trust import CHAT_PROBES, TEXT_PROBES, Agreement, Trust, compare

__all__ = [
    "CHAT_PROBES",
    "TEXT_PROBES",
    "Agreement",
    "CutText",
    "Encoder",
    "Loaded",
    "Memo",
    "Piece",
    "ReadingTurns",
    "Trust",
    "compare",
    "load_directory",
]
