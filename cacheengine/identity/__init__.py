"""What makes KV of two replicas the same: layout, weights, and options of the model.

`ChunkLayout` is the size and shape of a chunk's bytes; `weights_fingerprint` and
`model_options_digest` tell models apart whose names are equal. Chunks are only loaded,
copied or fetched where all three agree.

Called by connector, engine and launch. Imports nothing of the engine.
"""

from cacheengine.identity.layout import ChunkLayout
from cacheengine.identity.model_files import weights_fingerprint
from cacheengine.identity.model_options import model_options_digest, option_of

__all__ = ["ChunkLayout", "model_options_digest", "option_of", "weights_fingerprint"]
