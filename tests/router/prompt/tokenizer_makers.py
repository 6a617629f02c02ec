"""Directories with real tokenizers of each kind, trained on the spot on a little text."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ["<s>", "</s>", "<unk>", "<pad>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]

TEXT = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, don't wait!",
    "def encode(self, text: str) -> list[int]:\n    return [self.ids[c] for c in text]\n\n",
    "naïve café Ångström Straße ΣΊΣΥΦΟΣ İstanbul",
    "日本語の文章です。中文句子,没有空格。한국어 문장입니다.",
    "Some more words so that merges are learned: learning, learned, learner, learns, words, word.",
    "the the the then there these those this that with within without and and and for from",
    '{"role": "user", "content": "hello", "tool": {"name": "weather", "arguments": {}}}',
] * 20

LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def _bpe(
    tokenizer: Tokenizer, *, alphabet: bool = False, specials: list[Any] | None = None
) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=SPECIALS if specials is None else specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else ["▁"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)


def _starts(tokenizer: Tokenizer, *, end: bool = False) -> None:
    """Put <s> in front of every text, and </s> behind it where ``end``."""
    tail = " </s>" if end else ""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"<s> $A{tail}",
        pair=f"<s> $A $B{tail}",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")],
    )


def gpt2() -> Tokenizer:
    """Byte-level BPE with its own pattern."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    _bpe(tokenizer, alphabet=True)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def llama3() -> Tokenizer:
    """Byte-level BPE split by GPT-4's pattern, with a beginning."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CL100K), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    _bpe(tokenizer, alphabet=True)
    _starts(tokenizer)
    return tokenizer


def qwen2() -> Tokenizer:
    """Byte-level BPE after NFC."""
    tokenizer = llama3()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def metaspace(scheme: str, *, split: bool) -> Callable[[], Tokenizer]:
    """SentencePiece-like BPE with byte fallback."""

    def make() -> Tokenizer:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
        bytes_ = [f"<0x{one:02X}>" for one in range(256)]
        _bpe(tokenizer, specials=["<unk>", *(one for one in SPECIALS if one != "<unk>"), *bytes_])
        # The byte tokens are part of the vocabulary, not special.
        description = json.loads(tokenizer.to_str())
        description["added_tokens"] = [
            one for one in description["added_tokens"] if one["content"] in SPECIALS
        ]
        tokenizer = Tokenizer.from_str(json.dumps(description))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
        tokenizer.decoder = decoders.Metaspace()
        _starts(tokenizer)
        return tokenizer

    return make


def legacy_llama() -> Tokenizer:
    """Llama 2 as first converted: normalizers in place of a pre-tokenizer."""
    tokenizer = metaspace("first", split=False)()
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


def gemma() -> Tokenizer:
    """Spaces replaced before, nothing prepended."""
    tokenizer = metaspace("never", split=False)()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


def wordpiece() -> Tokenizer:
    """BERT's, with tokens at both ends."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=900, special_tokens=SPECIALS, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    _starts(tokenizer, end=True)
    return tokenizer


def unigram() -> Tokenizer:
    """SentencePiece's own model."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def greedy_specials() -> Tokenizer:
    """Added tokens that take the spaces around them, overlap, or come after normalization."""
    tokenizer = qwen2()
    tokenizer.add_tokens(
        [
            AddedToken("<left>", lstrip=True, normalized=False),
            AddedToken("<right>", rstrip=True, normalized=False),
            AddedToken("<|user|><|assistant|>", normalized=False),
            AddedToken("<|use", normalized=False),
            AddedToken("  ", normalized=False),
            AddedToken("café", normalized=True),
        ]
    )
    return tokenizer


def single_words() -> Tokenizer:
    """An added token that only counts as a word of its own."""
    tokenizer = gpt2()
    tokenizer.add_tokens([AddedToken("dog", single_word=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("END", normalized=False)])
    return tokenizer


def spaced_special() -> Tokenizer:
    """An added token with a space inside."""
    tokenizer = gpt2()
    tokenizer.add_tokens([AddedToken("brown fox", normalized=True)])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": gpt2,
    "llama3": llama3,
    "qwen2": qwen2,
    **{
        f"metaspace-{scheme}-{'split' if split else 'whole'}": metaspace(scheme, split=split)
        for scheme in ("first", "always", "never")
        for split in (True, False)
    },
    "legacy-llama": legacy_llama,
    "gemma": gemma,
    "wordpiece": wordpiece,
    "unigram": unigram,
    "greedy-specials": greedy_specials,
    "single-words": single_words,
    "spaced-special": spaced_special,
}


def write_model(
    directory: Path,
    tokenizer: Tokenizer,
    template: str | None,
    *,
    config: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> Path:
    """Write a model's directory without its weights; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    whole = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        **(config or {}),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(whole))
    (directory / "config.json").write_text(json.dumps({**LLAMA_CONFIG, **(model or {})}))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def texts() -> Iterator[str]:
    """Yield texts long enough to be cut, with special tokens and odd characters in them."""
    words = "the quick brown fox and the lazy dog's café, 123 naïve\n\n日本語 "
    yield ""
    yield words
    yield words * 40
    yield "<s>" + words * 20 + "<|user|>" + words * 20 + "<|assistant|>"
    yield words * 15 + " <left> <right> " + words * 15 + "<|user|><|assistant|> <|user brown fox"
    for shift in range(10):  # so that a cut falls between them at least once
        yield "x" * shift + " brown fox" * 300
