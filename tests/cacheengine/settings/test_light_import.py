"""Reading a configuration without a remote tier loads no store, no serde and no decisions."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent.parent


def test_settings_load_nothing_heavy() -> None:
    code = (
        "import sys; from cacheengine.settings.lmcache_file import load_engine_config\n"
        "load_engine_config(environment={})\n"
        "heavy = ('ssl', 'numpy', 'zstandard', 'msgspec', 'sortedcontainers')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
