"""What tests here share."""

import base64
import random
from typing import Any

from tests.router.prompt.tokenizer_makers import TEXT

VISION = """\
{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>
{%- if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}
{%- if part.type == 'image' %}<|vision|><|pad|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}</s>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def image(content: bytes = b"one", **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(content)}, **more}


WORDS = sorted({word for line in TEXT for word in line.split()})


# No two stretches of it are alike.
LONG = " ".join(random.Random(7).choices(WORDS, k=2000))
