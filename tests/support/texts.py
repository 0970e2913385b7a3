"""A small tokenizer, as a file."""

from pathlib import Path

from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel

TOKENS = {"[UNK]": 0, "[CLS]": 1, "good": 2, "bad": 3, "film": 4, "plot": 5, "the": 6}


def write_tokenizer(path: Path, special: str = "[CLS]") -> None:
    """Write one that splits at spaces and puts special tokens before each text."""
    tokenizer = Tokenizer(WordLevel(TOKENS, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    known = [(name, TOKENS[name]) for name in special.split()]
    tokenizer.post_processor = processors.TemplateProcessing(f"{special} $A", None, known)
    tokenizer.enable_padding(pad_id=5)  # as many files say; the settings decide
    tokenizer.save(str(path))
