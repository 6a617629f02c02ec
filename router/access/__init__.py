"""Access: clients get in by their keys, each within its rates; administration by its own key.

`Access.guard` is the middleware that lets a request through or refuses it; what the key of a
request allows, the proxy asks its `Grant`. `keys` makes keys and reads those that callers show,
`budget` counts what a key has used.

Called by proxy, controller, the application and the command. Imports config and http.
"""

from router.access.grant import Grant
from router.access.guard import GRANT, Access
from router.access.keys import new_key, sha256_of

__all__ = ["GRANT", "Access", "Grant", "new_key", "sha256_of"]
